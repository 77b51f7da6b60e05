"""Samples that are rows of tensors: a batch of them is one indexing operation, and one transform, for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from framework.data.draws import Draws
from framework.errors import DataError
from framework.types import Batch, MapDataset

BatchTransform = Callable[[list[Tensor], Draws], Sequence[Tensor]]


@final
class TensorSamples(Dataset[tuple[Tensor, ...]]):
    """A map-style dataset: sample i is row `rows[i]` of each tensor, and `transform` is done to whole batches.

    rows: which rows are the samples, in this order; None: all. Parts of one data set share their tensors that way.
    transform(batch, draws): gets the rows of each tensor, in a list, on the device that computes, and gives as many
    tensors. What it gives for a sample must depend on that sample and its draws alone, so that numbers don't depend on
    the batch size; it may be called for several batches at once. Random numbers come from `draws`, a value with
    uniform(n) and integers(low, high, n).
    Raises DataError where the tensors differ in length.
    """

    def __init__(self, *tensors: Tensor, rows: Tensor | None = None, transform: BatchTransform | None = None) -> None:
        _check_tensors(tensors)
        if not tensors or len({len(tensor) for tensor in tensors}) != 1:
            lengths = ", ".join(str(len(tensor)) for tensor in tensors) or "none"
            raise DataError(f"TensorSamples needs tensors with as many rows each; it got {lengths}.")
        if rows is not None:
            _check_rows(rows, size=len(tensors[0]))
        self.tensors = tensors
        self.rows = rows
        self.transform = transform

    def __len__(self) -> int:
        return len(self.tensors[0] if self.rows is None else self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """One sample, transformed; random numbers follow torch's generator, as with any other dataset's transforms."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"Sample {index} of {len(self)}.")
        position = torch.tensor([index % len(self)], device=self.tensors[0].device)
        batch = Rows(self.tensors, self.rows).gather(position)
        if self.transform is not None:
            batch = _checked(self.transform(batch, Draws(_drawn_key, position)), 1)
        return tuple(tensor[0] for tensor in batch)


def _check_tensors(tensors: tuple[Any, ...]) -> None:
    if not all(isinstance(tensor, Tensor) and tensor.ndim for tensor in tensors):
        raise DataError("TensorSamples takes tensors of at least one dimension. Make them with torch.as_tensor.")


def _check_rows(rows: Any, *, size: int) -> None:
    if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.ndim != 1:
        raise DataError("TensorSamples: rows must be a tensor of int64 with one dimension, such as of torch.randperm.")
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < size:
        raise DataError(f"TensorSamples: rows go from {int(rows.min())} to {int(rows.max())}; there are {size}.")


@dataclass(frozen=True)
class Rows:
    """Samples as rows of tensors. pack: what makes a batch, as `default_collate` would, of its tensors."""

    tensors: tuple[Tensor, ...]
    rows: Tensor | None = None
    transform: BatchTransform | None = None
    pack: Callable[[list[Tensor]], Batch] = field(default=list)

    def __len__(self) -> int:
        return len(self.tensors[0] if self.rows is None else self.rows)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def size_bytes(self) -> int:
        """What the samples take, were they all copied, and their list of rows."""
        listed = 0 if self.rows is None else self.rows.nbytes
        return listed + len(self) * sum(row_bytes(tensor) for tensor in self.tensors)

    def on(self, device: torch.device) -> Rows:
        """The same samples with their tensors on `device`. Only rows that are samples of it are copied there."""
        if device == self.device:
            return self
        used, rows = self.tensors, self.rows
        if rows is not None and len(rows) <= len(used[0]):
            used, rows = tuple(tensor.index_select(0, rows) for tensor in used), None
        return replace(
            self,
            tensors=tuple(tensor.to(device) for tensor in used),
            rows=None if rows is None else rows.to(device),
        )

    def gather(self, index_B: Tensor) -> list[Tensor]:
        """The rows of these samples; `index_B` lies where the tensors do."""
        index_B = index_B if self.rows is None else self.rows.index_select(0, index_B)
        return [tensor.index_select(0, index_B) for tensor in self.tensors]

    def transformed(self, tensors: list[Tensor], index_B: Tensor, *, key: int) -> list[Tensor]:
        """What `gather` gave for the samples `index_B`, which lie on the same device by now, as a model gets it."""
        if self.transform is None:
            return tensors
        return _checked(self.transform(tensors, Draws(key, index_B)), len(index_B))


def rows_of(dataset: MapDataset | Dataset[Any]) -> Rows | None:
    """The samples of a TensorDataset or TensorSamples, or of subsets and concatenations of them; None for others.

    Subclasses don't count: they may have a `__getitem__` of their own.
    """
    if type(dataset) is TensorDataset:
        return Rows(_plain(dataset.tensors))
    if type(dataset) is TensorSamples:
        return Rows(_plain(dataset.tensors), dataset.rows, dataset.transform)
    if type(dataset) is Subset:
        inner = rows_of(dataset.dataset)
        if inner is not None:
            chosen = torch.as_tensor(dataset.indices, dtype=torch.int64, device=inner.device)
            chosen = torch.where(chosen < 0, chosen + len(inner), chosen)  # counted from the end
            if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < len(inner):
                raise DataError(f"A Subset has an index that its dataset of {len(inner)} samples hasn't.")
            return replace(inner, rows=chosen if inner.rows is None else inner.rows[chosen])
    if type(dataset) is ConcatDataset:
        parts = [rows_of(part) for part in dataset.datasets]
        return _joined([part for part in parts if part is not None]) if None not in parts else None
    return None


def _plain(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Without a graph, which every batch would hang on."""
    return tuple(tensor.detach() if tensor.requires_grad else tensor for tensor in tensors)


def _checked(made: Any, number: int) -> list[Tensor]:
    """What a transform of batches gave. Raises DataError where these aren't tensors with a row for each sample."""
    tensors = list(made) if isinstance(made, (list, tuple)) else []
    if not tensors or not all(isinstance(each, Tensor) and each.ndim and len(each) == number for each in tensors):
        seen = [tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__ for each in tensors]
        raise DataError(
            f"The transform of a TensorSamples gave {seen or type(made).__name__} for {number} samples.\n"
            "It must give a list of tensors whose first dimension is the sample."
        )
    return tensors


def row_bytes(tensor: Tensor) -> int:
    return tensor[0].numel() * tensor.itemsize if len(tensor) else 0


def _joined(parts: list[Rows]) -> Rows | None:
    """One after another; None where rows or transforms aren't alike. Copies, but for parts of the same tensors."""
    first = parts[0]
    if any(part.transform is not first.transform or _kind(part) != _kind(first) for part in parts):
        return None
    every = [torch.arange(len(part), device=part.device) for part in parts]
    chosen = [each if part.rows is None else part.rows for part, each in zip(parts, every, strict=True)]
    if all(x is y for part in parts for x, y in zip(part.tensors, first.tensors, strict=True)):
        return replace(first, rows=torch.cat(chosen))
    tensors = zip(*(part.gather(each) for part, each in zip(parts, every, strict=True)), strict=True)
    return replace(first, tensors=tuple(torch.cat(each) for each in tensors), rows=None)


def _kind(part: Rows) -> list[tuple[Any, ...]]:
    return [(tensor.dtype, tensor.shape[1:], tensor.device) for tensor in part.tensors]


def _drawn_key() -> int:
    return int(torch.randint(1 << 62, ()))

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
RowKind = tuple[torch.dtype, torch.Size, torch.device]

_COPIED_AT_ONCE = 1 << 24


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
    def kind(self) -> list[RowKind]:
        """Of each tensor, what has to be alike for samples to make one data set."""
        return [(tensor.dtype, tensor.shape[1:], tensor.device) for tensor in self.tensors]

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
        return _transformed(self.transform, tensors, index_B, key=key)


@dataclass(frozen=True)
class Pieces:
    """Samples of several tensors, of like rows, one after another. rows: which of these are the samples; None: all."""

    parts: tuple[Rows | Pieces, ...]
    rows: Tensor | None = None

    def __len__(self) -> int:
        return sum(map(len, self.parts)) if self.rows is None else len(self.rows)

    @property
    def kind(self) -> list[RowKind]:
        return self.parts[0].kind

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def transform(self) -> BatchTransform | None:
        return self.parts[0].transform

    @property
    def pack(self) -> Callable[[list[Tensor]], Batch]:
        return self.parts[0].pack

    @property
    def size_bytes(self) -> int:
        """What `copied` takes."""
        return len(self) * self._row_bytes

    def copied(self, device: torch.device) -> Rows:
        """The same samples as rows of one tensor each, on `device`; besides these, 16 MB at a time are needed."""
        tensors = [torch.empty((len(self), *shape), dtype=dtype, device=device) for dtype, shape, _ in self.kind]
        step = max(1, _COPIED_AT_ONCE // max(1, self._row_bytes))
        for begin in range(0, len(self), step):
            end = min(begin + step, len(self))
            for whole, piece in zip(tensors, self.gather(torch.arange(begin, end, device=self.device)), strict=True):
                whole[begin:end] = piece
        return Rows(tuple(tensors), transform=self.transform, pack=self.pack)

    def gather(self, index_B: Tensor) -> list[Tensor]:
        """The rows of these samples; `index_B` lies where the tensors do."""
        index_B = index_B if self.rows is None else self.rows.index_select(0, index_B)
        gathered = [torch.empty((len(index_B), *shape), dtype=dtype, device=at) for dtype, shape, at in self.kind]
        begin = 0
        for part in self.parts:
            end = begin + len(part)
            (place,) = torch.where((begin <= index_B) & (index_B < end))
            for whole, piece in zip(gathered, part.gather(index_B.index_select(0, place) - begin), strict=True):
                whole.index_copy_(0, place, piece)
            begin = end
        return gathered

    def transformed(self, tensors: list[Tensor], index_B: Tensor, *, key: int) -> list[Tensor]:
        """As `Rows.transformed`."""
        return _transformed(self.transform, tensors, index_B, key=key)

    @property
    def _row_bytes(self) -> int:
        return sum(shape.numel() * dtype.itemsize for dtype, shape, _ in self.kind)


def rows_of(dataset: MapDataset | Dataset[Any]) -> Rows | Pieces | None:
    """The samples of a TensorDataset or TensorSamples, or of subsets and concatenations of them; None for others.

    Nothing is copied. Subclasses don't count: they may have a `__getitem__` of their own.
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
        rows = [part for part in parts if part is not None]
        return _joined(rows) if len(rows) == len(parts) else None
    return None


def _plain(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Without a graph, which every batch would hang on."""
    return tuple(tensor.detach() if tensor.requires_grad else tensor for tensor in tensors)


def _transformed(transform: BatchTransform | None, tensors: list[Tensor], index_B: Tensor, *, key: int) -> list[Tensor]:
    return tensors if transform is None else _checked(transform(tensors, Draws(key, index_B)), len(index_B))


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


def _joined(parts: Sequence[Rows | Pieces]) -> Rows | Pieces | None:
    """One after another; None where rows or transforms aren't alike."""
    first = parts[0]
    if any(part.transform is not first.transform or part.kind != first.kind for part in parts):
        return None
    plain = [part for part in parts if isinstance(part, Rows)]
    if len(plain) == len(parts) and _share_tensors(plain):
        every = torch.arange(len(plain[0].tensors[0]), device=first.device)
        return replace(plain[0], rows=torch.cat([every if part.rows is None else part.rows for part in plain]))
    return Pieces(tuple(parts))


def _share_tensors(parts: Sequence[Rows]) -> bool:
    return all(x is y for part in parts for x, y in zip(part.tensors, parts[0].tensors, strict=True))


def _drawn_key() -> int:
    return int(torch.randint(1 << 62, ()))

"""Samples that are rows of tensors: a batch is one indexing operation per tensor, and one transform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from framework.data.draws import Draws
from framework.errors import DataError
from framework.types import Batch

BatchTransform = Callable[[list[Tensor], Draws], Sequence[Tensor]]


@final
class TensorSamples(Dataset[tuple[Tensor, ...]]):
    """A map-style dataset: sample i is row `rows[i]` of each tensor, and `transform` is applied to whole batches.

    Args:
        tensors: With as many rows each.
        rows: Which rows are the samples, in this order, int64; None: all. The parts of a dataset share their tensors
            this way.
        transform: transform(batch, draws) gets a list of the rows of each tensor, on the device that computes, and
            returns tensors with as many rows. Its result for a sample must depend on that sample and its draws alone,
            so that numbers don't depend on the batch size; it may be called for several batches at once. Random
            numbers come from draws.uniform(n) and draws.integers(low, high, n).

    Raises:
        DataError: The tensors differ in length.
    """

    def __init__(self, *tensors: Tensor, rows: Tensor | None = None, transform: BatchTransform | None = None) -> None:
        values: tuple[Any, ...] = tensors
        if not all(isinstance(value, Tensor) and value.ndim for value in values):
            raise DataError("TensorSamples takes tensors of at least one dimension. Make them with torch.as_tensor.")
        if len({len(tensor) for tensor in tensors}) != 1:
            lengths = ", ".join(str(len(tensor)) for tensor in tensors) or "none"
            raise DataError(f"TensorSamples needs tensors with as many rows each; it got {lengths}.")
        self.tensors = tensors
        self.rows = rows
        self.transform = transform
        self.pack: Callable[[Sequence[Tensor | None]], Batch] = list
        """Makes a batch of the tensors, as `default_collate` would."""

    def __len__(self) -> int:
        return len(self.tensors[0] if self.rows is None else self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """Return one sample, transformed; random numbers follow torch's generator, as in any other dataset."""
        position = torch.tensor([range(len(self))[index]], device=self.device)
        draws = Draws(lambda: int(torch.randint(1 << 62, ())), position)
        return tuple(tensor[0] for tensor in self.transformed(self.gather(position), draws))

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def size_bytes(self) -> int:
        """The size of the samples if they were copied, and of the list of rows."""
        size_bytes = len(self) * sum(row_bytes(tensor) for tensor in self.tensors)
        if self.rows is not None:
            size_bytes += self.rows.nbytes
        return size_bytes

    def to(self, device: torch.device) -> TensorSamples:
        """Return the same samples with their tensors on `device`. Only rows that are samples are copied."""
        if device == self.device:
            return self
        moved = copy(self)
        if self.rows is None:
            moved.tensors = tuple(tensor.to(device) for tensor in self.tensors)
        elif len(self.rows) <= len(self.tensors[0]):
            moved.tensors = tuple(tensor.index_select(0, self.rows).to(device) for tensor in self.tensors)
            moved.rows = None
        else:
            # Rows that are samples several times are copied once.
            moved.tensors = tuple(tensor.to(device) for tensor in self.tensors)
            moved.rows = self.rows.to(device)
        return moved

    def gather(self, index_B: Tensor) -> list[Tensor]:
        """Return the rows of these samples; `index_B` is on the device of the tensors."""
        if self.rows is not None:
            index_B = self.rows.index_select(0, index_B)
        return [tensor.index_select(0, index_B) for tensor in self.tensors]

    def transformed(self, tensors: list[Tensor], draws: Draws) -> list[Tensor]:
        """Transform what `gather` returned for the samples of `draws`, on the same device.

        Raises DataError if the transform doesn't return tensors with a row for each sample.
        """
        if self.transform is None:
            return tensors
        returned: Any = self.transform(tensors, draws)
        rows = list(returned) if isinstance(returned, (list, tuple)) else []
        if not rows or not all(_has_rows(tensor, len(draws)) for tensor in rows):
            described = [_described(value) for value in rows] or type(returned).__name__
            raise DataError(
                f"The transform of a TensorSamples returned {described} for {len(draws)} samples.\n"
                "It must return a list of tensors whose first dimension is the sample."
            )
        return rows


def as_tensor_samples(dataset: Any) -> TensorSamples | None:
    """Return the samples of a TensorDataset or TensorSamples, or of subsets of them, uncopied.

    None for other datasets, also for subclasses: they may have a `__getitem__` of their own.
    """
    if type(dataset) in (TensorDataset, TensorSamples):
        # Every batch would keep the graph of the tensors alive.
        tensors = [tensor.detach() for tensor in dataset.tensors]
        rows = getattr(dataset, "rows", None)
        transform = getattr(dataset, "transform", None)
        return TensorSamples(*tensors, rows=rows, transform=transform)
    if type(dataset) is not Subset:
        return None

    inner = as_tensor_samples(dataset.dataset)
    if inner is None:
        return None
    chosen = torch.as_tensor(dataset.indices, dtype=torch.int64, device=inner.device)
    # Negative indices count from the end.
    chosen = torch.where(chosen < 0, chosen + len(inner), chosen)
    inner.rows = chosen if inner.rows is None else inner.rows[chosen]
    return inner


def _has_rows(value: Any, number: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == number


def _described(value: Any) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


def row_bytes(tensor: Tensor) -> int:
    return tensor[0].numel() * tensor.itemsize if len(tensor) else 0

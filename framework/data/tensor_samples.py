"""Samples that are rows of tensors: a batch is one indexing operation per tensor, and one transform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from framework.data.sample_random import Draws
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
        given: tuple[Any, ...] = tensors
        if not all(isinstance(tensor, Tensor) and tensor.ndim for tensor in given):
            raise DataError("TensorSamples takes tensors of at least one dimension. Make them with torch.as_tensor.")
        if len({len(tensor) for tensor in tensors}) != 1:
            lengths = ", ".join(str(len(tensor)) for tensor in tensors) or "none"
            raise DataError(f"TensorSamples needs tensors with as many rows each; it got {lengths}.")
        self.tensors = tensors
        self.rows = rows
        self.transform = transform
        self.pack: Callable[[Sequence[Tensor]], Batch] = list
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
        listed = 0 if self.rows is None else self.rows.nbytes
        return listed + len(self) * sum(row_bytes(tensor) for tensor in self.tensors)

    def to(self, device: torch.device) -> TensorSamples:
        """Return the same samples with their tensors on `device`. Only rows that are samples are copied."""
        if device == self.device:
            return self
        there, used = copy(self), self.tensors
        if self.rows is not None and len(self.rows) <= len(used[0]):
            used, there.rows = tuple(tensor.index_select(0, self.rows) for tensor in used), None
        there.tensors = tuple(tensor.to(device) for tensor in used)
        there.rows = None if there.rows is None else there.rows.to(device)
        return there

    def gather(self, index_B: Tensor) -> list[Tensor]:
        """Return the rows of these samples; `index_B` is on the device of the tensors."""
        index_B = index_B if self.rows is None else self.rows.index_select(0, index_B)
        return [tensor.index_select(0, index_B) for tensor in self.tensors]

    def transformed(self, tensors: list[Tensor], draws: Draws) -> list[Tensor]:
        """Transform what `gather` returned for the samples of `draws`, on the same device.

        Raises DataError if the transform doesn't return tensors with a row for each sample.
        """
        if self.transform is None:
            return tensors
        made: Any = self.transform(tensors, draws)
        rows = list(made) if isinstance(made, (list, tuple)) else []
        if not rows or not all(isinstance(each, Tensor) and each.ndim and len(each) == len(draws) for each in rows):
            seen = [tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__ for each in rows]
            raise DataError(
                f"The transform of a TensorSamples returned {seen or type(made).__name__} for {len(draws)} samples.\n"
                "It must return a list of tensors whose first dimension is the sample."
            )
        return rows


def as_tensor_samples(dataset: Any) -> TensorSamples | None:
    """Return the samples of a TensorDataset or TensorSamples, or of subsets of them, uncopied.

    None for other datasets, also for subclasses: they may have a `__getitem__` of their own.
    """
    if type(dataset) in (TensorDataset, TensorSamples):
        tensors = tuple(tensor.detach() for tensor in dataset.tensors)  # every batch would keep the graph alive
        rows, transform = getattr(dataset, "rows", None), getattr(dataset, "transform", None)
        return TensorSamples(*tensors, rows=rows, transform=transform)
    if type(dataset) is Subset:
        inner = as_tensor_samples(dataset.dataset)
        if inner is not None:
            chosen = torch.as_tensor(dataset.indices, dtype=torch.int64, device=inner.device)
            chosen = torch.where(chosen < 0, chosen + len(inner), chosen)  # counted from the end
            inner.rows = chosen if inner.rows is None else inner.rows[chosen]
            return inner
    return None


def row_bytes(tensor: Tensor) -> int:
    return tensor[0].numel() * tensor.itemsize if len(tensor) else 0

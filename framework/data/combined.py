"""Several train loaders at once: each batch has one of each loader, as Lightning's CombinedLoader makes them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from framework.data.batch_lists import BatchLists
from framework.errors import DataError
from framework.types import Collate, MapDataset, Sampler

Mode = Literal["min_size", "max_size", "max_size_cycle"]
"""When an epoch ends: with the shortest loader; with the longest, the others giving None or starting again."""


@dataclass(frozen=True)
class CombinedPart:
    """What is taken from one of the loaders."""

    dataset: MapDataset
    sampler: Sampler
    # Per process.
    batch_size: int
    drop_last: bool
    collate_fn: Collate | None

    def num_batches(self, processes: int) -> int:
        batches = len(self.sampler) / (self.batch_size * processes)  # type: ignore[arg-type]
        return math.floor(batches) if self.drop_last else math.ceil(batches)


@final
class CombinedSamples(Dataset[Any]):
    """The samples of all parts, one part after another, each with the number of its part."""

    def __init__(self, parts: Sequence[CombinedPart]) -> None:
        self.datasets = [part.dataset for part in parts]
        self._ends = list(accumulate(len(dataset) for dataset in self.datasets))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> tuple[int, Any]:
        number = bisect_right(self._ends, index)
        begin = self._ends[number] - len(self.datasets[number])
        return number, self.datasets[number][index - begin]


@final
class CombinedCollate:
    """Makes the batch of each part by its own collate function; None for a part without a sample.

    arrange: puts the batches of all parts, in a list, into the structure that the loaders had.
    """

    def __init__(self, parts: Sequence[CombinedPart], *, arrange: Callable[[list[Any]], Any]) -> None:
        self._collate_fns = [part.collate_fn or default_collate for part in parts]
        self._arrange = arrange

    def __call__(self, samples: list[tuple[int, Any]]) -> Any:
        batches: list[Any] = []
        for number, collate_fn in enumerate(self._collate_fns):
            of_part = [sample for part, sample in samples if part == number]
            batches.append(collate_fn(of_part) if of_part else None)
        return self._arrange(batches)


@final
class CombinedBatches(BatchLists):
    """The batches of all parts, side by side: a group of each part."""

    def __init__(self, parts: Sequence[CombinedPart], *, names: Sequence[str], mode: Mode) -> None:
        self.name = f"several train loaders ({', '.join(names)})"
        self._parts = parts
        self._names = names
        self._mode = mode
        self._processes = 1
        self.nominal_size = sum(part.batch_size for part in parts)

    def split_over(self, processes: int) -> None:
        """Raise DataError unless all processes get equally many samples of each part: losses have equal weights."""
        self._processes = processes
        self.nominal_size = sum(part.batch_size for part in self._parts) * processes
        if self.num_batches == 0:
            raise DataError(f"{self.name}: one of them has no batch. Use a smaller batch_size, or drop_last=False.")
        for part, name in zip(self._parts, self._names, strict=True):
            num_batches = part.num_batches(processes)
            rest = len(part.sampler) % (part.batch_size * processes)  # type: ignore[arg-type]
            if rest % processes and not part.drop_last and num_batches <= self.num_batches:
                raise DataError(
                    f"The last batch of train loader {name} has {rest} samples, which {processes} processes can't "
                    "share evenly. Several train loaders need that.\nGive it drop_last=True, or another batch_size."
                )

    @property
    def num_batches(self) -> int:
        numbers = [part.num_batches(self._processes) for part in self._parts]
        return min(numbers) if self._mode == "min_size" else max(numbers)

    def batches(self) -> list[Sequence[Tensor]]:
        columns = []
        begin = 0
        for part in self._parts:
            generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
            columns.append(self._column(part, generator, begin=begin))
            begin += len(part.dataset)
        return list(zip(*columns, strict=True))

    def _column(self, part: CombinedPart, generator: torch.Generator, *, begin: int) -> list[Tensor]:
        """Return the indices of a part in each batch of the epoch. begin: its first sample's index."""
        batch_size = part.batch_size * self._processes
        num_batches = part.num_batches(self._processes)
        column: list[Tensor] = []
        while len(column) < self.num_batches:
            if column and self._mode == "max_size":
                column.append(torch.empty(0, dtype=torch.int64))
                continue
            order = part.sampler.order(generator, batch_size=batch_size)
            column += (order[0 : len(order)] + begin).split(batch_size)[:num_batches]
        return column[: self.num_batches]

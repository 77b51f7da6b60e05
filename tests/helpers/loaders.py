"""Loaders of map-style datasets, and what they load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Dataset

from tests.helpers.contexts import CPU
from tests.helpers.internals import EvalLoader, MapLoader, StreamLoader, plan_batches


class Made(Dataset[Any]):
    """Samples that a function makes of the index."""

    def __init__(self, make: Callable[[int], Any], size: int) -> None:
        self.make = make
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def eval_loader(
    dataset: Any, *, batch_size: int, rank: int = 0, world_size: int = 1, is_even: bool = False, **how: Any
) -> EvalLoader:
    plan = plan_batches(batch_size=batch_size, global_batch_size=None, world_size=world_size, accumulate=1)
    loader = MapLoader(dataset, split="val", plan=plan, rank=rank, device=CPU, **how)
    return EvalLoader(loader, turns=batch_size, is_even=is_even)


def micro_batches(loader: MapLoader | StreamLoader, epoch: int, start: int = 0) -> Iterator[Any]:
    """Yield the micro-batches of an epoch from a sample on."""
    for window in loader.epoch(epoch, start):
        yield from window.micro_batches

"""The loader that evaluates a map-style dataset."""

from __future__ import annotations

from typing import Any

from framework.data.batching import plan_batches
from framework.data.loader import EvalLoader, MapLoader
from tests.helpers.contexts import CPU


def eval_loader(
    dataset: Any, *, batch_size: int, rank: int = 0, world_size: int = 1, is_even: bool = False, **how: Any
) -> EvalLoader:
    plan = plan_batches(batch_size=batch_size, global_batch_size=None, world_size=world_size, accumulate=1)
    loader = MapLoader(dataset, split="val", plan=plan, rank=rank, device=CPU, **how)
    return EvalLoader(loader, turns=batch_size, is_even=is_even)

"""Each rank's own part of a checkpoint, for strategies whose replicas differ between steps.

Rank 0's is stored where every checkpoint has it: `model`, and in `training` `optimizer`, `callbacks` and `task`. Those
of the other ranks are the list `replicas`, in the order of ranks.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from framework.checkpoint.plain import check_plain
from framework.distributed.collectives import gather_bytes
from framework.distributed.context import Context

REPLICAS = "replicas"
_OWN = ("model", "optimizer", "callbacks", "task")
_log = logging.getLogger("framework")


def replicas(own: Mapping[str, Any], context: Context) -> list[dict[str, Any]]:
    """Return on rank 0 what `own` is on each other rank; on other ranks an empty list. Every rank must call it.

    own: `model` (a state dict), `optimizer`, `callbacks` and `task`, on any device; the returned tensors are on the
    CPU. Everything is sent to rank 0 over the network. Raises CheckpointError for what a checkpoint can't hold.
    """
    check_plain(own)
    file = io.BytesIO()
    if not context.is_main:  # it has its own
        torch.save(dict(own), file)
    mine = torch.frombuffer(file.getbuffer(), dtype=torch.uint8) if file.tell() else torch.empty(0, dtype=torch.uint8)
    given = gather_bytes(mine, context)
    return [torch.load(io.BytesIO(each.numpy().tobytes()), map_location="cpu", weights_only=True) for each in given[1:]]


def replicas_saved(training: Mapping[str, Any]) -> int:
    """Of how many ranks with weights of their own the checkpoint is; 1 where all had the same."""
    return 1 + len(training.get(REPLICAS, ()))


def own_training(training: Mapping[str, Any], context: Context) -> dict[str, Any]:
    """`training` as it was on this rank, of as many as there are."""
    own = {} if context.rank == 0 else training[REPLICAS][context.rank - 1]
    return {name: value for name, value in {**training, **own}.items() if name != REPLICAS}


def mean_training(training: Mapping[str, Any]) -> dict[str, Any]:
    """`training` with the mean over its replicas: of weights, and of what optimizers and callbacks keep in tensors of
    floating point. Everything else is the first rank's. As it is where all ranks had the same; else that is told in the
    log.
    """
    rest = {name: value for name, value in training.items() if name != REPLICAS}
    saved = replicas_saved(training)
    if saved == 1:
        return rest
    _log.warning("the checkpoint has the different weights of %d ranks: all resume from their mean", saved)
    own = [name for name in _OWN if name in training]
    return {**rest, **{name: _mean([training[name], *(each[name] for each in training[REPLICAS])]) for name in own}}


def _mean(values: Sequence[Any]) -> Any:
    """Of trees of one structure. Of an entry that one lacks, or has otherwise, the first's stays."""
    first = values[0]
    if isinstance(first, Tensor):
        fits = all(isinstance(each, Tensor) and each.shape == first.shape for each in values)
        if not fits or not (first.is_floating_point() or first.is_complex()):
            return first
        wide = torch.complex128 if first.is_complex() else torch.float64
        # One by one: a copy of all in double would take twice their memory at once.
        return sum(each.to(wide) for each in values).div(len(values)).to(first.dtype)
    if isinstance(first, Mapping):
        those = [each for each in values if isinstance(each, Mapping)]
        mean: Any = type(first)(  # type: ignore[call-arg]
            (key, _mean([each[key] for each in those]) if all(key in each for each in those) else value)
            for key, value in first.items()
        )
        if hasattr(first, "__dict__"):  # a module's state has its versions there
            mean.__dict__.update(first.__dict__)
        return mean
    if isinstance(first, (list, tuple)):
        if any(type(each) is not type(first) or len(each) != len(first) for each in values):
            return first
        return type(first)(_mean(same) for same in zip(*values, strict=True))
    return first

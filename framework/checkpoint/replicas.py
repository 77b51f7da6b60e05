"""Each rank's own state in a checkpoint, for strategies whose replicas differ between steps.

Rank 0's is stored where every checkpoint has it: `model`, and in `training` `optimizer`, `callbacks` and `task`. Those
of the other ranks are the list `replicas`, in the order of ranks.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from framework.checkpoint.writer import check_plain
from framework.distributed.collectives import gather_to_first
from framework.distributed.context import Context

REPLICAS = "replicas"
_OWN = ("model", "optimizer", "callbacks", "task")
_log = logging.getLogger("framework")


def gather_replicas(own: Mapping[str, Any], context: Context) -> list[dict[str, Any]]:
    """Return on rank 0 what `own` is on each other rank; on other ranks an empty list. Every rank must call it.

    own: `model` (a state dict), `optimizer`, `callbacks` and `task`, on any device; the returned tensors are on the
    CPU. Raises CheckpointError for what a checkpoint can't hold.
    """
    check_plain(own)
    file = io.BytesIO()
    if not context.is_main:  # it has its own
        torch.save(dict(own), file)
    given = gather_to_first(file.getvalue(), context)
    return [torch.load(io.BytesIO(each), map_location="cpu", weights_only=True) for each in given[1:]]


def own_training(training: Mapping[str, Any], context: Context, *, replicas_differ: bool) -> dict[str, Any]:
    """Return `training` as it was on this rank; the mean if replicas are equal now, or their number has changed."""
    replicas = training.get(REPLICAS, [])
    if not replicas_differ or 1 + len(replicas) != context.world_size:
        return mean_training(training)
    own = {} if context.is_main else replicas[context.rank - 1]
    return {name: value for name, value in {**training, **own}.items() if name != REPLICAS}


def mean_training(training: Mapping[str, Any]) -> dict[str, Any]:
    """Return `training` with the mean over its replicas, and log that, if they differ.

    Floating-point tensors of weights, optimizers and callbacks are averaged. Everything else is rank 0's.
    """
    rest = {name: value for name, value in training.items() if name != REPLICAS}
    if replicas := training.get(REPLICAS):
        ranks = 1 + len(replicas)
        _log.warning("the checkpoint has the different weights of %d ranks: all resume from their mean", ranks)
        own = [name for name in _OWN if name in training]
        rest |= {name: _mean([training[name], *(each[name] for each in replicas)]) for name in own}
    return rest


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean of trees of tensors. An entry that one of them lacks, or has in another shape, is the first's."""
    first = values[0]
    if any(type(each) is not type(first) for each in values):
        return first
    if isinstance(first, Mapping):
        mean: Any = copy(first)  # with the versions that a module's state has as an attribute
        for key in first:
            if all(key in each for each in values):
                mean[key] = _mean([each[key] for each in values])
        return mean
    if isinstance(first, (list, tuple)) and len({len(each) for each in values}) == 1:
        return type(first)(map(_mean, zip(*values, strict=True)))
    if not isinstance(first, Tensor) or len({each.shape for each in values}) > 1:
        return first
    if not (first.is_floating_point() or first.is_complex()):
        return first
    wide = torch.complex128 if first.is_complex() else torch.float64
    # One by one: a copy of all in double precision would take twice their memory at once.
    return sum(each.to(wide) for each in values).div(len(values)).to(first.dtype)

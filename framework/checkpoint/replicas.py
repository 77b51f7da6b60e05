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
# The entries of `training` that each replica has of its own.
_OWN = ("model", "optimizer", "callbacks", "task")

_log = logging.getLogger("framework")


def gather_replicas(own: Mapping[str, Any], context: Context) -> list[dict[str, Any]]:
    """Return on rank 0 what `own` is on each other rank; on other ranks an empty list. Every rank must call it.

    Raises CheckpointError for what a checkpoint can't hold.

    Args:
        own: `model` (a state dict), `optimizer`, `callbacks` and `task`, on any device; the returned tensors are on the
            CPU.
    """
    check_plain(own)
    file = io.BytesIO()
    # Rank 0 has its own already.
    if not context.is_main:
        torch.save(dict(own), file)
    of_ranks = gather_to_first(file.getvalue(), context)
    return [torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True) for saved in of_ranks[1:]]


def own_training(training: Mapping[str, Any], context: Context, *, replicas_differ: bool) -> dict[str, Any]:
    """Return `training` as it was on this rank; the mean if replicas are equal now, or their number has changed."""
    replicas = training.get(REPLICAS, [])
    if not replicas_differ or 1 + len(replicas) != context.world_size:
        return mean_training(training)
    own = {} if context.is_main else replicas[context.rank - 1]
    return _without_replicas({**training, **own})


def mean_training(training: Mapping[str, Any]) -> dict[str, Any]:
    """Return `training` with the mean over its replicas, and log that, if they differ.

    Floating-point tensors of weights, optimizers and callbacks are averaged. Everything else is rank 0's.
    """
    mean = _without_replicas(training)
    replicas = training.get(REPLICAS)
    if not replicas:
        return mean
    _log.warning("the checkpoint has the different weights of %d ranks: all resume from their mean", 1 + len(replicas))
    for name in _OWN:
        if name in training:
            mean[name] = _mean([training[name], *(replica[name] for replica in replicas)])
    return mean


def mean_task_state(training: Mapping[str, Any]) -> Any:
    """Return the task's state in `training`, the mean over its replicas if they differ."""
    replicas = training.get(REPLICAS)
    if not replicas:
        return training["task"]
    return _mean([training["task"], *(replica["task"] for replica in replicas)])


def _without_replicas(training: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in training.items() if name != REPLICAS}


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean of trees of tensors. An entry that one of them lacks, or has in another shape, is the first's."""
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        return first
    if isinstance(first, Mapping):
        # A copy has the versions that a module's state has as an attribute.
        mean: Any = copy(first)
        for key in first:
            if all(key in value for value in values):
                mean[key] = _mean([value[key] for value in values])
        return mean
    if isinstance(first, (list, tuple)):
        if any(len(value) != len(first) for value in values):
            return first
        return type(first)(map(_mean, zip(*values, strict=True)))
    if isinstance(first, Tensor):
        return _mean_tensor(values)
    return first


def _mean_tensor(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    if any(tensor.shape != first.shape for tensor in tensors):
        return first
    if not (first.is_floating_point() or first.is_complex()):
        return first
    wide = torch.complex128 if first.is_complex() else torch.float64
    # One by one: a copy of all in double precision would take twice their memory at once.
    total: Any = sum(tensor.to(wide) for tensor in tensors)
    return total.div(len(tensors)).to(first.dtype)  # type: ignore[no-any-return]

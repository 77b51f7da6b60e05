"""Merge torchmetrics over ranks by their own rules, through one gather of whole states.

The only module that uses private parts of torchmetrics: `_sync_dist`, which its `compute` calls, `_to_sync` and
`_reductions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from framework.distributed.collectives import gather_to_all
from framework.distributed.context import Context

# Classes whose value depends on the number of processes, and why.
_REFUSED = {
    "BootStrapper": "draws samples",
    "InceptionScore": "draws samples",
    "KernelInceptionDistance": "draws samples",
    "PerceptualPathLength": "draws samples",
    "Running": "depends on the order of batches",
    "MetricTracker": "keeps one metric after another, and is never reset",
}


def is_torchmetric(metric: object) -> bool:
    """Return True for a torchmetrics.Metric, without importing torchmetrics."""
    return hasattr(metric, "metric_state") and hasattr(metric, "dist_sync_fn")


def why_not_merged(metric: object) -> str | None:
    """Return why a metric of torchmetrics has another value on several processes; None if it has the same."""
    parts: Iterable[object] = [metric]
    if isinstance(metric, torch.nn.Module):
        # The metric itself and those that it wraps.
        parts = metric.modules()
    for part in parts:
        for kind in type(part).__mro__:
            if kind.__name__ in _REFUSED and kind.__module__.startswith("torchmetrics."):
                return f"{type(part).__name__} {_REFUSED[kind.__name__]}"
    return None


def sync_through(metric: Any, context: Context) -> None:
    """Let `metric.compute()` merge the states of all ranks; from then on, every rank must call it.

    A wrapper's inner metrics are merged when it computes them. `dist_sync_on_step` and `sync_on_compute` of a metric
    have no effect: ranks may have different numbers of batches, and a value of one rank is nobody's.
    """
    for part in filter(is_torchmetric, metric.modules()):
        part.dist_sync_on_step = False
        part.sync_on_compute = True
        part._to_sync = True
        part._sync_dist = partial(_merge_ranks, part, context)
        part.distributed_available_fn = partial(bool, context.world_size > 1)


def _merge_ranks(metric: Any, context: Context, *_: Any, **__: Any) -> None:
    """Replace the metric's state by that of all ranks; torchmetrics restores its own after `compute`.

    Ranks without data are left out: an empty state may have another type or shape.
    """
    own_state = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), dict(metric.metric_state))
    had_data = metric.update_count > 0
    answers = gather_to_all((had_data, own_state), context)
    states = [state for had_data, state in answers if had_data]
    if not states:
        return
    for name, reduction in metric._reductions.items():
        merged = _merged([state[name] for state in states], reduction)
        setattr(metric, name, tree_map_only(Tensor, lambda tensor: tensor.to(metric.device), merged))


def _merged(values: list[Any], reduction: Callable[[Any], Any] | None) -> Any:
    """Return one state of all ranks: lists are joined in the order of ranks, tensors reduced by the metric's rule."""
    concatenates = getattr(reduction, "__name__", "") == "dim_zero_cat"
    if any(isinstance(value, list) for value in values):
        whole = []
        for value in values:
            if isinstance(value, list):
                whole += value
            else:
                # A rank may have concatenated its list to a tensor already.
                whole.append(value)
        if reduction is None or concatenates:
            return whole
        return reduction(whole)
    if len(values) == 1:
        return values[0]
    if concatenates:
        return torch.cat(values)
    stacked = torch.stack(values)
    if reduction is None:
        return stacked
    return reduction(stacked)

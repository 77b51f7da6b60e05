"""Merge torchmetrics over ranks by their own rules, through our collectives."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from framework.distributed.collectives import gather_to_all
from framework.distributed.context import Context


def is_torchmetric(metric: object) -> bool:
    """Return True for a torchmetrics.Metric, without importing torchmetrics."""
    return hasattr(metric, "metric_state") and hasattr(metric, "dist_sync_fn")


def sync_through(metric: Any, context: Context) -> None:
    """Let `metric.compute()` merge the states of all ranks; from then on, every rank must call it.

    Ranks without data are left out: an empty state may have another dtype, which torchmetrics can't join.
    """

    def gathered(tensor: Tensor, group: Any) -> list[Tensor]:  # noqa: ARG001  torchmetrics' `group`, of which there is one
        of_ranks = gather_to_all((metric.update_count > 0, tensor.detach().cpu()), context)
        tensors = [each.to(tensor.device) for had_data, each in of_ranks if had_data]
        return tensors or [tensor]

    metric.dist_sync_fn = gathered
    metric.distributed_available_fn = lambda: context.world_size > 1

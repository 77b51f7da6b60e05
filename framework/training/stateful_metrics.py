"""Metrics that are no sums: updated with each batch, merged over ranks once after an evaluation, then computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from framework.config.suggest import did_you_mean, nearest
from framework.distributed.collectives import gather_to_all
from framework.distributed.context import Context
from framework.distributed.metric_sync import is_torchmetric, sync_through, why_not_merged
from framework.errors import TargetError
from framework.media import Media, Table, Text
from framework.tasks.supervised import describe


@final
class StatefulMetrics:
    """The task's stateful metrics (StatefulMetric or torchmetrics), which are reset first.

    Raises TargetError for one of torchmetrics that would have another value on several processes.
    """

    def __init__(self, task: Any, context: Context) -> None:
        self._task = type(task).__name__
        self._metrics = _metrics_of(task)
        # Vectors that were computed beside numbers.
        self._tables: dict[str, Media] = {}
        for name, metric in self._metrics.items():
            if context.world_size > 1:
                self._check_merges(name, world_size=context.world_size)
            metric.reset()

    def update(self, updates: Mapping[str, tuple[Any, ...]]) -> None:
        """Update each metric with its arguments. Raises TargetError for one that the task doesn't have."""
        for name, arguments in updates.items():
            # The metric of that name, or all of a collection.
            metrics = [self._metrics[key] for key in self._metrics if key == name or key.startswith(f"{name}/")]
            if not metrics:
                hint = did_you_mean(nearest(name, self._metrics))
                raise TargetError(
                    f"{self._task} returned an update of {name!r}, and its attribute `metrics` has no such object with "
                    f"update, state, merge and compute.{hint}"
                )
            for metric in metrics:
                metric.update(*arguments)

    def compute(self, context: Context) -> dict[str, float]:
        """Merge the states of all ranks and return the values by name. Every rank must call it."""
        self._merge(context)
        values: dict[str, float] = {}
        for name, metric in self._metrics.items():
            computed = metric.compute()
            if not isinstance(computed, Mapping):
                values[name] = self._number(computed, metric=name)
                continue
            for key, value in computed.items():
                whole_name = f"{name}/{key}".rstrip("/")
                if is_vector(value):
                    self._tables[whole_name] = Table(["place", str(key)], list(enumerate(value.tolist())))
                else:
                    values[whole_name] = self._number(value, metric=whole_name)
        return values

    def _check_merges(self, name: str, *, world_size: int) -> None:
        """Raise TargetError for a metric of torchmetrics that would have another value on several processes."""
        reason = why_not_merged(self._metrics[name])
        if reason is not None:
            raise TargetError(
                f"The metric {name!r} of {self._task}: {reason}, so its value on {world_size} processes wouldn't be "
                "that of one.\nLeave it out, or evaluate in one process: job=eval with topology.procs_per_node=1."
            )

    def _merge(self, context: Context) -> None:
        """Give the metrics the states of all ranks: ours in one exchange, those of torchmetrics one by one."""
        merged = {name: metric for name, metric in self._metrics.items() if not is_torchmetric(metric)}
        if merged and context.world_size > 1:
            states = {name: _on_cpu(metric.state()) for name, metric in merged.items()}
            of_ranks = gather_to_all(states, context)
            for name, metric in merged.items():
                metric.reset()
                for states in of_ranks:
                    metric.merge(states[name])
        for name, metric in self._metrics.items():
            if name not in merged:
                sync_through(metric, context)

    def texts(self) -> dict[str, Table | Text]:
        """Return what metrics with a method `text` return, after `compute`."""
        texts: dict[str, Table | Text] = {}
        for name, metric in self._metrics.items():
            text = metric.text() if hasattr(metric, "text") else None
            if isinstance(text, (Table, Text)):
                texts[name] = text
            elif text:
                texts[name] = Text(text)
        return texts

    def media(self) -> dict[str, Media]:
        """Return the media of the metrics that have any, and tables of vectors beside numbers. After `compute`."""
        media: dict[str, Media] = dict(self._tables)
        for name, metric in self._metrics.items():
            if not hasattr(metric, "media"):
                continue
            shown = metric.media()
            if not isinstance(shown, Mapping):
                media[name] = shown
                continue
            for key, value in shown.items():
                media[f"{name}/{key}".rstrip("/")] = value
        return media

    def _number(self, value: Any, *, metric: str) -> float:
        is_scalar = isinstance(value, Tensor) and value.numel() == 1
        if is_scalar or isinstance(value, (int, float)):
            return float(value)
        raise TargetError(
            f"The metric {metric!r} of {self._task} computes {describe(value)}. It must be one number, or a dict of "
            "numbers and vectors by name: average it over classes, for instance."
        )


def is_vector(value: Any) -> bool:
    """Return True for a tensor of several numbers, or of none, in a row."""
    return isinstance(value, Tensor) and value.ndim == 1 and value.numel() != 1


def _metrics_of(task: Any) -> dict[str, Any]:
    """Return the task's stateful metrics by name; those of a torchmetrics.MetricCollection one by one, as NAME/KEY."""
    named = getattr(task, "metrics", None)
    if not isinstance(named, Mapping):
        return {}
    metrics = {}
    for name, metric in named.items():
        if hasattr(metric, "compute_groups"):
            for key, member in metric.items():
                metrics[f"{name}/{key}"] = member
        elif callable(getattr(metric, "update", None)):
            metrics[name] = metric
    return metrics


def _on_cpu(state: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), state)

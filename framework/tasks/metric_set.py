"""The metrics of a task by name: what they are given for a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, final

from torch import Tensor

from framework.errors import ConfigError
from framework.tasks.metrics import MeanAbsoluteError, Metric
from framework.types import StatefulMetric, SumCount


@final
class MetricSet:
    """Metrics that add up over batches, and metrics with a state.

    Raises:
        ConfigError: One of them is only named.
    """

    def __init__(self, metrics: Mapping[str, Metric | StatefulMetric] | None) -> None:
        for name, metric in (metrics or {}).items():
            check_is_built(f"metrics.{name}", metric)
        self.by_name: dict[str, Any] = dict(metrics or {})
        self.sums: dict[str, Metric] = {}
        self.stateful: dict[str, Any] = {}
        for name, metric in self.by_name.items():
            if hasattr(metric, "update"):
                self.stateful[name] = metric
            else:
                self.sums[name] = metric
        self._take_input = {name for name, metric in self.stateful.items() if _takes_input(metric)}

    def set_ignore_index(self, index: float | None, *, of_numbers: bool) -> None:
        """Have metrics ignore targets of this value, unless they say otherwise. of_numbers: metrics of numbers, too."""
        for metric in self.by_name.values():
            for single in _single_metrics(metric):
                if isinstance(single, MeanAbsoluteError) and not of_numbers:
                    continue
                if getattr(single, "ignore_index", ...) is None:
                    single.ignore_index = index

    def updates(
        self, output: Any, target: Tensor, input_: Any, *, probabilities: Callable[[Any], Tensor] | None
    ) -> dict[str, tuple[Any, ...]]:
        """Return the arguments of the stateful metrics' `update` by the metrics' names.

        probabilities: of an output of scores; None if the output isn't that.
        """
        updates: dict[str, tuple[Any, ...]] = {}
        for name, metric in self.stateful.items():
            predicted = output
            if probabilities is not None and _takes_probabilities(metric):
                predicted = probabilities(output)
            if name in self._take_input:
                updates[name] = (predicted, target, input_)
            else:
                updates[name] = (predicted, target)
        return updates

    def sums_of(self, output: Any, target: Tensor) -> dict[str, SumCount]:
        return {name: metric(output, target) for name, metric in self.sums.items()}


def check_is_built(name: str, value: Any) -> None:
    """Raise ConfigError for a loss or metric that is only named, or a partial's settings."""
    if callable(value) or hasattr(value, "update"):
        return
    target = "package.module.Name"
    if isinstance(value, str):
        target = value if "." in value else f"torch.nn.{value}"
    raise ConfigError(
        f"task.{name}={value}: must be a mapping with `_target_`, of a class or function. "
        f"Type task.{name}._target_={target}"
    )


def _takes_input(metric: Any) -> bool:
    return "input" in signature(metric.update).parameters


def _takes_probabilities(metric: Any) -> bool:
    """Return True for torchmetrics' classification, alone or in a MetricCollection."""
    first = _single_metrics(metric)[0]
    return type(first).__module__.startswith("torchmetrics.classification")


def _single_metrics(metric: Any) -> list[Any]:
    """Return the metrics of a torchmetrics.MetricCollection, and any other metric as it is."""
    is_collection = hasattr(metric, "compute_groups")
    if is_collection:
        return list(metric.values())
    return [metric]

"""Metrics of a batch as (sum, count), which add up over batches and ranks; others that keep a state; class predictions.

Nothing here waits for the device. Shapes: B samples, C classes,
`...` any further dimensions.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from framework.errors import ConfigError, DataError

_LARGEST_EXPONENT = 700.0  # beyond it a double overflows


class Metric(Protocol):
    """A metric that `Supervised` computes: any callable that returns (sum, count) for a batch's output and target.

    If it has an attribute `ignore_index` that is None, `Supervised` sets it to the `ignore_index` of the loss.
    """

    def __call__(self, output: Any, target: Any, /) -> tuple[Tensor, int | Tensor]: ...


@final
class Accuracy:
    """Share of targets whose class is among the `top_k` highest scores.

    output: scores of shape (B, C, ...), of which only the order counts. target: class indices of shape (B, ...).
    ignore_index: targets with this value, such as padding, are not counted; None takes the loss's, if it has one.
    """

    def __init__(self, top_k: int = 1, ignore_index: int | None = None) -> None:
        if top_k < 1:
            raise ConfigError(f"Accuracy got top_k={top_k}. Use 1 or more.")
        self.top_k = top_k
        self.ignore_index = ignore_index

    def __call__(self, output: Tensor, target: Tensor, /) -> tuple[Tensor, int | Tensor]:
        self._check(output, target)
        if self.top_k == 1:
            correct = output.argmax(dim=1) == target
        else:
            correct = (output.topk(self.top_k, dim=1).indices == target.unsqueeze(1)).any(dim=1)
        if self.ignore_index is None:
            return correct.sum(), target.numel()
        counted = target != self.ignore_index
        return (correct & counted).sum(), counted.sum()

    def _check(self, output: Tensor, target: Tensor) -> None:
        if output.ndim < 2 or output.shape[:1] + output.shape[2:] != target.shape or target.is_floating_point():
            raise DataError(
                f"Accuracy got scores of shape {tuple(output.shape)} and targets of shape {tuple(target.shape)}, "
                f"{target.dtype}.\nIt takes scores of shape (samples, classes, ...) and class indices of shape "
                "(samples, ...), of an integer type."
            )
        if self.top_k > output.shape[1]:
            raise ConfigError(f"Accuracy got top_k={self.top_k}, but the model gives {output.shape[1]} classes.")


@final
class MeanAbsoluteError:
    """Mean of |output - target| over all elements. Both have the same shape.

    ignore_index: elements whose target has this value are not counted; None takes the loss's, if it has one.
    """

    def __init__(self, ignore_index: float | None = None) -> None:
        self.ignore_index = ignore_index

    def __call__(self, output: Tensor, target: Tensor, /) -> tuple[Tensor, int | Tensor]:
        if output.shape != target.shape:
            raise DataError(
                f"MeanAbsoluteError got outputs of shape {tuple(output.shape)} and targets of shape "
                f"{tuple(target.shape)}. They must be the same; broadcasting would compare the wrong pairs."
            )
        difference = (output - target).abs()
        # Sums of half-precision values would stop growing early.
        dtype = torch.promote_types(difference.dtype, torch.float32)
        if self.ignore_index is None:
            return difference.sum(dtype=dtype), difference.numel()
        counted = target != self.ignore_index
        # Not multiplied: where the output isn't finite, that would be NaN.
        return difference.where(counted, 0).sum(dtype=dtype), counted.sum()


class _ClassCounts:
    """Counts of (target, predicted class), which stay on the device. Base of the metrics below.

    output: scores of shape (B, C, ...). target: class indices of shape (B, ...). ignore_index: as for `Accuracy`.
    """

    def __init__(self, ignore_index: int | None = None) -> None:
        self.ignore_index = ignore_index
        self.counts: Tensor | None = None  # (C, C), int64; None before the first batch

    def reset(self) -> None:
        self.counts = None

    def update(self, output: Tensor, target: Tensor) -> None:
        classes = output.shape[1]
        target, predicted = target.flatten(), output.argmax(dim=1).flatten()
        places = target * classes + predicted
        if self.ignore_index is not None:  # goes to a place behind the table
            places = places.where(target != self.ignore_index, classes**2)
        # Neither `bincount` nor a choice by a mask, which wait for the device.
        own = places.new_zeros(classes**2 + 1).scatter_add_(0, places, torch.ones_like(places))
        own = own[:-1].view(classes, classes)
        self.counts = own if self.counts is None else self.counts + own

    def state(self) -> Tensor | None:
        return self.counts

    def merge(self, state: Tensor | None) -> None:
        if state is not None:
            self.counts = state if self.counts is None else self.counts + state


@final
class F1(_ClassCounts):
    """The F1 score of each class, averaged over the classes that occur or are predicted (macro)."""

    def compute(self) -> float:
        if self.counts is None:
            return math.nan
        table = self.counts.double()
        both = table.sum(dim=0) + table.sum(dim=1)
        return float((2 * table.diagonal() / both)[both > 0].mean())


@final
class ConfusionMatrix(_ClassCounts):
    """A table of target classes (rows) and predicted classes (columns), as text in the logs; no number.

    max_classes: With more there is no table, nor for targets that are no classes.
    """

    def __init__(self, ignore_index: int | None = None, max_classes: int = 50) -> None:
        super().__init__(ignore_index)
        self._max_classes = max_classes

    def update(self, output: Tensor, target: Tensor) -> None:
        if output.ndim > 1 and output.shape[1] <= self._max_classes and not target.is_floating_point():
            super().update(output, target)

    def compute(self) -> dict[str, float]:
        return {}

    def text(self) -> str:
        """Return the table in Markdown, which TensorBoard renders; empty without one."""
        if self.counts is None:
            return ""
        rows = self.counts.tolist()
        head = ["target \\ predicted", *map(str, range(len(rows)))]
        lines = [head, ["---"] * len(head), *([str(label), *map(str, row)] for label, row in enumerate(rows))]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@final
class Perplexity:
    """exp of the mean cross entropy of all targets. output, target and ignore_index as for `Accuracy`."""

    def __init__(self, ignore_index: int | None = None) -> None:
        self.ignore_index = ignore_index
        self.reset()

    def reset(self) -> None:
        self._sums: list[Tensor] = []

    def update(self, output: Tensor, target: Tensor) -> None:
        ignored = -100 if self.ignore_index is None else self.ignore_index
        total = cross_entropy(output.float(), target, ignore_index=ignored, reduction="sum").double()
        self._sums.append(torch.stack([total, (target != ignored).sum().double()]))

    def state(self) -> list[Tensor]:
        return [torch.stack(self._sums).sum(dim=0)] if self._sums else []

    def merge(self, state: list[Tensor]) -> None:
        self._sums += state

    def compute(self) -> float:
        if not self._sums:
            return math.nan
        total, count = torch.stack(self._sums).sum(dim=0).tolist()
        return math.exp(min(total / count, _LARGEST_EXPONENT)) if count else math.nan


@final
class Classes:
    """For `task.predictions`: each sample's class with the highest score, and its probability."""

    def __call__(self, output: Tensor, /) -> dict[str, Tensor]:
        """Return `class` (B,) int64 and `probability` (B,) float32. output: scores before softmax, shape (B, C)."""
        if output.ndim != 2:
            raise DataError(
                f"Classes got scores of shape {tuple(output.shape)}. It takes one row of class scores a sample; for "
                "another output set task.predictions=null."
            )
        best = output.float().softmax(dim=1).max(dim=1)
        return {"class": best.indices, "probability": best.values}

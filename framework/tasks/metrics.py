"""Metrics of a batch as (sum, count), which add up over batches and ranks; and the classes that a classifier predicts.

Nothing here waits for the device. Shapes: B samples, C classes,
`...` any further dimensions.
"""

from __future__ import annotations

from typing import Any, Protocol, final

import torch
from torch import Tensor

from framework.errors import ConfigError, DataError


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

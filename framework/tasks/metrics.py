"""Metrics as (sum, count) of a batch, which add up over batches and ranks; metrics with a state; class predictions.

Only `compute`, `text` and `media` wait for the device. Shapes: B samples, C classes, `...` any further dimensions.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, cross_entropy

from framework.errors import ConfigError, DataError
from framework.media import Drawing, Media, Table

# Of an image of WorstMistakes, in pixels.
_LARGEST_SIDE = 128
# exp of more overflows a double.
_LARGEST_EXPONENT = 700.0


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
        # Shape (C, C), int64; None before the first batch.
        self.counts: Tensor | None = None

    def reset(self) -> None:
        self.counts = None

    def update(self, output: Tensor, target: Tensor) -> None:
        classes = output.shape[1]
        target = target.flatten()
        predicted = output.argmax(dim=1).flatten()

        # Each target is counted in its cell of the flattened matrix; ignored ones in an extra cell, which is dropped.
        cells = target * classes + predicted
        if self.ignore_index is not None:
            cells = cells.where(target != self.ignore_index, classes**2)
        # `bincount`, or indexing by a mask, would wait for the device.
        counts = cells.new_zeros(classes**2 + 1).scatter_add_(0, cells, torch.ones_like(cells))
        self.merge(counts[:-1].view(classes, classes))

    def state(self) -> Tensor | None:
        return self.counts

    def merge(self, state: Tensor | None) -> None:
        if state is None:
            return
        if self.counts is None:
            self.counts = state
        else:
            self.counts = self.counts + state


@final
class F1(_ClassCounts):
    """The F1 score of each class, averaged over the classes that occur or are predicted (macro)."""

    def compute(self) -> float:
        if self.counts is None:
            return math.nan
        counts = self.counts.double()
        num_targets = counts.sum(dim=1)
        num_predicted = counts.sum(dim=0)
        occurrences = num_targets + num_predicted
        scores = 2 * counts.diagonal() / occurrences
        return float(scores[occurrences > 0].mean())


@final
class ConfusionMatrix(_ClassCounts):
    """Counts of target classes (rows) by predicted classes (columns), logged as table and image; no number.

    The accuracy of each class (its recall) is logged as a table, too.

    max_classes: with more classes nothing is logged, nor for floating-point targets.
    """

    def __init__(self, ignore_index: int | None = None, max_classes: int = 50) -> None:
        super().__init__(ignore_index)
        self._max_classes = max_classes

    def update(self, output: Tensor, target: Tensor) -> None:
        if output.ndim > 1 and output.shape[1] <= self._max_classes and not target.is_floating_point():
            super().update(output, target)

    def compute(self) -> dict[str, float]:
        return {}

    def text(self) -> Table | None:
        """Return the counts as a table; None without any."""
        if self.counts is None:
            return None
        counts = self.counts.tolist()
        classes = [str(label) for label in range(len(counts))]
        return Table(["target \\ predicted", *classes], [[label, *row] for label, row in enumerate(counts)])

    def media(self) -> dict[str, Media]:
        """Return the matrix as an image, and the accuracy of each class as the table `classes`."""
        if self.counts is None:
            return {}
        from framework.tasks.pictures import confusion_picture

        counts = self.counts.tolist()
        rows = []
        for label, row in enumerate(counts):
            samples = sum(row)
            accuracy = row[label] / samples if samples else math.nan
            rows.append((label, accuracy, samples))
        picture = Drawing(partial(confusion_picture, counts))
        return {"": picture, "classes": Table(["class", "accuracy", "samples"], rows)}


@final
class WorstMistakes:
    """The misclassified images with the largest cross entropy, over all ranks, logged as one image; no number.

    For scores of shape (B, C) and inputs of shape (B, 1, H, W) or (B, 3, H, W); others give nothing. Each image is
    scaled from its own range to black and white.

    number: how many images. ignore_index: as for `Accuracy`.
    """

    def __init__(self, number: int = 8, ignore_index: int | None = None) -> None:
        self.ignore_index = ignore_index
        self._number = number
        self.reset()

    def reset(self) -> None:
        # Losses, targets, predicted classes, each of shape (K,), and images of shape (K, C, H, W), uint8. What is no
        # mistake has the loss -inf.
        self._worst: list[Tensor] | None = None

    def update(self, output: Tensor, target: Tensor, input: Any) -> None:
        is_image = isinstance(input, Tensor) and input.ndim == 4 and input.shape[1] in (1, 3)
        if not is_image or output.ndim != 2 or target.ndim != 1 or target.is_floating_point():
            return

        predicted = output.argmax(dim=1)
        is_wrong = predicted != target
        if self.ignore_index is not None:
            is_wrong &= target != self.ignore_index
        losses = cross_entropy(output.float(), target.where(is_wrong, 0), reduction="none")
        losses = losses.nan_to_num(nan=math.inf).where(is_wrong, -math.inf)

        places = losses.topk(min(self._number, len(losses))).indices
        images = _small_images(input[places.to(input.device)])
        self.merge([losses[places], target[places], predicted[places], images])

    def state(self) -> list[Tensor] | None:
        return self._worst

    def merge(self, state: list[Tensor] | None) -> None:
        if state is None:
            return
        if self._worst is not None:
            state = [torch.cat(pair) for pair in zip(self._worst, state, strict=True)]
            losses = state[0]
            places = losses.topk(min(self._number, len(losses))).indices
            state = [values[places.to(values.device)] for values in state]
        self._worst = state

    def compute(self) -> dict[str, float]:
        return {}

    def media(self) -> dict[str, Media]:
        if self._worst is None:
            return {}
        losses, targets, predictions, images = (values.cpu() for values in self._worst)
        # Mistakes come first.
        number = int((losses > -math.inf).sum())
        if number == 0:
            return {}
        from framework.tasks.pictures import grid_picture

        captions = []
        for place in range(number):
            captions.append(f"{targets[place]} taken for {predictions[place]}\nloss {losses[place]:.3g}")
        return {"": Drawing(partial(grid_picture, list(images[:number].numpy()), captions))}


def _small_images(images: Tensor) -> Tensor:
    """Return images as uint8, of `_LARGEST_SIDE` pixels at most, since each rank sends its own to all others."""
    images = images.detach().float()
    factor = math.ceil(max(images.shape[2:]) / _LARGEST_SIDE)
    if factor > 1:
        images = avg_pool2d(images, factor, ceil_mode=True)
    low = images.amin(dim=(1, 2, 3), keepdim=True)
    high = images.amax(dim=(1, 2, 3), keepdim=True)
    return ((images - low) / (high - low).clamp(min=1e-12) * 255).to(torch.uint8)


@final
class PredictedAgainstTrue:
    """Predicted against true values, logged as a scatter plot; no number.

    number: how many values each rank keeps, the first ones. Outputs whose shape differs from the target's give nothing.
    """

    def __init__(self, number: int = 1000) -> None:
        self._number = number
        self.reset()

    def reset(self) -> None:
        # Of each batch, of shape (2, n): true and predicted values.
        self._points: list[Tensor] = []
        self._num_points = 0

    def update(self, output: Tensor, target: Tensor) -> None:
        is_full = self._num_points >= self._number
        if is_full or output.shape != target.shape or not target.is_floating_point():
            return
        points = torch.stack([target.flatten(), output.flatten()])
        points = points[:, : self._number - self._num_points]
        self._points.append(points.float())
        self._num_points += points.shape[1]

    def state(self) -> list[Tensor]:
        return self._points

    def merge(self, state: list[Tensor]) -> None:
        self._points += state

    def compute(self) -> dict[str, float]:
        return {}

    def media(self) -> dict[str, Media]:
        if not self._points:
            return {}
        from framework.tasks.pictures import scatter_picture

        true, predicted = torch.cat(self._points, dim=1).tolist()
        return {"": Drawing(partial(scatter_picture, true, predicted))}


@final
class Perplexity:
    """exp of the mean cross entropy of all targets. output, target and ignore_index as for `Accuracy`."""

    def __init__(self, ignore_index: int | None = None) -> None:
        self.ignore_index = ignore_index
        self.reset()

    def reset(self) -> None:
        # Of each batch: the sum of the cross entropy and the number of targets.
        self._sums: list[Tensor] = []

    def update(self, output: Tensor, target: Tensor) -> None:
        ignored = -100 if self.ignore_index is None else self.ignore_index
        total = cross_entropy(output.float(), target, ignore_index=ignored, reduction="sum").double()
        self._sums.append(torch.stack([total, (target != ignored).sum().double()]))

    def state(self) -> list[Tensor]:
        if not self._sums:
            return []
        return [torch.stack(self._sums).sum(dim=0)]

    def merge(self, state: list[Tensor]) -> None:
        self._sums += state

    def compute(self) -> float:
        if not self._sums:
            return math.nan
        total, count = torch.stack(self._sums).sum(dim=0).tolist()
        if count == 0:
            return math.nan
        return math.exp(min(total / count, _LARGEST_EXPONENT))


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

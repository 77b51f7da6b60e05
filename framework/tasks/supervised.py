"""Supervised learning by config alone: a model, a loss, metrics, and samples of an input and a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from framework.errors import ConfigError, DataError
from framework.tasks.ignored_targets import ignored_by
from framework.tasks.metric_set import MetricSet, check_is_built
from framework.tasks.metrics import Metric
from framework.types import Batch, StatefulMetric, StepOutput

# These losses broadcast: the first four with a warning, the others silently.
_ELEMENTWISE = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.PoissonNLLLoss,
    nn.KLDivLoss,
    nn.SoftMarginLoss,
    nn.HingeEmbeddingLoss,
    nn.MultiLabelSoftMarginLoss,
)
_ELEMENTWISE_FUNCTIONS = (
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.poisson_nll_loss,
    functional.kl_div,
    functional.soft_margin_loss,
    functional.hinge_embedding_loss,
    functional.multilabel_soft_margin_loss,
)


@final
class Supervised:
    """`loss(model(input), target)`.

    A batch is a pair (input, target), or a mapping with just the keys `input` and `target`. The target is a tensor
    whose first dimension is the sample; it is brought to the output's device, so a model may end on another device
    than it begins on. The input may be anything the model takes as its one argument.

    Raises ConfigError if the loss isn't a mean, DataError if a batch has another form.

    Args:
        loss: A module or function that returns the mean over the batch's samples as a scalar, as torch's do by default.
            Tensors of a module move to the output's device and take the type of `trainer.precision=bf16-true` or
            `64-true`.

            Ignored targets have no weight. Cross entropy and `nll_loss`, as module, function or partial, and modules
            that hold one of them, are weighted by the targets, or class weights, that torch averages over. Your own
            loss is assumed to be a mean over the targets other than its attribute `ignore_index`; without this
            attribute, over the classes (of samples, tokens or pixels) other than -100. Set `ignore_index = None` if it
            ignores none.
        metrics: Name → metric, computed in validation. Targets equal to the loss's `ignore_index` are left out of
            metrics that have no `ignore_index` of their own.

            A metric with `update(output, target)`, a StatefulMetric or one of torchmetrics, gets the input, too, if
            `update` has a parameter `input`. torchmetrics' classification gets probabilities, if the loss says how:
            given scores, it would decide by the values in each batch if they are probabilities already.
        train_metrics: Compute the metrics in training, too, at their cost in every step; not those with `update`.
        predictions: Turns a batch's output into named columns, for `job=predict`; by default the output itself is one.
    """

    def __init__(
        self,
        loss: Callable[[Any, Any], Tensor],
        metrics: Mapping[str, Metric | StatefulMetric] | None = None,
        train_metrics: bool = False,
        predictions: Callable[[Any], Mapping[str, Tensor]] | None = None,
    ) -> None:
        check_is_built("loss", loss)
        reduction = getattr(loss, "reduction", "mean")
        if isinstance(loss, partial):
            reduction = loss.keywords.get("reduction", reduction)
        # KLDivLoss's name for the mean over samples; its "mean" is over all numbers.
        if reduction not in ("mean", "batchmean"):
            raise ConfigError(
                f"task.loss: {_name_of(loss)} has reduction={reduction!r}. Use reduction='mean': the framework "
                "weights every batch by its samples, and reduces over batches and processes itself."
            )
        self.loss = loss
        self._metric_set = MetricSet(metrics)
        self.metrics = self._metric_set.by_name
        self.predictions = predictions

        self._ignored = ignored_by(self.loss)
        if self._ignored is not None:
            # A guess is about classes, so it says nothing about a metric of numbers.
            self._metric_set.set_ignore_index(self._ignored.index, of_numbers=not self._ignored.is_guess)
        # Until `observe_samples` finds that no training target is ignored.
        self._training_is_weighted = self._ignored is not None
        self._weight_may_be_zero = False
        if self._ignored is not None:
            class_weights = self._ignored.class_weights()
            self._weight_may_be_zero = class_weights is not None and not bool(class_weights.all())

        # A loss with keywords is a partial: what counts is its function.
        function = getattr(self.loss, "func", self.loss)
        self._wants_equal_shapes = isinstance(loss, _ELEMENTWISE) or function in _ELEMENTWISE_FUNCTIONS

        self._train_metrics: dict[str, Metric] = self._metric_set.sums if train_metrics else {}

    def training_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return self._step(model, batch, metrics=self._train_metrics, is_weighted=self._training_is_weighted)

    def validation_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return self._step(model, batch, metrics=self._metric_set.sums, is_validation=True)

    def observe_samples(self, batch: Batch) -> None:
        """Note if the loss ignores any of the training targets; if not, steps don't compute weights."""
        try:
            _, target = split_batch(batch)
        except DataError:
            # The targets have a transform. A batch of a wrong form is refused in the first step.
            return
        self._training_is_weighted = self._ignored is not None and self._ignored.leaves_out(target)

    def predict_step(self, model: nn.Module, batch: Batch) -> Tensor | Mapping[str, Tensor]:
        """Return the model's predictions for the batch; the target isn't used."""
        input_, _ = split_batch(batch)
        output: Tensor = model(input_)
        if self.predictions is None:
            return output
        return self.predictions(output)

    def _step(
        self,
        model: nn.Module,
        batch: Batch,
        *,
        metrics: Mapping[str, Metric],
        is_validation: bool = False,
        is_weighted: bool = True,
    ) -> StepOutput:
        input_, target = split_batch(batch)
        output = model(input_)
        if isinstance(output, Tensor) and target.device != output.device:
            target = target.to(output.device)
            if isinstance(self.loss, nn.Module):
                # Nothing is left to move after the first step.
                self.loss.to(output.device)
        loss = self._compute_loss(output, target)

        weight: float | Tensor | None = None
        if is_weighted and self._ignored is not None:
            weight = self._ignored.weight(output, target)
        if self._weight_may_be_zero and weight is not None and output.requires_grad:
            # If all classes of a batch have the weight 0, torch's gradient is NaN, even of a loss that is left out.
            counts = torch.as_tensor(weight, device=output.device) > 0
            output.register_hook(lambda gradient: gradient.where(counts, 0))

        if not metrics and not is_validation:
            return StepOutput(loss, len(target), weight=weight)
        detached = output.detach() if isinstance(output, Tensor) else output
        updates: dict[str, tuple[Any, ...]] = {}
        if is_validation:
            updates = self._metric_set.updates(detached, target, input_, probabilities=self._probabilities)
        return StepOutput(
            loss,
            len(target),
            metrics={name: metric(detached, target) for name, metric in metrics.items()},
            weight=weight,
            updates=updates,
        )

    @property
    def _probabilities(self) -> Callable[[Any], Tensor] | None:
        """What makes probabilities of the scores that the loss takes; None if it takes no scores."""
        if self._ignored is not None and self._ignored.takes_scores:
            return partial(torch.softmax, dim=1)
        if isinstance(self.loss, nn.BCEWithLogitsLoss):
            return torch.sigmoid
        return None

    def _compute_loss(self, output: Any, target: Tensor) -> Tensor:
        """Raises DataError if output and target don't fit a loss of torch's."""
        if self._wants_equal_shapes and not isinstance(output, Tensor):
            raise self._shape_error(output, target, reason="the output must be a tensor")
        if self._wants_equal_shapes and output.shape != target.shape:
            raise self._shape_error(
                output, target, reason="they must be the same; broadcasting would compare wrong pairs"
            )
        try:
            return self.loss(output, target)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            # The latter may come from an earlier kernel.
            raise
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
            if type(self.loss).__module__.startswith("torch.nn."):
                raise self._shape_error(output, target, reason=str(error).partition("\n")[0]) from error
            raise

    def _shape_error(self, output: Any, target: Tensor, *, reason: str) -> DataError:
        advice = "Choose another model or loss, or change what data.datasets gives."
        if not isinstance(output, Tensor):
            advice = (
                "Return one tensor from the model's forward, or compute the loss by a function of your own that takes "
                "(output, target): task.loss._target_=package.module.function +task.loss._partial_=true"
            )
        elif "Long" in reason and target.is_floating_point():
            advice = "Labels of classes are whole numbers: return target.long() from the dataset."
        return DataError(
            f"The model's output doesn't fit task.loss ({type(self.loss).__name__}): {reason}\n"
            f"  output: {describe(output)}\n  target: {describe(target)}\n"
            f"{advice}"
        )


def _name_of(loss: Any) -> str:
    if isinstance(loss, partial):
        loss = loss.func
    return getattr(loss, "__name__", type(loss).__name__)


def split_batch(batch: Batch) -> tuple[Any, Tensor]:
    """Return input and target of a batch. Raises DataError if it has another form, or the target is no tensor."""
    # The usual case, and the cheapest check, comes first.
    if type(batch) is list and len(batch) == 2:
        input_, target = batch
    elif isinstance(batch, Mapping) and batch.keys() == {"input", "target"}:
        input_ = batch["input"]
        target = batch["target"]
    elif isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) == 2:
        input_, target = batch
    else:
        raise DataError(
            f"Supervised got a batch that is {describe(batch)}.\nThe dataset must return samples (input, target) or "
            "{'input': ..., 'target': ...}. For any other form write a task with training_step and validation_step."
        )
    if not isinstance(target, Tensor) or target.ndim == 0:
        raise DataError(
            f"Supervised got a target that is {describe(target)}. It must be a tensor of one row per sample."
        )
    return input_, target


def describe(value: Any) -> str:
    """Return what a value is, for messages: its type, and its shape or keys."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return f"a mapping with the keys {list(value)}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a {type(value).__name__} of {len(value)}"
    if value is None:
        return "None"
    return f"a {type(value).__name__}"

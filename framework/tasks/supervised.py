"""Supervised learning by config alone: a model, a loss, metrics, and samples of an input and a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from framework.config.targets import unwrap_partial
from framework.errors import ConfigError, DataError
from framework.tasks.ignored_targets import ignored_by
from framework.tasks.metrics import MeanAbsoluteError, Metric
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

    loss: a module or function that returns the mean over the batch's samples as a scalar, as torch's do by default.
        Ignored targets have no weight. Cross entropy and `nll_loss`, as module, function or partial, and modules that
        hold one of them, are weighted by the targets, or class weights, that torch averages over. Your own loss is
        assumed to be a mean over the targets other than its attribute `ignore_index`; without this attribute, over the
        classes (of samples, tokens or pixels) other than -100. Set `ignore_index = None` if it ignores none. Tensors of
        a module move to the output's device and take the type of `trainer.precision=bf16-true` or `64-true`.
    metrics: name → metric, computed in validation; in training too with `train_metrics`, at its cost in every step.
        Those with `update(output, target)`, StatefulMetrics and torchmetrics, are computed in validation only. If
        `update` has a parameter `input`, it gets the input, too.
        torchmetrics' classification gets probabilities, if the loss says how: given scores, it would decide by the
        values in each batch if they are probabilities already.
        Targets equal to the loss's `ignore_index` are left out of metrics that have no `ignore_index` of their own.
    predictions: turns a batch's output into named columns, for `job=predict`; by default the output itself is one.

    Raises ConfigError if the loss isn't a mean, DataError if a batch has another form.
    """

    def __init__(
        self,
        loss: Callable[[Any, Any], Tensor],
        metrics: Mapping[str, Metric | StatefulMetric] | None = None,
        train_metrics: bool = False,
        predictions: Callable[[Any], Mapping[str, Tensor]] | None = None,
    ) -> None:
        keywords = loss.keywords if isinstance(loss, partial) else {}
        reduction = keywords.get("reduction", getattr(loss, "reduction", "mean"))
        if reduction != "mean":
            raise ConfigError(
                f"task.loss: {_name_of(loss)} has reduction={reduction!r}. Use reduction='mean': the framework "
                "weighs every batch by its samples, and reduces over batches and processes itself."
            )
        self.loss = unwrap_partial(loss)
        self.metrics: dict[str, Any] = {name: unwrap_partial(metric) for name, metric in (metrics or {}).items()}
        self._ignored = ignored_by(self.loss)
        if self._ignored is not None:
            for metric in self.metrics.values():
                # A MetricCollection has several metrics.
                for own in metric.values() if hasattr(metric, "compute_groups") else (metric,):
                    is_of_numbers = isinstance(own, MeanAbsoluteError) and self._ignored.is_guess
                    if getattr(own, "ignore_index", ...) is None and not is_of_numbers:
                        own.ignore_index = self._ignored.index
        self.predictions = predictions
        function = getattr(self.loss, "func", self.loss)  # with keywords, it is a partial
        self._wants_equal_shapes = isinstance(loss, _ELEMENTWISE) or function in _ELEMENTWISE_FUNCTIONS
        self._training_weighs = self._ignored is not None
        weights = None if self._ignored is None else self._ignored.class_weights()
        self._may_weigh_nothing = weights is not None and not bool(weights.all())
        self._stateful = [name for name, metric in self.metrics.items() if hasattr(metric, "update")]
        self._take_input = {
            name for name in self._stateful if "input" in signature(self.metrics[name].update).parameters
        }
        self._sums = {name: metric for name, metric in self.metrics.items() if name not in self._stateful}
        self._train_metrics: dict[str, Metric] = self._sums if train_metrics else {}

    def training_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return self._step(model, batch, metrics=self._train_metrics, weighs=self._training_weighs)

    def validation_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return self._step(model, batch, metrics=self._sums, updates=self._stateful)

    def observe_samples(self, batch: Batch) -> None:
        """Note if the loss ignores any of the training targets; if not, steps don't compute weights."""
        _, target = split_batch(batch)
        self._training_weighs = self._ignored is not None and self._ignored.leaves_out(target)

    def predict_step(self, model: nn.Module, batch: Batch) -> Tensor | Mapping[str, Tensor]:
        """Return the model's predictions for the batch; the target isn't used."""
        input_, _ = split_batch(batch)
        output: Tensor = model(input_)
        return output if self.predictions is None else self.predictions(output)

    def _step(
        self,
        model: nn.Module,
        batch: Batch,
        *,
        metrics: Mapping[str, Metric],
        updates: Sequence[str] = (),
        weighs: bool = True,
    ) -> StepOutput:
        input_, target = split_batch(batch)
        output = model(input_)
        if isinstance(output, Tensor) and target.device != output.device:
            target = target.to(output.device)
            if isinstance(self.loss, nn.Module):
                self.loss.to(output.device)  # nothing to move after the first step
        loss = self._compute_loss(output, target)
        weight: float | Tensor | None = None
        if weighs and self._ignored is not None:
            weight = self._ignored.weight(output, target)
        if self._may_weigh_nothing and weight is not None and output.requires_grad:
            # If all classes of a batch have the weight 0, torch's gradient is NaN, even of a loss that is left out.
            counts = torch.as_tensor(weight, device=output.device) > 0
            output.register_hook(lambda gradient: gradient.where(counts, 0))
        if not metrics and not updates:
            return StepOutput(loss, len(target), weight=weight)
        seen = output.detach() if isinstance(output, Tensor) else output
        found = {name: metric(seen, target) for name, metric in metrics.items()}
        return StepOutput(loss, len(target), found, weight, self._updates(seen, target, input_, names=updates))

    def _updates(self, output: Any, target: Tensor, input_: Any, *, names: Sequence[str]) -> dict[str, tuple[Any, ...]]:
        likely = [name for name in names if _takes_probabilities(self.metrics[name])]
        probabilities = output
        if likely and self._ignored is not None and self._ignored.takes_scores:
            probabilities = output.softmax(dim=1)
        elif likely and isinstance(self.loss, nn.BCEWithLogitsLoss):
            probabilities = output.sigmoid()
        return {
            name: (
                probabilities if name in likely else output,
                target,
                *((input_,) if name in self._take_input else ()),
            )
            for name in names
        }

    def _compute_loss(self, output: Any, target: Tensor) -> Tensor:
        """Raises DataError if output and target don't fit a loss of torch's."""
        if self._wants_equal_shapes and output.shape != target.shape:
            raise self._shape_error(
                output, target, reason="they must be the same; broadcasting would compare wrong pairs"
            )
        try:
            return self.loss(output, target)
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # the latter may come from an earlier kernel
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if type(self.loss).__module__.startswith("torch.nn."):
                raise self._shape_error(output, target, reason=str(error).partition("\n")[0]) from error
            raise

    def _shape_error(self, output: Any, target: Tensor, *, reason: str) -> DataError:
        return DataError(
            f"The model's output doesn't fit task.loss ({type(self.loss).__name__}): {reason}\n"
            f"  output: {describe(output)}\n  target: {describe(target)}\n"
            "Choose another model or loss, or change what data.datasets gives."
        )


def _name_of(loss: Any) -> str:
    if isinstance(loss, partial):
        loss = loss.func
    return getattr(loss, "__name__", type(loss).__name__)


def _takes_probabilities(metric: Any) -> bool:
    """Return True for torchmetrics' classification, alone or in a MetricCollection."""
    each = next(iter(metric.values())) if hasattr(metric, "compute_groups") else metric
    return type(each).__module__.startswith("torchmetrics.classification")


def split_batch(batch: Batch) -> tuple[Any, Tensor]:
    """Return input and target of a batch. Raises DataError if it has another form, or the target is no tensor."""
    if type(batch) is list and len(batch) == 2:  # the usual case, and the cheapest check
        input_, target = batch
    elif isinstance(batch, Mapping) and batch.keys() == {"input", "target"}:
        input_, target = batch["input"], batch["target"]
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
    return "None" if value is None else f"a {type(value).__name__}"

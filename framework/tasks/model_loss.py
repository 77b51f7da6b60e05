"""Models that compute their own loss, as those of transformers do."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from framework.config.suggest import did_you_mean, nearest
from framework.errors import DataError
from framework.tasks.metric_set import MetricSet
from framework.tasks.metrics import Metric
from framework.tasks.supervised import describe
from framework.types import Batch, StatefulMetric, StepOutput

# The label that transformers gives to what has no target: padding, a prompt.
_IGNORED = -100


@final
class ModelLoss:
    """`model(**batch).loss`, as models of transformers give it for a batch with `labels`.

    A batch is a mapping of tensors, whose first dimension is the sample, by the names of the model's arguments.

    If labels are classes, of samples or of tokens, the loss is a mean over labels other than -100, and so are gradients
    and logged losses over all ranks and micro-batches; causal language models predict no first label. Otherwise it is a
    mean over samples. Validation computes the accuracy, if the scores of classes are the output's `logits`.

    Raises DataError if the batch has another form, or the model gives no loss for it.

    Args:
        metrics: Name → metric, computed in validation from the `logits` and the `labels`, as by `Supervised`: scores of
            classes have the shape (samples, classes, ...), and labels that are -100 don't count. A metric with `update`
            gets the whole batch, too, if `update` has a parameter `input`.
    """

    def __init__(self, metrics: Mapping[str, Metric | StatefulMetric] | None = None) -> None:
        self._metric_set = MetricSet(metrics)
        self._metric_set.set_ignore_index(_IGNORED, of_numbers=False)
        self.metrics = self._metric_set.by_name

    def training_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return _step(model, batch, metrics=None)

    def validation_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return _step(model, batch, metrics=self._metric_set)

    def predict_step(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the output's `logits`, and `start_logits` and the like of models that have those."""
        output = _output(model, batch)
        return {name: value for name, value in output.items() if name.endswith("logits") and isinstance(value, Tensor)}


def _step(model: nn.Module, batch: Batch, *, metrics: MetricSet | None) -> StepOutput:
    """metrics: those of an evaluation, which also computes the accuracy; None in training."""
    output = _output(model, batch)
    loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        keys = list(batch)
        missing = ""
        if "labels" not in keys:
            missing = f" There is no `labels`.{did_you_mean(nearest('labels', keys))}"
        raise DataError(
            f"The model gave no loss, but {describe(output)}, for a batch with the keys {', '.join(keys)}.{missing}\n"
            "Give the samples the keys that the model computes its loss from; for models of transformers, that is "
            "`labels`."
        )

    num_samples = len(next(iter(batch.values())))
    labels: Any = batch.get("labels")
    logits: Any = getattr(output, "logits", None)
    if not _are_classes(labels, logits):
        if metrics is None or not metrics.by_name:
            return StepOutput(loss, num_samples)
        output_and_labels = _numbers(logits, labels)
        sums = metrics.sums_of(*output_and_labels)
        updates = metrics.updates(*output_and_labels, batch, probabilities=None)
        return StepOutput(loss, num_samples, sums, updates=updates)
    if labels.ndim > 1 and _shifts_labels(model):
        logits = logits[:, :-1]
        labels = labels[:, 1:]

    labels = labels.to(logits.device)
    counted = labels != _IGNORED
    weight = counted.sum()
    # The mean over no label is NaN.
    loss = torch.where(weight > 0, loss, 0.0)
    if metrics is None:
        return StepOutput(loss, num_samples, weight=weight)
    is_correct = (logits.argmax(dim=-1) == labels) & counted
    scores = logits.movedim(-1, 1)
    sums = {"accuracy": (is_correct.sum(), weight), **metrics.sums_of(scores, labels)}
    updates = metrics.updates(scores, labels, batch, probabilities=partial(torch.softmax, dim=1))
    return StepOutput(loss, num_samples, sums, weight=weight, updates=updates)


def _numbers(logits: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """Return the model's numbers and their targets in one shape. Raises DataError if they have none."""
    if isinstance(labels, Tensor) and isinstance(logits, Tensor):
        if logits.shape == (*labels.shape, 1):
            logits = logits.squeeze(-1)
        if logits.shape == labels.shape:
            return logits, labels.to(logits.device)
    raise DataError(
        "task.metrics compare the `logits` of the model's output with the `labels` of the batch, and these are "
        f"{describe(logits)} and {describe(labels)}.\nLeave out task.metrics, or write a task of your own."
    )


def _output(model: nn.Module, batch: Batch) -> Any:
    if not isinstance(batch, Mapping) or not all(isinstance(value, Tensor) for value in batch.values()):
        raise DataError(
            f"The task calls model(**batch), and the batch is {describe(batch)}.\nThe dataset must return samples that "
            "are dicts of tensors or numbers by the names of the model's arguments, such as input_ids and labels."
        )
    return model(**batch)


def _are_classes(labels: Any, logits: Any) -> bool:
    """Return True if each label is a class, of which `logits` has a row of scores."""
    return (
        isinstance(labels, Tensor)
        and isinstance(logits, Tensor)
        and not labels.is_floating_point()
        and logits.shape[:-1] == labels.shape
        and logits.shape[-1] > 1
    )


def _shifts_labels(model: nn.Module) -> bool:
    """Return True for a model that predicts the next token.

    Its loss is over `labels[:, 1:]`, as the Trainer of transformers counts them.
    """
    # DistributedDataParallel has the model as `module`.
    model = getattr(model, "module", model)
    config = getattr(model, "config", None)
    loss_name = getattr(getattr(model, "loss_function", None), "__name__", "")
    return loss_name == "ForCausalLMLoss" and not getattr(config, "is_encoder_decoder", False)

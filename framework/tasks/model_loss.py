"""Models that compute their own loss, as those of transformers do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from framework.config.suggest import did_you_mean, nearest
from framework.errors import DataError
from framework.tasks.supervised import describe
from framework.types import Batch, StepOutput, SumCount

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
    """

    def training_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return _step(model, batch, has_metrics=False)

    def validation_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return _step(model, batch, has_metrics=True)

    def predict_step(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the output's `logits`, and `start_logits` and the like of models that have those."""
        output = _output(model, batch)
        return {name: value for name, value in output.items() if name.endswith("logits") and isinstance(value, Tensor)}


def _step(model: nn.Module, batch: Batch, *, has_metrics: bool) -> StepOutput:
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
        return StepOutput(loss, num_samples)
    if labels.ndim > 1 and _shifts_labels(model):
        logits = logits[:, :-1]
        labels = labels[:, 1:]

    labels = labels.to(logits.device)
    counted = labels != _IGNORED
    weight = counted.sum()
    metrics: dict[str, SumCount] = {}
    if has_metrics:
        is_correct = (logits.argmax(dim=-1) == labels) & counted
        metrics["accuracy"] = (is_correct.sum(), weight)
    # The mean over no label is NaN.
    return StepOutput(torch.where(weight > 0, loss, 0.0), num_samples, metrics, weight=weight)


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

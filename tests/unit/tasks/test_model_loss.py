"""A model's own loss: what it is a mean over is what transformers' models compute."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn
from torchmetrics.classification import MulticlassF1Score

from framework.errors import DataError
from framework.tasks import Accuracy, MeanAbsoluteError, ModelLoss, Perplexity
from framework.types import Task

pytestmark = pytest.mark.usefixtures("own_state")

SIZES: Any = {"vocab_size": 11, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 3}
BERT = transformers.BertConfig(**SIZES, intermediate_size=32, max_position_embeddings=16)
GPT2 = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=32, n_layer=2, n_head=2)
T5 = transformers.T5Config(vocab_size=11, d_model=32, d_kv=16, d_ff=32, num_layers=2, num_heads=2)
T5.decoder_start_token_id = 0


def batch_of(labels: Tensor) -> dict[str, Tensor]:
    ids = torch.randint(1, 11, (6, 7), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": labels}


def token_labels(*, high: int = 11) -> Tensor:
    """Padding of other lengths in each sample; in the last, nothing but it."""
    labels = torch.randint(high, (6, 7), generator=torch.Generator().manual_seed(1))
    sizes = torch.tensor([7, 5, 3, 6, 2, 0])
    labels[0, 0] = -100
    return labels.where(torch.arange(7) < sizes[:, None], -100)


class TokenModel(NamedTuple):
    kind: str
    config: Any
    num_labels: int = 11
    # Labels that count.
    counted: int = 22


@pytest.mark.parametrize(
    "case",
    [
        # The first token of a text has no label.
        TokenModel(kind="AutoModelForCausalLM", config=GPT2, counted=18),
        TokenModel(kind="AutoModelForMaskedLM", config=BERT),
        TokenModel(kind="AutoModelForTokenClassification", config=BERT, num_labels=3),
        TokenModel(kind="AutoModelForSeq2SeqLM", config=T5),
    ],
)
def test_token_losses_add_up_however_samples_split(case: TokenModel) -> None:
    model = getattr(transformers, case.kind).from_config(case.config).eval()
    task: Task = ModelLoss()
    batch = batch_of(token_labels(high=case.num_labels))
    whole = task.validation_step(model, batch)
    assert whole.num_samples == 6
    assert whole.weight is not None
    assert whole.weight == case.counted == whole.metrics["accuracy"][1]
    torch.testing.assert_close(whole.loss, model(**batch).loss)
    parts = [task.training_step(model, {name: each[[row]] for name, each in batch.items()}) for row in range(6)]
    assert all(each.metrics == {} for each in parts)
    total = sum((each.loss * each.weight for each in parts if each.weight is not None), torch.tensor(0.0))
    torch.testing.assert_close(total / case.counted, whole.loss)
    # This part has no label.
    parts[-1].loss.backward()
    assert parts[-1].loss == 0 == parts[-1].weight
    assert all(each.grad is None or not each.grad.any() for each in model.parameters())


@pytest.mark.parametrize("kind", ["AutoModelForCausalLM", "AutoModelForMaskedLM"])
def test_metrics_are_computed_from_the_labels_that_count(kind: str) -> None:
    model = getattr(transformers, kind).from_config(GPT2 if kind == "AutoModelForCausalLM" else BERT).eval()
    f1 = MulticlassF1Score(num_classes=11)
    task = ModelLoss(metrics={"perplexity": Perplexity(), "top3": Accuracy(top_k=3), "f1": f1})
    batch = batch_of(token_labels())
    assert task.training_step(model, batch).updates == {}
    output = task.validation_step(model, batch)
    assert output.metrics["top3"][1] == output.weight
    for name, metric in task.metrics.items():
        if name in output.updates:
            metric.update(*output.updates[name])
    assert task.metrics["perplexity"].compute() == pytest.approx(output.loss.exp().item(), rel=1e-5)
    # Probabilities, not scores.
    assert output.updates["f1"][0].sum(dim=1).allclose(torch.ones(()))
    correct = output.metrics["accuracy"][0]
    assert correct <= output.metrics["top3"][0]


def test_a_regression_compares_numbers() -> None:
    config = transformers.BertConfig(**{**SIZES, "num_labels": 1}, intermediate_size=32)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    batch = batch_of(torch.rand(6))
    output = ModelLoss(metrics={"error": MeanAbsoluteError()}).validation_step(model, batch)
    error = (model(batch["input_ids"]).logits.squeeze(-1) - batch["labels"]).abs()
    torch.testing.assert_close(output.metrics["error"], (error.sum(), 6))


def test_metrics_without_labels_are_refused() -> None:
    config = transformers.BertConfig(**{**SIZES, "num_labels": 2}, intermediate_size=32)
    model = transformers.AutoModelForQuestionAnswering.from_config(config).eval()
    batch = {"input_ids": batch_of(torch.ones(6))["input_ids"], "start_positions": torch.ones(6, dtype=torch.long)}
    batch["end_positions"] = batch["start_positions"]
    with pytest.raises(DataError, match=r"task\.metrics compare the `logits`"):
        ModelLoss(metrics={"perplexity": Perplexity()}).validation_step(model, batch)


def test_sample_classes_give_a_mean_over_classes() -> None:
    model = transformers.AutoModelForSequenceClassification.from_config(BERT).eval()
    batch = batch_of(torch.tensor([0, 1, 2, 2, 1, 0]))
    output = ModelLoss().validation_step(model, batch)
    scores = model(batch["input_ids"]).logits
    torch.testing.assert_close(output.loss, nn.functional.cross_entropy(scores, batch["labels"]))
    assert (output.num_samples, output.weight) == (6, 6)
    correct, count = output.metrics["accuracy"]
    assert (correct, count) == ((scores.argmax(dim=1) == batch["labels"]).sum(), 6)
    predicted = ModelLoss().predict_step(model, batch)
    assert predicted.keys() == {"logits"}
    torch.testing.assert_close(predicted["logits"], scores)


def test_a_regression_has_no_accuracy() -> None:
    config = transformers.BertConfig(**{**SIZES, "num_labels": 1}, intermediate_size=32)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    output = ModelLoss().validation_step(model, batch_of(torch.randn(6)))
    assert (output.num_samples, output.metrics, output.weight) == (6, {}, None)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"input_ids": torch.ones(2, 3).long(), "label": torch.ones(2).long()}, "no `labels`. Did you mean label?"),
        ([torch.ones(2), torch.ones(2)], "the batch is a list of 2"),
        (
            {"input_ids": torch.ones(2, 3).long(), "text": ["a", "b"]},
            r"a mapping with the keys \['input_ids', 'text'\]",
        ),
    ],
)
def test_other_batches_are_refused(batch: Any, said: str) -> None:
    model = transformers.AutoModelForSequenceClassification.from_config(BERT)
    with pytest.raises(DataError, match=said):
        ModelLoss().training_step(model, batch)

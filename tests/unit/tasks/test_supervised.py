from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from framework.errors import ConfigError, DataError
from framework.tasks import Accuracy, Supervised
from framework.types import StepOutput, Task

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(3, (12,), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(6, 3)


@pytest.fixture
def classification():
    return Supervised(loss=nn.CrossEntropyLoss(), metrics={"accuracy": Accuracy()})


def summed(output: StepOutput, name: str) -> tuple[torch.Tensor, torch.Tensor | int]:
    total, count = output.metrics[name]
    assert isinstance(total, torch.Tensor)
    return total, count


def test_training_gives_losses_and_validation_metrics(classification, model):
    assert isinstance(classification, Task)
    output = classification.training_step(model, [X, LABELS])
    assert output.loss.equal(nn.functional.cross_entropy(model(X), LABELS))
    assert output.loss.requires_grad
    assert (output.num_samples, output.metrics) == (12, {})
    total, count = summed(classification.validation_step(model, [X, LABELS]), "accuracy")
    assert (total.item(), int(count)) == ((model(X).argmax(dim=1) == LABELS).sum().item(), 12)


@pytest.mark.parametrize(
    ("loss", "metric", "ignored"),
    [
        # -100 is torch's default.
        (nn.CrossEntropyLoss(), Accuracy(), -100),
        (nn.CrossEntropyLoss(ignore_index=0), Accuracy(), 0),
        (nn.CrossEntropyLoss(ignore_index=0), Accuracy(ignore_index=1), 1),
        (nn.functional.cross_entropy, Accuracy(), None),
    ],
)
def test_metrics_ignore_what_the_loss_ignores(model, loss, metric, ignored):
    labels = LABELS.clone()
    labels[:3] = 0 if ignored is None else ignored
    task = Supervised(loss=loss, metrics={"accuracy": metric})
    total, count = summed(task.validation_step(model, [X, labels]), "accuracy")
    kept = torch.ones(12, dtype=torch.bool) if ignored is None else labels != ignored
    assert int(count) == kept.sum()
    assert total.item() == (model(X).argmax(dim=1) == labels)[kept].sum()


@pytest.mark.parametrize("form", [tuple, list, lambda pair: {"input": pair[0], "target": pair[1]}])
def test_forms_of_a_batch(classification, model, form):
    output = classification.training_step(model, form((X, LABELS)))
    assert output.loss.equal(classification.training_step(model, [X, LABELS]).loss)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (X, r"a tensor of shape \(12, 6\)"),
        ((X, LABELS, X), "a tuple of 3"),
        ({"image": X, "label": LABELS}, r"keys \['image', 'label'\]"),
        ("ab", "a str"),
        ((X, [1, 2]), "target that is a list of 2"),
        ((X, torch.tensor(1)), r"target that is a tensor of shape \(\)"),
    ],
)
def test_other_forms_are_refused(classification, model, batch, said):
    with pytest.raises(DataError, match=said):
        classification.training_step(model, batch)


def test_what_is_no_mean_loss_is_refused(model):
    for reduction in ("sum", "none"):
        with pytest.raises(ConfigError, match=f"CrossEntropyLoss has reduction='{reduction}'. Use reduction='mean'"):
            Supervised(loss=nn.CrossEntropyLoss(reduction=reduction))


def test_a_loss_that_is_only_named_is_refused():
    loss: Any = "MSELoss"
    with pytest.raises(ConfigError, match=r"Type task\.loss\._target_=torch\.nn\.MSELoss"):
        Supervised(loss=loss)
    metric: Any = "own.metric"
    with pytest.raises(ConfigError, match=r"Type task\.metrics\.mine\._target_=own\.metric"):
        Supervised(loss=nn.MSELoss(), metrics={"mine": metric})


def test_labels_of_classes_that_are_fractions(model):
    task = Supervised(loss=nn.CrossEntropyLoss())
    with pytest.raises(DataError, match=r"return target\.long\(\) from the dataset"):
        task.training_step(model, [torch.zeros(2, 6), torch.zeros(2)])


def test_the_mean_over_samples_has_another_name_in_one_loss():
    task = Supervised(loss=nn.KLDivLoss(reduction="batchmean"))
    scores = nn.LogSoftmax(dim=1)
    input_ = torch.randn(6, 4)
    target = torch.randn(6, 4).softmax(dim=1)
    whole = task.training_step(scores, [input_, target])
    parts = [task.training_step(scores, [input_[part], target[part]]) for part in (slice(2), slice(2, 6))]
    weighted = sum(part.loss * part.num_samples for part in parts) / whole.num_samples
    torch.testing.assert_close(weighted, whole.loss)


def test_target_and_loss_follow_the_outputs_device():
    class EndsElsewhere(nn.Module):
        def forward(self, x):
            return x.to("meta")

    loss = nn.BCEWithLogitsLoss(pos_weight=torch.ones(6))
    output = Supervised(loss).training_step(EndsElsewhere(), (X, torch.zeros(12, 6)))
    assert output.loss.device.type == "meta"
    assert loss.pos_weight is not None
    assert loss.pos_weight.device.type == "meta"


def test_a_step_reads_nothing_from_the_device():
    """The meta device has no values: anything that waits for one raises."""
    task = Supervised(nn.CrossEntropyLoss(), metrics={"one": Accuracy(), "two": Accuracy(top_k=2)}, train_metrics=True)
    model = nn.Linear(6, 3, device="meta")
    batch = (torch.zeros(4, 6, device="meta"), torch.zeros(4, dtype=torch.int64, device="meta"))
    for step in (task.training_step, task.validation_step):
        output = step(model, batch)
        assert output.loss.device.type == "meta"
        for name in ("one", "two"):
            total, _ = summed(output, name)
            assert (total.device.type, total.requires_grad) == ("meta", False)

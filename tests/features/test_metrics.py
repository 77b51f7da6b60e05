"""Metrics that are no sums, and several sets: the values of one process on any number of them."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from sklearn.metrics import confusion_matrix, f1_score, roc_auc_score
from torch.nn.functional import cross_entropy

from tests.features.metric_cases import CLASSES, Classifier, points
from tests.helpers import results
from tests.helpers.recipes import write_recipe

CASES = "tests.features.metric_cases"
TORCHMETRICS = "torchmetrics.classification"
METRICS = {
    "auroc": {"_target_": f"{TORCHMETRICS}.MulticlassAUROC", "num_classes": CLASSES},
    "ap": {"_target_": f"{TORCHMETRICS}.MulticlassAveragePrecision", "num_classes": CLASSES, "thresholds": 20},
    "both": {
        "_target_": "torchmetrics.MetricCollection",
        "metrics": {
            "f1": {"_target_": f"{TORCHMETRICS}.MulticlassF1Score", "num_classes": CLASSES},
            "recall": {"_target_": f"{TORCHMETRICS}.MulticlassRecall", "num_classes": CLASSES},
        },
    },
    "f1": {"_target_": "framework.tasks.F1"},
    "perplexity": {"_target_": "framework.tasks.Perplexity"},
    "confusion": {"_target_": "framework.tasks.ConfusionMatrix"},
    "accuracy": {"_target_": "framework.tasks.Accuracy"},
}
SUPERVISED: dict[str, Any] = {
    "_target_": "framework.tasks.Supervised",
    "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
    "metrics": METRICS,
}
OWN = {"_target_": f"{CASES}.WithMedian"}


def on_ranks(ranks, strategy, *others, marks=()):
    overrides = (f"topology.procs_per_node={ranks}", f"strategy={strategy}", *others)
    return pytest.param(overrides, id=f"{ranks} {strategy}", marks=[pytest.mark.multiproc, *marks])


PROCESSES = [
    pytest.param((), id="one"),
    on_ranks(2, "ddp"),
    on_ranks(3, "fsdp"),
    on_ranks(2, "fsdp", marks=[pytest.mark.exhaustive]),
    on_ranks(2, "pipeline", "strategy.num_microbatches=2"),
]


@pytest.fixture
def run(train, tmp_path):
    """Train with this task; return the run directory."""

    def run(task, *overrides, several=False, status=0, **sections):
        recipe = {
            "defaults": [{"override /logger": "[jsonl]"}],
            "model": {"_target_": f"{CASES}.Classifier"},
            "task": task,
            "data": {
                "datasets": {"_target_": f"{CASES}.sets", "several": several},
                "global_batch_size": 12,
                "eval_batch_size": 3,
            },
            "trainer": {"max_epochs": 2, "precision": "64-true"},
            "optimizer": {"lr": 0.1},
            **sections,
        }
        recipe["defaults"] = [{"override /logger": "jsonl"}]
        write_recipe(tmp_path, "scored", recipe)
        return train("recipe=scored", *overrides, status=status)

    return run


def scores(run_dir, size, seed):
    """Return scores and classes of a set, by the last weights."""
    model = Classifier().double()
    model.load_state_dict(results.weights(run_dir))
    x, y = points(size, seed=seed).tensors
    return model(x.double()).detach(), y


@pytest.mark.parametrize("overrides", PROCESSES)
def test_metrics_are_those_of_all_samples(run, overrides):
    run_dir = run(SUPERVISED, *overrides)
    metrics = results.results(run_dir)["last"]["metrics"]
    given, y = scores(run_dir, 23, 1)
    predicted = given.argmax(dim=1)
    auroc = roc_auc_score(y, given.softmax(dim=1), multi_class="ovr", average="macro")
    assert metrics["val/auroc"] == pytest.approx(auroc, abs=1e-6)
    assert metrics["val/f1"] == pytest.approx(f1_score(y, predicted, average="macro"), abs=1e-6)
    assert metrics["val/both/f1"] == pytest.approx(metrics["val/f1"], abs=1e-6)
    assert metrics["val/perplexity"] == pytest.approx(math.exp(cross_entropy(given, y)), rel=1e-5)
    assert metrics["val/perplexity"] == pytest.approx(math.exp(metrics["val/loss"]), rel=1e-5)
    assert {"val/ap", "val/both/recall", "val/accuracy"} <= metrics.keys()
    # The test set has two samples: some ranks have none.
    assert {"test/auroc", "test/f1", "test/loss"} <= results.results(run_dir)["test"]["metrics"].keys()


@pytest.mark.multiproc
def test_metrics_are_the_same_on_any_topology(run, train):
    found = []
    # On three ranks, some have no sample of the test set.
    for ranks in (1, 3):
        run_dir = run(SUPERVISED, f"topology.procs_per_node={ranks}", "trainer.max_epochs=1")
        train(f"resume={run_dir}", "trainer.max_epochs=2")
        found.append(results.results(run_dir)["last"]["metrics"])
    one, three = found
    assert three == pytest.approx(one, rel=1e-6)


def test_confusion_matrices_are_logged_as_tables(run, train, capfd):
    run_dir = run(SUPERVISED, several=True)
    given, y = scores(run_dir, 5, 3)
    wanted = confusion_matrix(y, given.argmax(dim=1), labels=range(CLASSES)).tolist()
    capfd.readouterr()
    train("job=eval", f"checkpoint.path={run_dir}", "eval.part=test")
    out = capfd.readouterr().out
    assert "test/last/confusion" in out
    printed_rows = [line.split() for line in out.splitlines()]
    for label, row in enumerate(wanted):
        assert [str(label), *map(str, row)] in printed_rows


@pytest.mark.parametrize("overrides", PROCESSES[:2])
def test_several_sets_are_evaluated_by_name(run, train, capfd, overrides):
    checkpoint = {"monitor": "val/noisy/loss"}
    run_dir = run(SUPERVISED, *overrides, several=True, checkpoint=checkpoint)
    metrics = results.results(run_dir)["last"]["metrics"]
    for name, size, seed in (("clean", 23, 1), ("noisy", 2, 2)):
        given, y = scores(run_dir, size, seed)
        assert metrics[f"val/{name}/loss"] == pytest.approx(cross_entropy(given, y).item(), rel=1e-5)
    assert "test/last/loss" in results.results(run_dir)["test"]["metrics"]
    assert results.results(run_dir)["score"] == min(results.curve(run_dir, "val/noisy/loss").values())
    assert "val/clean 23, val/noisy 2, test/last 5" in results.log(run_dir)
    train("job=predict", f"checkpoint.path={run_dir}", "predict.part=val", "predict.output=p.csv", status=2)
    assert "the val part has val/clean, val/noisy" in capfd.readouterr().err
    run(SUPERVISED, several=True, checkpoint={"monitor": "val/noise/loss"}, status=2)
    assert "Did you mean val/noisy/loss?" in capfd.readouterr().err


@pytest.mark.parametrize("overrides", PROCESSES[:3])
def test_a_metric_of_ones_own(run, overrides):
    run_dir = run(OWN, *overrides)
    given, y = scores(run_dir, 23, 1)
    losses = cross_entropy(given, y, reduction="none")
    metrics = results.results(run_dir)["last"]["metrics"]
    assert metrics["val/losses/median"] == pytest.approx(losses.median().item())
    assert metrics["val/losses/largest"] == pytest.approx(losses.max().item())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("many", r"The metric 'losses' of WithMedian computes a tensor of shape \(\d+,\).*one number, or a dict"),
        ("name", r"returned an update of 'loses'.*Did you mean losses\?"),
        ("list", "updates that are a list of 1"),
    ],
)
def test_wrong_metrics_are_refused(run, capfd, wrong, said):
    run(OWN | {"wrong": wrong}, status=2)
    assert re.search(said, capfd.readouterr().err, re.DOTALL)


def test_classes_without_samples_and_ignored_targets():
    from framework.tasks import F1, ConfusionMatrix, Perplexity

    given = torch.eye(3)[[0, 0, 1, 2]] * 9
    target = torch.tensor([0, 1, 1, -1])
    f1 = F1(ignore_index=-1)
    confusion = ConfusionMatrix(ignore_index=-1)
    perplexity = Perplexity(ignore_index=-1)
    for metric in (f1, confusion, perplexity):
        metric.reset()
        metric.update(given, target)
    assert f1.compute() == pytest.approx(2 / 3)
    assert confusion.counts is not None
    assert confusion.counts.tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 0]]
    kept = target >= 0
    assert perplexity.compute() == pytest.approx(math.exp(cross_entropy(given[kept], target[kept])))
    wide = ConfusionMatrix()
    wide.reset()
    wide.update(torch.zeros(2, 51), torch.zeros(2, dtype=torch.int64))
    assert wide.text() is None

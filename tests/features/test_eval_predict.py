"""job=eval and job=predict: a trained model over one part of the data, wherever it lies, on any number of processes."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from framework.checkpoint import find
from recipes.digits import ConvNet, digits
from recipes.toy import ToyModel, toy_regression
from tests.helpers import results
from tests.helpers.internals import compose
from tests.helpers.trust import trusting

THREE = "topology.procs_per_node=3"
ERROR = "+task.metrics.error._target_=framework.tasks.MeanAbsoluteError"
# 207 samples: 165 to train, 21 each to validate and test. Neither 2 nor 3 processes get equally many of 20 samples.
SIZES = ("data.datasets.num_samples=207", "+data.datasets.test_fraction=0.0967", "data.eval_batch_size=4")
TRAIN = ("recipe=toy", "logger=none", "trainer.max_epochs=3", "optimizer.lr=0.01", ERROR, *SIZES)


@pytest.fixture
def trained(shared_run) -> Path:
    return shared_run(*TRAIN, "checkpoint.mode=max", "path.outputs=outputs")


@pytest.fixture
def command(fork_server, tmp_path, monkeypatch, capfd) -> Callable[..., tuple[int, str]]:
    """The command in an empty folder: its status and what it says on stderr."""

    def run(*overrides: str) -> tuple[int, str]:
        monkeypatch.chdir(tmp_path)
        capfd.readouterr()
        status = compose.main(["trainer.gpus=0", *trusting(overrides)], fork_server=fork_server)
        said = capfd.readouterr().err
        assert "Traceback" not in said
        return status, said

    return run


@pytest.fixture
def evaluate(command, trained) -> Callable[..., dict[str, float]]:
    """The metrics of an evaluation in a folder of the user's choice."""

    def run(*overrides: str) -> dict[str, float]:
        before = set(trained.rglob("*"))
        assert command("job=eval", "path.outputs=evaluations", *overrides) == (0, "")
        assert set(trained.rglob("*")) == before
        newest = max(Path("evaluations/toy/eval").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        metrics: dict[str, float] = results.metrics(newest)
        return metrics

    return run


def plain(weights: dict[str, Tensor], part: str, *, samples: int | None = None) -> dict[str, float]:
    """The same by hand."""
    inputs, targets = (tensor[:samples] for tensor in getattr(data(), part).tensors)
    off = outputs(weights, inputs) - targets
    metrics = {"loss": float((off**2).mean()), "error": float(off.abs().mean())}
    return {f"{part}/{name}": value for name, value in metrics.items()}


def close(metrics: dict[str, float]) -> Any:
    return pytest.approx(metrics, rel=1e-6)


def data() -> Any:
    return toy_regression(num_samples=207, test_fraction=0.0967)


def outputs(weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
    model = ToyModel()
    model.load_state_dict(weights)
    with torch.no_grad():
        found: Tensor = model(inputs)
    return found


def content(folder: Path) -> dict[str, str]:
    """Every file's checksum."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# Evaluate


@pytest.mark.multiproc
def test_metrics_equal_a_plain_loop_on_any_ranks(evaluate, trained):
    before = content(trained)
    found = evaluate(f"checkpoint.path={trained}", THREE)
    assert found == close(plain(results.weights(trained), "test"))
    assert content(trained) == before


def test_eval_takes_another_part_pointer_or_copy(evaluate, trained, tmp_path):
    best, last = (find(trained / "checkpoints" / pointer) for pointer in ("best", "last"))
    assert best != last
    away = shutil.copytree(best, tmp_path / "away" / "of_mine")
    for path, part in ((f"{trained}/best", "train"), (away, "val")):
        found = evaluate(f"checkpoint.path={path}", f"eval.part={part}")
        assert found == close(plain(results.weights(trained, "best"), part))


def test_typed_overrides_apply_to_a_saved_run(evaluate, trained, tmp_path):
    """5 batches of 4 samples; the saved configuration has what today's defaults don't."""
    found = evaluate(f"checkpoint.path={trained}", "trainer.limit_test_batches=2", "data.batch_size=7")
    assert found == close(plain(results.weights(trained), "test", samples=8))
    (run_dir,) = tmp_path.glob("evaluations/toy/eval/*")
    saved = yaml.safe_load((trained / "config.yaml").read_text())
    used = yaml.safe_load((run_dir / "config.yaml").read_text())
    changed = {
        "job": "eval",
        "trainer": {**saved["trainer"], "limit_test_batches": 2},
        "data": {**saved["data"], "batch_size": 7},
        "path": {**saved["path"], "outputs": "evaluations"},
        "checkpoint": {**saved["checkpoint"], "path": str(find(trained))},
    }
    assert used == {**saved, **changed}


@pytest.mark.multiproc
@pytest.mark.parametrize("overrides", [(), ("callbacks=[ema]", "topology.procs_per_node=2")], ids=str)
def test_a_test_that_was_left_out_can_follow(evaluate, shared_run, overrides):
    """The numbers are those that the test at the end of training gives."""
    common = (*TRAIN, "checkpoint.mode=max", "path.outputs=outputs", *overrides)
    tested = shared_run(*common)
    untested = shared_run(*common, "trainer.limit_test_batches=0")
    assert results.results(untested)["test"] is None
    test = results.results(tested)["test"]
    assert test["step"] == results.pointed(untested, "best")
    assert evaluate(f"checkpoint.path={untested}/best") == test["metrics"]


@pytest.mark.exhaustive
def test_evaluations_lie_in_the_run_that_they_evaluate(command, trained, tmp_path):
    """An evaluation can't be resumed: neither as the newest unfinished run, nor by its name."""
    run = Path(shutil.copytree(trained, tmp_path / "outputs" / "toy" / trained.name, symlinks=True))
    before = {path.name for path in run.iterdir()}
    assert command("job=eval", f"checkpoint.path={run}") == (0, "")
    assert command("job=predict", f"checkpoint.path={run}/last", "predict.output=mine.csv") == (0, "")
    assert list(run.parent.iterdir()) == [run]
    assert {path.name for path in run.iterdir()} - before == {"eval", "predict"}
    folders = [*(run / "eval").iterdir(), *(run / "predict").iterdir()]
    assert len(folders) == 2
    for folder in folders:
        assert {path.name for path in folder.iterdir()} == {"config.yaml", "overrides.yaml", "run.json", "logs"}
    status, said = command(f"resume={folders[0]}")
    assert status == 2
    assert "Only training runs can be resumed" in said
    record = results.run_file(run)
    (run / "run.json").write_text(json.dumps(record | {"status": "failed"}))
    status, said = command("recipe=toy", "resume=auto", "trainer.max_epochs=3")
    assert status == 0
    assert said.startswith(f"resume=auto: outputs/toy/{run.name} (failed)")


def test_a_read_only_run_is_evaluated_elsewhere(command, trained, tmp_path):
    run = Path(shutil.copytree(trained, tmp_path / "outputs" / "toy" / trained.name, symlinks=True))
    (run / "eval").write_text("in the way, as root may write everywhere\n")
    status, said = command("job=eval", f"checkpoint.path={run}")
    assert status == 2
    assert f"can't be created under {run.relative_to(tmp_path)}/eval: Not a directory" in said
    assert "path.outputs=FOLDER" in said
    assert command("job=eval", f"checkpoint.path={run}", "path.outputs=elsewhere") == (0, "")
    assert len(list(tmp_path.glob("elsewhere/toy/eval/*/run.json"))) == 1


# Predict


def predictions(path: Path) -> Tensor:
    """Return the columns of a CSV after the index, which counts from 0."""
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["index", *(f"output_{i}" for i in range(5))]
    values = []
    for index, row in enumerate(rows):
        assert row[0] == str(index)
        values.append([float(value) for value in row[1:]])
    return torch.tensor(values)


@pytest.mark.multiproc
def test_every_sample_once_in_the_datasets_order(command, trained, tmp_path):
    before = content(trained)
    overrides = (f"checkpoint.path={trained}", THREE, "path.outputs=predictions")
    assert command("job=predict", *overrides) == (0, "")
    assert command("job=predict", *overrides, "predict.output=all.pt", "predict.part=train") == (0, "")
    weights = results.weights(trained)
    inputs = {part: getattr(data(), part).tensors[0] for part in ("train", "test")}
    found = predictions(tmp_path / "predictions.csv")
    torch.testing.assert_close(found, outputs(weights, inputs["test"]), rtol=1e-5, atol=1e-6)
    columns = torch.load(tmp_path / "all.pt", weights_only=True)
    assert columns.keys() == {"output"}
    torch.testing.assert_close(columns["output"], outputs(weights, inputs["train"]), rtol=1e-5, atol=1e-6)
    assert content(trained) == before
    assert list(tmp_path.rglob("*.part")) == list(tmp_path.rglob("*.tmp")) == []


@pytest.mark.exhaustive
def test_a_classifiers_predictions_are_classes_and_probabilities(command, shared_run, tmp_path):
    short = ("trainer.max_steps=1", "logger=none", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1")
    run_dir = shared_run("recipe=digits", *short)
    assert command("job=predict", f"checkpoint.path={run_dir}", "data.eval_batch_size=30") == (0, "")
    with (tmp_path / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    model = ConvNet().eval()
    model.load_state_dict(results.weights(run_dir))
    images: Tensor = digits().test.tensors[0][:30]  # type: ignore[union-attr]
    with torch.no_grad():
        best = model(images).softmax(dim=1).max(dim=1)
    assert [int(row["index"]) for row in rows] == list(range(30))
    assert [int(row["class"]) for row in rows] == best.indices.tolist()
    assert [float(row["probability"]) for row in rows] == pytest.approx(best.values.tolist(), rel=1e-4)
    assert rows[0].keys() == {"index", "class", "probability"}


# What is refused

PATH = ("checkpoint.path={run}",)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("job=eval", "resume={run}"), "checkpoint.path={run}"),
        (("job=eval", "init_from={run}", *PATH), "checkpoint.path can't go with init_from"),
        (("job=eval", "recipe=digits", *PATH), "that run's recipe is toy"),
        (("job=train", *PATH), "To train, use resume=RUN"),
        (("job=predict", "recipe=toy"), "needs weights: checkpoint.path="),
        (("job=predict", "predict.output=some.txt", *PATH), "must end with .csv or .pt"),
        (("job=predict", "predict.output=there.pt", *PATH), "there.pt exists already"),
        (("job=eval", "+data.datasets.test_fraction=0", *PATH), "gives no test part"),
        (("job=predict", "task._target_=own.Mute", "~task.loss", "~task.metrics", *PATH), "Mute has none"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_can_not_be_asked_for_starts_nothing(command, trained, tmp_path, overrides, said):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "there.pt").write_text("of mine")
    status, printed = command("path.outputs=here", *(text.format(run=trained) for text in overrides))
    assert status == 2
    assert said.format(run=trained) in printed
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"own.py", "there.pt"}
    assert (tmp_path / "there.pt").read_text() == "of mine"


def test_predictions_need_one_row_for_each_sample(command, trained, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    own = ("~task.loss", "~task.metrics", "path.outputs=here", "task._target_=own.Summary")
    status, printed = command("job=predict", f"checkpoint.path={trained}", *own)
    assert status == 2
    assert "'mean' as shape () for a batch of 4 samples" in printed
    assert not (tmp_path / "predictions.csv").exists()


OWN = """
from torch.nn.functional import mse_loss
from framework import StepOutput
class Mute:
    def training_step(self, model, batch): return StepOutput(mse_loss(model(batch[0]), batch[1]), len(batch[0]))
    validation_step = training_step
class Summary(Mute):
    def predict_step(self, model, batch): return {"mean": model(batch[0]).mean()}
"""

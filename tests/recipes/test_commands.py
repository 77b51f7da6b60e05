"""The commands people type, from an empty folder, as with an installed package; and what a run leaves there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.helpers import results
from tests.helpers.command import run_framework

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_state")]

Train = Callable[..., Path]
RUN_NAME = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_[0-9a-f]{4}")


@dataclass(frozen=True)
class Run:
    """A command that succeeded: where, what it printed, and its run directory."""

    folder: Path
    stdout: str
    stderr: str
    run_dir: Path


def printed_command(stdout: str, name: str) -> list[str]:
    """Return the words of the command that the closing summary shows under `name`."""
    (line,) = re.findall(rf"^  {name} +(.+)$", stdout, re.MULTILINE)
    return shlex.split(line)


# python -m framework


CUT = "trainer.max_epochs=3"


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("empty")
    result = run_framework(CUT, cwd=folder, timeout=110)
    assert result.returncode == 0, result.stderr
    assert {path.name for path in folder.iterdir()} == {"outputs"}
    (run_dir,) = folder.glob("outputs/digits/*")
    return Run(folder, result.stdout, result.stderr, run_dir)


def test_the_default_recipe_learns_and_tests_its_best(default: Run) -> None:
    found = results.results(default.run_dir)
    accuracies = results.curve(default.run_dir, "val/accuracy")
    assert found["test"]["metrics"]["test/accuracy"] >= 0.85
    losses = list(results.curve(default.run_dir, "train/loss").values())
    assert losses[-1] < losses[0]
    best = results.pointed(default.run_dir, "best")
    last = max(accuracies)
    assert accuracies[best] == max(accuracies.values())
    assert results.pointed(default.run_dir, "last") == last
    assert (found["best"]["step"], found["last"]["step"], found["test"]["step"]) == (best, last, best)
    for part in ("best", "last"):
        assert found[part]["metrics"]["val/accuracy"] == accuracies[found[part]["step"]]


PIPELINE = "recipe=toy_model_parallel topology=single_node strategy=pipeline"


@pytest.mark.parametrize("strategy", ["recipe=toy strategy=fsdp", pytest.param(PIPELINE, marks=pytest.mark.exhaustive)])
def test_strategies_whose_modules_nothing_has_loaded_before(strategy: str, tmp_path: Path) -> None:
    short = ("trainer.gpus=0", "topology.procs_per_node=2", "trainer.max_steps=2")
    result = run_framework(*strategy.split(), *short, cwd=tmp_path, timeout=110)
    assert result.returncode == 0, result.stderr


def test_everything_lies_where_it_should(default: Run) -> None:
    assert RUN_NAME.fullmatch(default.run_dir.name)
    files = {"config.yaml", "overrides.yaml", "run.json", "metrics.jsonl"}
    found = {path.name for path in default.run_dir.iterdir()}
    assert len([name for name in found if name.startswith("events.out.tfevents.")]) == 1
    found = {name for name in found if not name.startswith("events.")}
    assert found == files | {"checkpoints", "logs", "media"}
    step = f"step_{results.pointed(default.run_dir, 'last'):08d}"
    assert {path.name for path in (default.run_dir / "checkpoints" / step).iterdir()} == {
        "model.pt",
        "training.pt",
        "generators.pt",
        "config.yaml",
        "manifest.json",
    }


def test_tensorboard_has_the_curves_and_the_config(default: Run) -> None:
    events = results.events(default.run_dir)
    assert set(events.Tags()["scalars"]) == {
        "train/loss",
        "train/lr",
        "train/grad_norm",
        "train/samples_per_s",
        "train/steps_per_s",
        "train/tflop_per_s",
        "device/memory_gb",
        "time/data",
        "time/forward",
        "time/backward",
        "time/optimizer",
        "time/callbacks",
        "val/loss",
        "val/accuracy",
        "test/loss",
        "test/accuracy",
        "val/accuracy/best",
    }
    (text,) = events.Tensors("config/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert yaml.safe_load(shown) == yaml.safe_load((default.run_dir / "config.yaml").read_text())


def test_the_output_shows_what_was_run_and_found(default: Run) -> None:
    shown = default.stdout
    assert shown.startswith("Training digits: 1 process")
    assert "ConvNet" in shown
    for name, value in results.metrics(default.run_dir).items():
        assert re.search(rf"^ +{name} .*\b{value:.4f}\b", shown, re.MULTILINE), name
    best, last = (results.results(default.run_dir)[name]["step"] for name in ("best", "last"))
    assert best == last or all(f"{name} (step {step})" in shown for name, step in (("best", best), ("last", last)))
    # The lines are plain because this is no terminal.
    assert not {"\x1b", "\r"} & set(shown)
    assert default.stderr == ""


def test_run_json_records_what_was_run(default: Run) -> None:
    record = results.run_file(default.run_dir)
    assert (record["status"], record["command"]) == ("finished", f"python -m framework {CUT}")
    assert record["started"] <= record["ended"]
    assert {"python", "framework", "torch", "torchvision", "hydra-core", "omegaconf"} <= record["versions"].keys()
    assert "not installed" not in (record["versions"]["torch"], record["versions"]["hydra-core"])
    # An empty folder is no repository.
    assert record["git"] is None
    assert record["topology"]["world_size"] == 1


# python -m framework recipe=toy; python -m framework resume=outputs/...


def test_the_printed_command_resumes_the_run(train: Train, capfd) -> None:
    run_dir = train("recipe=toy", "trainer.max_steps=60", "trainer.log_every_n_steps=20")
    resume = printed_command(capfd.readouterr().out, "resume")
    assert resume[:3] == ["python", "-m", "framework"]
    assert train(*resume[3:], "trainer.max_steps=90").resolve() == run_dir.resolve()
    assert list(results.curve(run_dir, "train/loss")) == [20, 40, 60, 80, 90]
    assert "Resuming toy" in capfd.readouterr().out
    record = results.run_file(run_dir)
    assert record["status"] == "finished"
    (earlier,) = record["earlier"]
    assert earlier["started"] <= earlier["ended"] <= record["started"]


# python -m framework launcher=in_process

IN_PROCESS = ("recipe=toy", "launcher=in_process", "trainer.max_epochs=1")


def test_in_process_trains_within_the_command(train: Train) -> None:
    run_dir = train(*IN_PROCESS)
    assert f"pid {os.getpid()}, rank 0" in results.log(run_dir)
    assert results.pointed(run_dir, "last") == results.results(run_dir)["steps"] == 80
    assert results.run_file(run_dir)["status"] == "finished"


# Inside a repository


def test_the_revision_and_its_changes_are_recorded(train: Train, tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@b", "-C", str(tmp_path)]
    (tmp_path / "note").write_text("before\n")
    for step in (["init", "-q"], ["add", "note"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *step], check=True)
    (tmp_path / "note").write_text("after\n")
    noted = results.run_file(train("recipe=toy", "trainer.fast_dev_run=true"))["git"]
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert noted["revision"] == head
    assert "-before\n+after" in noted["diff"]

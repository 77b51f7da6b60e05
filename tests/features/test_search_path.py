"""Configuration files in other folders, and saved runs whose configuration files are gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers import results
from tests.helpers.internals import compose

OPTION = "_target_: torch.optim.SGD\nlr: {lr}\nmomentum: 0.0\n"
RECIPE = """# @package _global_
defaults:
  - override /model: toy
  - override /data: toy
  - override /task: regression
  - override /optimizer: slow
trainer:
  max_epochs: 3
  limit_train_batches: 5
checkpoint:
  monitor: val/loss
data:
  datasets:
    num_samples: 200
"""
SHORT = ("recipe=elsewhere", "logger=jsonl", "trainer.limit_test_batches=0")


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A folder of configuration files with a space in its name."""
    folder = tmp_path / "my conf"
    (folder / "recipe").mkdir(parents=True)
    (folder / "optimizer").mkdir()
    (folder / "recipe" / "elsewhere.yaml").write_text(RECIPE)
    (folder / "optimizer" / "slow.yaml").write_text(OPTION.format(lr=0.0001))
    (folder / "optimizer" / "fast.yaml").write_text(OPTION.format(lr=0.001))
    return folder


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        (("--config-dir=nowhere",), "--config-dir=nowhere: there is no such folder"),
        (("hydra.searchpath=[file://nowhere]",), "hydra.searchpath has file://nowhere: there is no folder"),
        (("hydra.searchpath=[nowhere]",), "hydra.searchpath has nowhere: there is no folder"),
        (
            ("hydra.searchpath=[pkg://no_such_package]",),
            "hydra.searchpath has pkg://no_such_package, which isn't there",
        ),
    ],
)
def test_a_missing_search_folder_is_an_error(train, capsys, typed, named):
    train("recipe=toy", "trainer.max_steps=1", *typed, status=2)
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("how", ["--config-dir={}", "hydra.searchpath=['file://{}']"])
def test_runs_with_search_paths_resume_and_evaluate(train, places, tmp_path, how):
    run = train(how.format(places), *SHORT, "trainer.max_steps=3")
    resumed = train(f"resume={run}", "trainer.max_steps=5", "+optimizer.dampening=0.1")
    assert results.results(resumed)["steps"] == 5
    again = train(f"rerun={run}", "optimizer=fast", "trainer.max_steps=2")
    assert results.curve(again, "train/lr")[2] == 0.001
    evaluated = train("job=eval", f"checkpoint.path={run}", "eval.part=val")
    assert results.metrics(evaluated).keys() == {"val/loss"}
    # The search path is saved with a rerun, too.
    assert results.results(train(f"rerun={again}", "optimizer=slow"))["steps"] == 2


@pytest.mark.parametrize("how", ["--config-dir={}", "hydra.searchpath=['file://{}']"])
def test_a_saved_run_needs_only_its_config(train, places, tmp_path, capsys, how):
    run = train(how.format(places), *SHORT, "trainer.max_steps=3")
    shutil.rmtree(places)
    evaluated = train("job=eval", f"checkpoint.path={run}", "eval.part=val")
    assert results.metrics(evaluated).keys() == {"val/loss"}
    assert compose.main(["job=export", f"checkpoint.path={run}"]) == 0
    resumed = train(f"resume={run}")
    assert results.results(resumed)["steps"] == 3
    capsys.readouterr()
    resumed = train(f"resume={run}", "trainer.max_steps=null", "trainer.max_epochs=2", "optimizer.lr=0.002")
    assert "Only config.yaml of outputs" in capsys.readouterr().err
    assert results.results(resumed)["steps"] == 10
    assert results.curve(resumed, "train/lr")[10] == 0.002
    again = train(f"rerun={run}", "optimizer=adam", "trainer.max_steps=2", "logger=none")
    assert "Adam" in (again / "config.yaml").read_text()
    assert "recipe: elsewhere" in (again / "config.yaml").read_text()
    train(f"rerun={run}", "optimizer=fast", status=2)
    assert "Go to the folder it was started from" in capsys.readouterr().err
    train(f"resume={run}", "trainer.max_epoch=2", status=2)
    assert "trainer.max_epoch" in capsys.readouterr().err


def test_a_run_resumes_from_another_working_folder(train, tmp_path, monkeypatch):
    conf = tmp_path / "conf" / "recipe"
    conf.mkdir(parents=True)
    (conf / "elsewhere.yaml").write_text(RECIPE.replace("optimizer: slow", "optimizer: sgd"))
    run = train(*SHORT, "trainer.max_steps=3")
    shutil.rmtree(tmp_path / "conf")
    assert results.results(train(f"resume={run}", "trainer.max_steps=4"))["steps"] == 4
    assert results.results(train(f"rerun={run}", "seed=3"))["steps"] == 4

"""Launchers as a user chooses them: one of their own, and those that earlier versions called by other names."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.helpers import results

SHORT = ("recipe=toy", "trainer.limit_test_batches=0", "checkpoint.every_n_steps=10", "trainer.max_steps=20")
OWN = """
from framework.launch.base import Launcher
from framework.launch.in_process import run_in_this_process

class Announced(Launcher):
    name = "announced"

    def __init__(self, greeting):
        self.greeting = greeting

    def launch(self, plan):
        print(f"{self.greeting} from {plan.topology.world_size} rank of {plan.run_dir.path.name}")
        return run_in_this_process(plan)
"""
OPTION = """
defaults:
  - auto

_target_: announced.Announced
args:
  greeting: Hello
"""


@pytest.fixture
def own_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "announced.py").write_text(OWN)
    (tmp_path / "conf" / "launcher").mkdir(parents=True)
    (tmp_path / "conf" / "launcher" / "announced.yaml").write_text(OPTION)


@pytest.mark.usefixtures("own_launcher")
def test_a_launcher_is_a_class_and_a_yaml(
    train: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    typed = (f"hydra.searchpath=[file://{tmp_path}/conf]", "launcher=announced", "launcher.args.greeting=Good day")
    run_dir = train(*SHORT, *typed)
    assert f"Good day from 1 rank of {run_dir.name}" in capfd.readouterr().out
    assert results.results(run_dir)["steps"] == 20

    train(*SHORT, *typed, "launcher.max_restarts=1", "topology.nnodes=2", status=2)
    printed = capfd.readouterr().err
    assert "launcher=announced is for one machine" in printed
    assert "launcher=announced doesn't restart after a failure" in printed

    train(*SHORT, *typed, "+launcher.args.volume=3", status=2)
    assert "launcher.volume: announced.Announced has no such keyword" in capfd.readouterr().err


def test_what_is_no_launcher_is_refused(train: Callable[..., Path], capfd: pytest.CaptureFixture[str]) -> None:
    train(*SHORT, "launcher._target_=framework.launch.lokal.LocalLauncher", status=2)
    assert "there is no lokal in framework.launch" in capfd.readouterr().err
    train(*SHORT, "launcher._target_=collections.OrderedDict", status=2)
    assert "must be a subclass of framework.launch.base.Launcher" in capfd.readouterr().err


@pytest.mark.parametrize("typed", ["launcher=in_place", "launcher.name=in_place", "launcher.name=in_process"])
def test_typed_earlier_names_say_the_new_one(
    train: Callable[..., Path], capfd: pytest.CaptureFixture[str], typed: str
) -> None:
    run_dir = train(*SHORT, typed)
    assert f"pid {os.getpid()}, rank 0" in results.log(run_dir)
    lines = capfd.readouterr().err.splitlines()
    assert lines.count(f"{typed} is an earlier name. Type launcher=in_process") == 1


@pytest.mark.parametrize("name", ["in_place", "in_process", "auto", "local"])
def test_a_run_of_an_earlier_version_resumes_with_its_launcher(
    train: Callable[..., Path],
    shared_run: Callable[..., Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    name: str,
) -> None:
    run = Path(shutil.copytree(shared_run(*SHORT), tmp_path / "outputs" / "toy" / "copy", symlinks=True))
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["launcher"] = {"name": name, "max_restarts": 0, "late_after": "10s"}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    overrides = yaml.safe_load((run / "overrides.yaml").read_text())
    (run / "overrides.yaml").write_text(yaml.safe_dump([*overrides, f"launcher={name}"]))
    record = json.loads((run / "run.json").read_text())
    # Earlier versions recorded no checksums.
    del record["files"], record["config"]
    (run / "run.json").write_text(json.dumps(record))

    train(f"resume={run}", "trainer.max_steps=30")
    assert results.results(run)["steps"] == 30
    assert (f"pid {os.getpid()}, rank 0" in results.log(run)) == name.startswith("in_")
    assert "earlier name" not in capfd.readouterr().err

"""Sweeps: one fork server, a directory for each job, failures that end nothing, results for sweepers."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import psutil
import pytest
import yaml

from framework import cli, run_dir
from framework.launch.warm import WarmServer
from tests.helpers import results
from tests.helpers.command import run_framework

LIMITS = ("trainer.limit_train_batches=2", "trainer.limit_val_batches=1", "trainer.limit_test_batches=0")
SHORT = ("logger=jsonl", "trainer.max_epochs=1", *LIMITS)


class Answer(NamedTuple):
    status: int
    out: str
    err: str


Sweep = Callable[..., Answer]


@pytest.fixture
def sweep(warm, tmp_path, monkeypatch, capfd) -> Sweep:
    def run(*overrides: str) -> Answer:
        monkeypatch.chdir(tmp_path)
        capfd.readouterr()
        status = cli.main(["-m", "trainer.gpus=0", *overrides], warm=warm)
        return Answer(status, *capfd.readouterr())

    return run


@pytest.fixture
def started(monkeypatch) -> list[int]:
    """The fork servers that are started from now on."""
    servers: list[int] = []
    start = WarmServer.start

    def noted(preload: tuple[str, ...]) -> WarmServer:
        server = start(preload)
        servers.append(server._process.pid)
        return server

    monkeypatch.setattr(WarmServer, "start", noted)
    return servers


def rows(out: str) -> list[list[str]]:
    """The table's cells, without its header."""
    lines = out.partition("\njob  ")[2].partition("\n\n")[0].splitlines()
    return [re.split(r"  +", line) for line in lines[1:]]


PARENT = """
import os
from pathlib import Path
class Parent:
    '''Notes who this rank's parent is.'''
    def on_fit_start(self, info):
        with Path("parents").open("a") as file:
            file.write(f"{os.getppid()} ")
"""


@pytest.mark.exhaustive
def test_all_jobs_share_one_fork_server(tmp_path, monkeypatch, capfd, started):
    """The command as `python -m framework` runs it, with a fork server of its own."""
    from framework import __main__

    (tmp_path / "noting.py").write_text(PARENT)
    swept = ("recipe=toy,digits", "seed=1,2", *SHORT, "+callbacks.p._target_=noting.Parent")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["framework", "-m", "trainer.gpus=0", *swept])
    assert __main__.main() == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    assert (tmp_path / "parents").read_text().split() == [str(started[0])] * 4
    assert len(started) == 1
    assert not psutil.pid_exists(started[0])
    (folder,) = (tmp_path / "outputs" / "multirun").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1", "2", "3"]
    configs = [yaml.safe_load((folder / str(number) / "config.yaml").read_text()) for number in range(4)]
    wanted = [(recipe, seed) for recipe in ("toy", "digits") for seed in (1, 2)]
    assert [(config["recipe"], config["seed"]) for config in configs] == wanted
    for row, (number, (recipe, seed)) in zip(rows(printed.out), enumerate(wanted), strict=True):
        score = results.results(folder / str(number))["score"]
        assert row[:4] == [str(number), f"recipe={recipe} seed={seed}", "finished", f"{score:.4f}"]
    assert f"tensorboard --logdir outputs/multirun/{folder.name}" in printed.out


@pytest.mark.exhaustive
@pytest.mark.multiproc
def test_a_job_of_a_sweep_is_the_same_run_alone(sweep, train, tmp_path):
    two = ("recipe=toy", *SHORT, "topology.procs_per_node=2")
    answer = sweep(*two, "seed=1,2")
    assert (answer.status, answer.err) == (0, "")
    (folder,) = tmp_path.glob("outputs/multirun/*")
    assert "rank 1, local rank 1, world size 2" in results.log(folder / "1", rank=1)
    results.assert_same(results.weights(folder / "1"), results.weights(train(*two, "seed=2")))
    assert results.differ(results.weights(folder / "0"), results.weights(folder / "1"))


FAILING = """
class Failing:
    '''Fails in the job with this seed.'''
    def __init__(self, seed): self.seed = seed
    def on_fit_start(self, info):
        if self.seed == 2: raise ValueError("this one fails")
"""


def test_a_failing_job_does_not_end_the_sweep(sweep, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    failing = ("+callbacks.f._target_=failing.Failing", "+callbacks.f.seed=${seed}")
    answer = sweep("recipe=toy", *SHORT, "seed=1,2,4", *failing)
    assert answer.status == 1
    (folder,) = tmp_path.glob("outputs/multirun/*")
    lines = answer.out.splitlines()
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["[0]", "seed=1", "finished"],
        ["[1]", "seed=2", "FAILED"],
        ["[2]", "seed=4", "finished"],
    ]
    assert f"log: outputs/multirun/{folder.name}/1/logs/rank_0.log" in lines[2]
    assert "1 of 3 jobs failed: 1" in lines
    assert [row[2].partition(" ")[0] for row in rows(answer.out)] == ["finished", "FAILED", "finished"]
    assert [results.run_file(folder / str(n))["status"] for n in range(3)] == ["finished", "failed", "finished"]
    for text in (answer.err, results.log(folder / "1")):
        assert "ValueError: this one fails" in text


@pytest.mark.exhaustive
def test_two_sweeps_in_the_same_second_have_folders_of_their_own(sweep, tmp_path, monkeypatch):
    now = datetime.now()
    monkeypatch.setattr(run_dir, "datetime", SimpleNamespace(now=lambda: now))
    for _ in range(2):
        assert sweep("recipe=toy", *SHORT, "seed=1").status == 0
    folders = list(tmp_path.glob("outputs/multirun/*"))
    assert len(folders) == 2
    assert [[path.name for path in folder.iterdir()] for folder in folders] == [["0"]] * 2


# A sweeper that chooses by results

SWEEPER = """
import logging
import pickle
from pathlib import Path
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

class Mine(Sweeper):
    '''Tries three learning rates, each chosen from what came before; writes down the results.'''
    def setup(self, *, hydra_context, task_function, config):
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config)
    def sweep(self, arguments):
        lr = 0.001
        for number in range(3):
            (job,) = self.launcher.launch([[*arguments, f"optimizer.lr={lr}"]], initial_job_idx=number)
            with Path("results").open("a") as file:
                value = job._return_value
                file.write(f"{lr} {job.status.name} {value if isinstance(value, float) else type(value).__name__}\\n")
            lr = "1e30" if number == 0 else 0.002
        logging.getLogger(__name__).info("Best: 0.002")
        Path(self.config.hydra.sweep.dir, "optimization_results.yaml").write_text("lr: 0.002\\n")

class Pickling(BasicLauncher):
    '''As those that start processes of their own.'''
    def launch(self, job_overrides, initial_job_idx):
        pickle.dumps(self.task_function)
"""


@pytest.fixture
def sweeper(tmp_path) -> Path:
    """A plugin as Hydra finds them, in a folder on the path; and the folder `conf` that chooses it."""
    (tmp_path / "hydra_plugins" / "mine").mkdir(parents=True)
    (tmp_path / "hydra_plugins" / "mine" / "__init__.py").touch()
    (tmp_path / "hydra_plugins" / "mine" / "sweeper.py").write_text(SWEEPER)
    for group, name in (("sweeper", "Mine"), ("launcher", "Pickling")):
        (tmp_path / "conf" / "hydra" / group).mkdir(parents=True)
        option = tmp_path / "conf" / "hydra" / group / f"{name.lower()}.yaml"
        option.write_text(f"_target_: hydra_plugins.mine.sweeper.{name}\n")
    return tmp_path


@pytest.mark.exhaustive
def test_a_sweeper_gets_the_monitored_metric_and_sees_failures(sweeper):
    command = ("-m", "recipe=toy", "trainer.gpus=0", "hydra/sweeper=mine", "seed=3", *SHORT)
    result = run_framework(*command, "trainer.log_every_n_steps=1", cwd=sweeper, env={"PYTHONPATH": str(sweeper)})
    assert result.returncode == 1, result.stderr
    (folder,) = sweeper.glob("outputs/multirun/*")
    scores = {number: results.run_file(folder / str(number)).get("results", {}).get("score") for number in range(3)}
    assert scores[1] is None
    assert scores[0] == pytest.approx(min(results.curve(folder / "0", "val/loss").values()))
    given = [line.split() for line in (sweeper / "results").read_text().splitlines()]
    assert [line[:2] for line in given] == [["0.001", "COMPLETED"], ["1e30", "FAILED"], ["0.002", "COMPLETED"]]
    assert [float(given[number][2]) for number in (0, 2)] == [scores[0], scores[2]]
    assert given[1][2] == "RunError"
    assert "1 of 3 jobs failed: 1" in result.stdout
    assert [row[1] for row in rows(result.stdout)] == ["optimizer.lr=0.001", "optimizer.lr=1e30", "optimizer.lr=0.002"]
    # What the sweeper wrote and logged is in the sweep's folder.
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1", "2", "optimization_results.yaml", "sweep.log"]
    assert (folder / "optimization_results.yaml").read_text() == "lr: 0.002\n"
    assert (folder / "sweep.log").read_text().endswith("] Best: 0.002\n")
    assert f"  sweeper      outputs/multirun/{folder.name}/optimization_results.yaml\n" in result.stdout
    # Its command runs each job alone.
    alone = ["recipe=toy", "trainer.gpus=0", "seed=3", *SHORT, "trainer.log_every_n_steps=1", "optimizer.lr=0.002"]
    assert shlex.split(results.run_file(folder / "2")["command"]) == ["python", "-m", "framework", *alone]


@pytest.mark.exhaustive
def test_a_launcher_with_processes_of_its_own_is_refused(sweeper):
    command = ("-m", "recipe=toy", "hydra/launcher=pickling", "seed=1,2")
    result = run_framework(*command, cwd=sweeper, env={"PYTHONPATH": str(sweeper)})
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(
        "hydra/launcher=pickling can't be used: a sweep runs its jobs one after another. Use"
    )
    assert len(result.stderr.splitlines()) == 1
    assert not (sweeper / "outputs").exists()

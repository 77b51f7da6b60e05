"""Sweeps by command: one fork server, a directory for each job, failures told at once, results for sweepers."""

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
def test_eight_jobs_share_one_fork_server(tmp_path, monkeypatch, capfd, started):
    """The command as `python -m framework` runs it, with a fork server of its own."""
    from framework import __main__

    (tmp_path / "noting.py").write_text(PARENT)
    swept = ("recipe=toy,digits", "optimizer.lr=0.1,0.01", "seed=1,2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["framework", "-m", "trainer.gpus=0", *swept, *SHORT, "+callbacks.p._target_=noting.Parent"]
    )
    assert __main__.main() == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    (folder,) = (tmp_path / "outputs" / "multirun").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == [str(number) for number in range(8)]
    assert [path.name for path in tmp_path.joinpath("outputs").iterdir()] == ["multirun"]
    assert (tmp_path / "parents").read_text().split() == [str(started[0])] * 8
    assert len(started) == 1
    assert not psutil.pid_exists(started[0])

    found = []
    for number in range(8):
        config = yaml.safe_load((folder / str(number) / "config.yaml").read_text())
        found.append((config["recipe"], config["optimizer"]["lr"], config["seed"]))
        assert results.run_file(folder / str(number))["status"] == "finished"
        assert results.results(folder / str(number))["steps"] == 2
        assert "world size 1" in results.log(folder / str(number))
    assert found == [(recipe, lr, seed) for recipe in ("toy", "digits") for lr in (0.1, 0.01) for seed in (1, 2)]

    lines = printed.out.splitlines()
    assert lines[0] == f"8 jobs in outputs/multirun/{folder.name}"
    for number, line in enumerate(lines[1:9]):
        assert line.startswith(f"[{number}] recipe={found[number][0]} optimizer.lr={found[number][1]} ")
        assert "  finished  " in line
    table = rows(printed.out)
    assert [row[0] for row in table] == [str(number) for number in range(8)]
    for number, row in enumerate(table):
        score = results.results(folder / str(number))["score"]
        assert row[1:4] == [
            f"recipe={found[number][0]} optimizer.lr={found[number][1]} seed={found[number][2]}",
            "finished",
            f"{score:.4f}",
        ]
    assert lines[-1] == f"  look         tensorboard --logdir outputs/multirun/{folder.name}"


@pytest.mark.multiproc
def test_several_processes_a_job(sweep, tmp_path):
    answer = sweep("recipe=toy", *SHORT, "optimizer.lr=0.1,0.01", "topology.procs_per_node=2")
    assert (answer.status, answer.err) == (0, "")
    (folder,) = tmp_path.glob("outputs/multirun/*")
    for number in range(2):
        for rank in range(2):
            assert f"rank {rank}, local rank {rank}, world size 2" in results.log(folder / str(number), rank=rank)
    assert results.differ(results.weights(folder / "0"), results.weights(folder / "1"))


def test_a_job_of_a_sweep_is_the_same_run_alone(sweep, train, tmp_path):
    sweep("recipe=toy", *SHORT, "seed=1,2")
    (folder,) = tmp_path.glob("outputs/multirun/*")
    results.assert_same(results.weights(folder / "1"), results.weights(train("recipe=toy", *SHORT, "seed=2")))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("seed=1,-2",), "seed=-2: must be a whole number at least 0"),
        (("optimizer=sgd,admm",), "optimizer=admm: optimizer has no such option."),
        (("seed=1,2", "trainer.gpsu=3"), "Did you mean trainer.gpus?"),
        (("launcher=local,in_place", "topology.procs_per_node=2"), "launcher=in_place runs one process"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_job_is_refused_before_the_first_starts(sweep, tmp_path, overrides, said):
    answer = sweep("recipe=toy", *SHORT, *overrides)
    assert answer.status == 2
    assert said in answer.err
    assert answer.out == ""
    assert list(tmp_path.iterdir()) == []


FAILING = """
class Failing:
    '''Fails in the job with this seed.'''
    def __init__(self, seed): self.seed = seed
    def on_fit_start(self, info):
        if self.seed == 2: raise ValueError("this one fails")
        if self.seed == 3: raise SystemExit(5)
"""


def test_a_failing_job_is_told_at_once_and_the_others_go_on(sweep, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    failing = ("+callbacks.f._target_=failing.Failing", "+callbacks.f.seed=${seed}")
    answer = sweep("recipe=toy", *SHORT, "seed=1,2,3,4", *failing)
    assert answer.status == 1
    (folder,) = tmp_path.glob("outputs/multirun/*")
    place = f"outputs/multirun/{folder.name}"
    lines = answer.out.splitlines()
    assert re.fullmatch(r"\[0\] seed=1  finished  \d+\.\d{4}  \d+\.\d s", lines[1])
    assert re.fullmatch(rf"\[1\] seed=2  FAILED \(1\)  \d+\.\d s  log: {place}/1/logs/rank_0\.log", lines[2])
    assert re.fullmatch(rf"\[2\] seed=3  FAILED \(\d+\)  \d+\.\d s  log: {place}/2/logs/rank_0\.log", lines[3])
    assert lines[4].startswith("[3] seed=4  finished  ")
    assert "ValueError: this one fails" in answer.err
    assert "2 of 4 jobs failed: 1, 2" in lines
    assert [row[2].partition(" ")[0] for row in rows(answer.out)] == ["finished", "FAILED", "FAILED", "finished"]
    assert [results.run_file(folder / str(n))["status"] for n in range(4)] == [
        "finished",
        "failed",
        "failed",
        "finished",
    ]
    assert "ValueError: this one fails" in results.log(folder / "1")


def test_two_sweeps_at_the_same_instant_have_different_folders(sweep, tmp_path, monkeypatch):
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
    '''Tries three learning rates, each chosen from what came before; writes down what it was told.'''
    def setup(self, *, hydra_context, task_function, config):
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config)
    def sweep(self, arguments):
        lr = 0.001
        for number in range(3):
            (job,) = self.launcher.launch([[*arguments, f"optimizer.lr={lr}"]], initial_job_idx=number)
            with Path("told").open("a") as file:
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


def test_a_sweeper_gets_the_monitored_metric_and_sees_failures(sweeper):
    command = ("-m", "recipe=toy", "trainer.gpus=0", "hydra/sweeper=mine", "seed=3", *SHORT)
    result = run_framework(*command, "trainer.log_every_n_steps=1", cwd=sweeper, env={"PYTHONPATH": str(sweeper)})
    assert result.returncode == 1, result.stderr
    (folder,) = sweeper.glob("outputs/multirun/*")
    scores = {number: results.run_file(folder / str(number)).get("results", {}).get("score") for number in range(3)}
    assert scores[1] is None
    assert scores[0] == pytest.approx(min(results.curve(folder / "0", "val/loss").values()))
    told = [line.split() for line in (sweeper / "told").read_text().splitlines()]
    assert [line[:2] for line in told] == [["0.001", "COMPLETED"], ["1e30", "FAILED"], ["0.002", "COMPLETED"]]
    assert [float(told[number][2]) for number in (0, 2)] == [scores[0], scores[2]]
    assert told[1][2] == "RunError"
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


def test_a_launcher_with_processes_of_its_own_is_refused(sweeper):
    command = ("-m", "recipe=toy", "hydra/launcher=pickling", "seed=1,2")
    result = run_framework(*command, cwd=sweeper, env={"PYTHONPATH": str(sweeper)})
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(
        "hydra/launcher=pickling can't be used: a sweep runs its jobs one after another. Use"
    )
    assert len(result.stderr.splitlines()) == 1
    assert not (sweeper / "outputs").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["recipe=toy", "trainer.gpus=0,99"], "trainer.gpus=99, but this machine has"),
        (["recipe=toy", "init_from=null,nowhere"], "nowhere"),
        (["recipe=toy", "optimizer.lr=range(1,1)"], "The sweep has no jobs"),
    ],
)
def test_a_job_that_can_not_run_is_refused_before_the_first_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["-m", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

"""Sweeps: one fork server, a directory for each job, failures that end nothing, results for sweepers."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from framework.errors import ConfigError
from tests.helpers import results
from tests.helpers.command import run_framework
from tests.helpers.internals import SweepFolder, TrialPlan, compose, read_results, sweeper_direction

LIMITS = ("trainer.limit_train_batches=2", "trainer.limit_val_batches=1", "trainer.limit_test_batches=0")
SHORT = ("logger=jsonl", "trainer.max_epochs=1", *LIMITS)


class Answer(NamedTuple):
    status: int
    out: str
    err: str


Sweep = Callable[..., Answer]


@pytest.fixture
def sweep(fork_server, tmp_path, monkeypatch, capfd) -> Sweep:
    def run(*overrides: str) -> Answer:
        monkeypatch.chdir(tmp_path)
        capfd.readouterr()
        status = compose.main(["-m", "trainer.gpus=0", *overrides], fork_server=fork_server)
        return Answer(status, *capfd.readouterr())

    return run


def rows(out: str) -> list[list[str]]:
    """The table's cells, without its header."""
    lines = out.partition("\njob  ")[2].partition("\n\n")[0].splitlines()
    return [re.split(r"  +", line) for line in lines[1:]]


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
    assert [line.split()[:3] for line in lines[1:7]] == [
        ["[0]", "seed=1", "running"],
        ["[0]", "seed=1", "finished"],
        ["[1]", "seed=2", "running"],
        ["[1]", "seed=2", "FAILED"],
        ["[2]", "seed=4", "running"],
        ["[2]", "seed=4", "finished"],
    ]
    assert f"log: outputs/multirun/{folder.name}/1/logs/rank_0.log" in lines[4]
    assert "1 of 3 jobs failed: 1" in lines
    assert [row[2].partition(" ")[0] for row in rows(answer.out)] == ["finished", "FAILED", "finished"]
    assert [results.run_file(folder / str(n))["status"] for n in range(3)] == ["finished", "failed", "finished"]
    assert [yaml.safe_load((folder / str(n) / "config.yaml").read_text())["seed"] for n in range(3)] == [1, 2, 4]
    assert rows(answer.out)[2][3] == f"{results.results(folder / '2')['score']:.4f}"
    assert f"tensorboard --logdir outputs/multirun/{folder.name}" in answer.out
    for text in (answer.err, results.log(folder / "1")):
        assert "ValueError: this one fails" in text


EDITED = """
from pathlib import Path

class Edited:
    '''Somebody edits this module while the job with seed 2 is training.'''
    def __init__(self, seed): self.seed = seed
    def on_fit_start(self, info):
        if self.seed == 2:
            with Path(__file__).open("a") as file: file.write("# another line")
"""


def test_jobs_of_changed_code_are_marked(sweep, tmp_path):
    (tmp_path / "edited.py").write_text(EDITED)
    edited = ("+callbacks.e._target_=edited.Edited", "+callbacks.e.seed=${seed}")
    assert sweep("recipe=toy", *SHORT, "seed=1,2,4", *edited).status == 0
    (folder,) = tmp_path.glob("outputs/multirun/*")
    plans = [TrialPlan(number, (f"seed={number}",), config_hash="") for number in range(3)]
    trials = read_results(SweepFolder(folder), plans)
    # What a job has imported is looked at before it trains.
    assert [trial.code_changed for trial in trials] == [False, False, True]
    assert [trial.steps for trial in trials] == [2, 2, 2]
    assert trials[0].score == results.results(folder / "0")["score"]
    modules = results.run_file(folder / "0")["modules"]
    assert modules["edited"] == hashlib.sha256(EDITED.encode()).hexdigest()
    assert modules.keys() >= {"recipes.toy"}
    assert not any(name.startswith(("framework", "torch", "numpy")) for name in modules)


# A sweeper that chooses by results

SWEEPER = """
from pathlib import Path
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
        Path(self.config.hydra.sweep.dir, "optimization_results.yaml").write_text("lr: 0.002\\n")
"""


@pytest.fixture
def sweeper(tmp_path) -> Path:
    """A plugin as Hydra finds them, in a folder on the path; and the folder `conf` that chooses it."""
    (tmp_path / "hydra_plugins" / "mine").mkdir(parents=True)
    (tmp_path / "hydra_plugins" / "mine" / "__init__.py").touch()
    (tmp_path / "hydra_plugins" / "mine" / "sweeper.py").write_text(SWEEPER)
    (tmp_path / "conf" / "hydra" / "sweeper").mkdir(parents=True)
    option = tmp_path / "conf" / "hydra" / "sweeper" / "mine.yaml"
    option.write_text("_target_: hydra_plugins.mine.sweeper.Mine\n")
    return tmp_path


@pytest.mark.exhaustive
def test_a_sweeper_sees_metrics_and_failures(sweeper):
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
    # What the sweeper wrote is in the sweep's folder.
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1", "2", "optimization_results.yaml"]
    assert (folder / "optimization_results.yaml").read_text() == "lr: 0.002\n"
    # Its command runs each job alone.
    alone = ["recipe=toy", "trainer.gpus=0", "seed=3", *SHORT, "trainer.log_every_n_steps=1", "optimizer.lr=0.002"]
    assert shlex.split(results.run_file(folder / "2")["command"]) == ["python", "-m", "framework", *alone]


DIRECTED = """
from pathlib import Path
from hydra_plugins.mine.sweeper import Mine

class Directed(Mine):
    def __init__(self, direction, params=None): self.direction = direction
    def sweep(self, arguments): Path("direction").write_text(str(self.direction))
"""


@pytest.fixture
def directed(sweeper, monkeypatch) -> Path:
    """The sweeper with a direction, as Optuna's has it."""
    (sweeper / "hydra_plugins" / "mine" / "directed.py").write_text(DIRECTED)
    option = sweeper / "conf" / "hydra" / "sweeper" / "directed.yaml"
    option.write_text("_target_: hydra_plugins.mine.directed.Directed\ndirection: minimize\nparams: null\n")
    return sweeper


@pytest.mark.exhaustive
def test_a_sweeper_optimizes_by_checkpoint_mode(directed):
    command = ("-m", "recipe=digits", "trainer.gpus=0", "hydra/sweeper=directed")
    result = run_framework(*command, cwd=directed, env={"PYTHONPATH": str(directed)})
    assert "hydra.sweeper.direction=maximize, from checkpoint.mode=max" in result.stdout, result.stderr
    assert (directed / "direction").read_text() == "maximize"


OPTUNA: dict[str, Any] = {"direction": "minimize"}


@pytest.mark.parametrize(
    ("section", "mode", "expected"),
    [
        (OPTUNA, "max", ["hydra.sweeper.direction=maximize"]),
        (OPTUNA, "min", []),
        ({"direction": ["maximize"]}, "max", []),
        ({"optim": {"maximize": False}}, "max", ["hydra.sweeper.optim.maximize=true"]),
        ({"optim": {"maximize": False}}, "min", []),
        (
            {"ax_config": {"experiment": {"minimize": True}, "early_stop": {"minimize": True}}},
            "max",
            ["hydra.sweeper.ax_config.experiment.minimize=false", "hydra.sweeper.ax_config.early_stop.minimize=false"],
        ),
        ({"n_trials": 3}, "max", []),
    ],
)
def test_a_sweepers_direction_follows_checkpoint_mode(section, mode, expected):
    assert sweeper_direction(section, typed=[], mode=mode, monitor="val/accuracy") == expected


@dataclass(frozen=True, kw_only=True)
class Contradiction:
    section: dict[str, Any]
    typed: str = "seed=1"
    mode: str = "min"
    monitor: str | None = "val/loss"
    named: str


@pytest.mark.parametrize(
    "case",
    [
        Contradiction(
            section=OPTUNA,
            typed="hydra.sweeper.direction=minimize",
            mode="max",
            monitor="val/f1",
            named="contradicts checkpoint.mode=max",
        ),
        Contradiction(section={"direction": "maximize"}, named="contradicts checkpoint.mode=min"),
        Contradiction(section={"optim": {"maximize": True}}, named="optim.maximize=true contradicts"),
        Contradiction(section={"direction": ["minimize", "maximize"]}, named="2 directions, and a job has one score"),
        Contradiction(section=OPTUNA, monitor=None, named="set checkpoint.monitor"),
    ],
)
def test_a_direction_that_contradicts_is_refused(case: Contradiction):
    with pytest.raises(ConfigError, match=case.named):
        sweeper_direction(case.section, typed=[case.typed], mode=case.mode, monitor=case.monitor)

"""However a run ends, it says so once and leaves no process in the process table; with a recipe of a user's own."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import Started, run_framework, run_python, started_framework

pytestmark = pytest.mark.multiproc

RECIPE = '''
"""A recipe of the user's own, in a folder of the user's own."""
import os, sys, time
from pathlib import Path
import torch
from torch.utils.data import Dataset
from framework import Datasets, StepOutput

class Samples(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return torch.full((4,), float(index)), torch.zeros(1)

def samples(pause_s=0):
    if pause_s:
        Path("trouble").write_text(str(time.time()))
        time.sleep(pause_s)
    return Datasets(train=Samples(), val=Samples())

class Trouble:
    """Does `what` on `rank` at step `step`; tells when it is about to."""
    def __init__(self, what, rank, step=3):
        self.what, self.rank, self.step, self.steps = what, rank, step, 0
    def training_step(self, model, batch):
        self.steps += 1
        if self.steps == self.step and os.environ["RANK"] == str(self.rank):
            Path("trouble").write_text(str(time.time()))
            if self.what == "raise": raise ValueError("a mistake in the task")
            if self.what == "exit": sys.exit(0)
            if self.what == "_exit": os._exit(0)
            if self.what == "sleep": time.sleep(300)
            if self.what == "late": time.sleep(2.5)
        inputs, targets = batch
        return StepOutput(loss=((model(inputs) - targets) ** 2).mean(), num_samples=len(inputs))
    def validation_step(self, model, batch): return self.training_step(model, batch)
'''
YAML = """# @package _global_
model: {_target_: torch.nn.Linear, in_features: 4, out_features: 1}
data: {datasets: {_target_: recipes.trouble.samples, pause_s: 0}, batch_size: 4, num_workers: 0}
task: {_target_: recipes.trouble.Trouble, what: nothing, rank: 0}
trainer: {gpus: 0, num_sanity_val_steps: 0}  # its steps are counted
optimizer: {lr: 1.0e-6}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with `recipes/trouble.py` and `conf/recipe/trouble.yaml`."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "trouble.py").write_text(RECIPE)
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "trouble.yaml").write_text(YAML)
    return tmp_path


def run_in_shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`command` in a shell that knows $PYTHON, until all its processes are gone."""
    program = "import os, sys; os.environ['PYTHON'] = sys.executable; os.execv('/bin/sh', ['sh', '-c', sys.argv[1]])"
    return run_python("-c", program, command, cwd=folder)


def run_file(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("outputs/trouble/*/run.json")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def wait_for_trouble(folder: Path, started: Started) -> float:
    """The time at which the recipe says it is in trouble."""
    deadline = time.monotonic() + 60.0
    while not (folder / "trouble").exists() or not (folder / "trouble").read_text():
        assert started.process.poll() is None, started.printed()
        assert time.monotonic() < deadline, started.printed()
        time.sleep(0.02)
    return float((folder / "trouble").read_text())


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_rank_that_raises_ends_the_run_within_5_s(folder: Path, rank: int) -> None:
    result = run_framework(
        "recipe=trouble", "task.what=raise", f"task.rank={rank}", "topology.procs_per_node=2", cwd=folder
    )
    ended = time.time()
    assert result.returncode == 1
    assert ended - float((folder / "trouble").read_text()) < 5.0
    assert result.stderr.count("Traceback") == 1
    assert result.stderr.startswith("Traceback")
    assert f"Rank {rank} of 2" in result.stderr
    assert "ValueError: a mistake in the task" in result.stderr
    assert run_file(folder)["status"] == "failed"


@pytest.mark.exhaustive  # without a whole command: test_local_launch.py
@pytest.mark.parametrize(
    ("what", "cause"), [("exit", "SystemExit: 0"), ("_exit", "left early with exit status 0, before its work was done")]
)
def test_a_rank_that_leaves_early_fails_the_run(folder: Path, what: str, cause: str) -> None:
    result = run_framework(
        "recipe=trouble", f"task.what={what}", "task.rank=1", "topology.procs_per_node=2", cwd=folder
    )
    assert result.returncode == 1
    assert "Rank 1 of 2" in result.stderr
    assert f"failed first: {cause}" in result.stderr
    assert run_file(folder)["status"] == "failed"


@pytest.mark.exhaustive
@pytest.mark.parametrize("launchers", [("launcher=in_place", "launcher=local")])
def test_a_launcher_changed_in_the_same_command_starts_its_own_server(folder: Path, launchers: tuple[str, str]) -> None:
    result = run_framework("recipe=trouble", *launchers, "trainer.max_steps=3", "topology.procs_per_node=2", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert run_file(folder)["status"] == "finished"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "closed", [">&- 2>&- <&-", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (">&-", "2>&-"))]
)
def test_closed_streams_are_no_trouble(folder: Path, closed: str) -> None:
    result = run_in_shell(f"$PYTHON -m framework recipe=trouble trainer.max_steps=3 {closed}", folder)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert run_file(folder)["status"] == "finished"


@pytest.mark.parametrize("options", ["recipe=trouble trainer.max_steps=3", "recipe=trouble task.what=raise"])
def test_a_reader_that_leaves_ends_the_command_quietly(folder: Path, options: str) -> None:
    """The reader is gone before the first line, so every write of parent and ranks fails."""
    command = f"{{ sleep 0.3; $PYTHON -m framework {options} 2>errors; echo $? >status; }} | true"
    result = run_in_shell(command, folder)
    assert (folder / "status").read_text() == "141\n"
    assert (result.stderr, (folder / "errors").read_text()) == ("", "")


def test_ranks_go_on_when_the_reader_of_their_output_leaves(folder: Path) -> None:
    """The reader leaves after the parent's first line, while the ranks are starting."""
    command = "$PYTHON -m framework recipe=trouble trainer.max_steps=3 2>errors | head -n 1"
    result = run_in_shell(command, folder)
    assert len(result.stdout.splitlines()) == 1
    assert (folder / "errors").read_text() == ""
    assert run_file(folder)["status"] == "finished"
    (log,) = folder.glob("outputs/trouble/*/logs/rank_0.log")
    assert "Linear with 5 parameters" in log.read_text()


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.exhaustive), 2])
def test_sigkill_of_the_parent_leaves_no_process(folder: Path, workers: int) -> None:
    overrides = ("task.what=sleep", "topology.procs_per_node=2", f"data.num_workers={workers}")
    with started_framework("recipe=trouble", *overrides, cwd=folder) as started:
        wait_for_trouble(folder, started)
        # parent, fork server, keeper, two ranks; torch's workers and whatever else it starts
        assert len(started.processes()) >= 5 + 2 * workers
        started.process.send_signal(signal.SIGKILL)
        assert started.wait(timeout=5.0) == -signal.SIGKILL
        started.assert_all_gone(within_s=5.0)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive), signal.SIGTERM])
def test_an_interrupt_ends_the_run_and_says_how_to_go_on(folder: Path, number: signal.Signals) -> None:
    overrides = ("task.what=sleep", "topology.procs_per_node=2", "data.num_workers=1")
    with started_framework("recipe=trouble", *overrides, cwd=folder) as started:
        wait_for_trouble(folder, started)
        started.process.send_signal(number)
        started.wait_for_output("saving after a coming step", timeout=10.0)  # which never comes
        started.process.send_signal(signal.SIGINT)
        assert started.wait(timeout=10.0) == 130
        started.assert_all_gone()
        assert "resume=outputs/trouble/" in started.stderr()
        assert "Traceback" not in started.stderr()
    assert run_file(folder)["status"] == "interrupted"


@pytest.mark.parametrize(
    "number",
    [signal.SIGUSR1, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (signal.SIGINT, signal.SIGTERM))],
)
def test_before_training_begins_there_is_nothing_to_save(folder: Path, number: signal.Signals) -> None:
    overrides = ("data.datasets.pause_s=300", "topology.procs_per_node=2")
    with started_framework("recipe=trouble", *overrides, cwd=folder) as started:
        wait_for_trouble(folder, started)
        started.process.send_signal(number)
        assert started.wait(timeout=10.0) == 130
        started.assert_all_gone()
        assert "Traceback" not in started.stderr()
    assert run_file(folder)["status"] == "interrupted"


def test_an_interrupt_before_anything_runs_leaves_no_process(folder: Path) -> None:
    with started_framework("recipe=trouble", cwd=folder) as started:
        while len(started.processes()) < 2 and started.process.poll() is None:
            time.sleep(0.005)
        started.process.send_signal(signal.SIGINT)
        assert started.wait(timeout=10.0) == 130
        started.assert_all_gone()
        assert "Traceback" not in started.stderr()


def test_a_rank_that_hangs_is_named_after_the_backends_timeout(folder: Path) -> None:
    result = run_framework(
        "recipe=trouble",
        "task.what=sleep",
        "task.rank=1",
        "topology.procs_per_node=2",
        "backend.timeout=2s",
        cwd=folder,
        timeout=60.0,
    )
    assert result.returncode == 1
    assert time.time() - float((folder / "trouble").read_text()) < 20.0
    assert "Traceback" not in result.stderr
    (header,) = [line for line in result.stderr.splitlines() if line.startswith("────")]
    assert header.startswith("──── Rank 1 of 2 (pid ")
    assert re.search(r"\) hung; the others waited \d s in backward$", header)
    assert "CPU, in forward after step 2" in result.stderr
    assert "training_step at recipes/trouble.py:" in result.stderr
    (file,) = folder.glob("outputs/trouble/*/failure.json")
    assert json.loads(file.read_text())["first"]["rank"] == 1


@pytest.mark.exhaustive  # without a whole command: test_local_launch.py
def test_a_rank_that_is_late_is_waited_for_and_kept_in_the_record(folder: Path) -> None:
    result = run_framework(
        "recipe=trouble",
        "task.what=late",
        "task.rank=1",
        "topology.procs_per_node=2",
        "trainer.max_steps=5",
        "launcher.late_after=1s",
        cwd=folder,
    )
    assert result.returncode == 0, result.stderr
    assert "is late: the others have waited 1 s for it; it is in forward after step 2" in result.stderr
    assert "Rank 1 has come after " in result.stderr
    record = run_file(folder)
    assert record["status"] == "finished"
    (late,) = record["late"]
    assert (late["rank"], late["phase"], late["step"]) == (1, "forward", 2)
    assert late["seconds"] > 1.0

"""How whole commands end: killed, interrupted, or with nobody to read their output. No process is left."""

from __future__ import annotations

import json
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks import kills
from tests.helpers import trouble
from tests.helpers.command import run_python, started_framework
from tests.helpers.stopping import wait_until
from tests.helpers.trouble import Fault

pytestmark = pytest.mark.multiproc
exhaustive = pytest.mark.exhaustive
START_S = 90.0
END_S = 60.0
WORKERS = ("data.num_workers=2", "trainer.max_steps=100000")


def run_in_shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`command` in a shell that knows $PYTHON, until all its processes are gone."""
    program = "import os, sys; os.environ['PYTHON'] = sys.executable; os.execv('/bin/sh', ['sh', '-c', sys.argv[1]])"
    return run_python("-c", program, command, cwd=folder)


def run_file(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((trouble.run_dir(folder) / "run.json").read_text())
    return content


@pytest.mark.parametrize("who", ["command", *(pytest.param(who, marks=exhaustive) for who in ("server", 0, 1))])
def test_whichever_process_is_killed_none_is_left(tmp_path: Path, who: str | int) -> None:
    """The command, the fork server, or a rank."""
    trouble.write_recipe(tmp_path, Fault("sleep", rank=0, step=3))
    with started_framework("recipe=trouble", "topology.procs_per_node=2", *WORKERS, cwd=tmp_path) as started:
        done = trouble.wait_until_done(tmp_path, started, timeout=START_S)
        processes = started.processes()
        # There are the command, the server, two ranks and their workers.
        assert len(processes) >= 2 + 2 + 2 * 2
        (rank,) = [process for process in processes if process.pid == done["pid"]]
        server = rank.parent()
        assert server is not None
        children = sorted(server.children(), key=lambda process: process.pid)
        victim = {"command": started.process.pid, "server": server.pid}
        victim.update({str(number): child.pid for number, child in enumerate(children)})
        next(each for each in processes if each.pid == victim[str(who)]).kill()
        assert started.wait(timeout=END_S) == (-signal.SIGKILL if who == "command" else 1)
        started.assert_all_gone(within_s=END_S)


@exhaustive
def test_a_random_kill_leaves_no_process() -> None:
    with ExitStack() as stack:
        result = kills.run(kills.Case(0, "local", True, 1.0), kills.Machines(stack), only="worker")
    assert (result.role, result.wrong) == ("worker", ())
    assert "| local | worker | 1 | 1 |" in kills.table([result])


@exhaustive
def test_ctrl_c_before_anything_runs_leaves_no_process(tmp_path: Path) -> None:
    with started_framework("recipe=toy", cwd=tmp_path) as started:
        wait_until(lambda: len(started.processes()) >= 2 or started.process.poll() is not None)
        started.process.send_signal(signal.SIGINT)
        assert started.wait(timeout=END_S) == 130
        started.assert_all_gone()
        assert "Traceback" not in started.stderr()


class Output(NamedTuple):
    """Where a command's output goes, as a shell says it, and in which encoding."""

    place: str
    encoding: str = ""


GONE = "| true"
OUTPUTS = [
    Output(">/dev/full 2>/dev/full", encoding="ascii"),
    pytest.param(Output("2>/dev/full", encoding="latin-1"), marks=exhaustive),
    # The reader is gone before the first line, so every write of the command and its ranks fails.
    pytest.param(Output("2>errors" + GONE), marks=exhaustive),
    pytest.param(Output("2>&1" + GONE), marks=exhaustive),
    pytest.param(Output(">&- 2>&- <&-"), marks=exhaustive),
    pytest.param(Output("2>&-"), marks=exhaustive),
]


def run_to(output: Output, program: str, folder: Path) -> str:
    """Return the exit status, as the shell says it, of a Python program with this output."""
    command = f"PYTHONIOENCODING={output.encoding} $PYTHON {program}"
    run_in_shell(f"{{ {{ {command}; echo $? >&3; }} 3>status; }} {output.place}", folder)
    return (folder / "status").read_text().strip()


@pytest.mark.parametrize("output", OUTPUTS)
def test_output_never_ends_a_training(tmp_path: Path, output: Output) -> None:
    trouble.write_recipe(tmp_path, Fault())
    overrides = "'tags=[\"first–×÷\"]' trainer.log_every_n_steps=1 topology.procs_per_node=2"
    assert run_to(output, f"-m framework recipe=trouble {overrides}", tmp_path) == "0"
    assert run_file(tmp_path)["status"] == "finished"


PROGRAM = """
from pathlib import Path
import torch, framework
from torch import nn
from torch.utils.data import TensorDataset

if __name__ == "__main__":
    data = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
    settings = {"max_steps": 2, "gpus": 0}
    framework.train(model=nn.Linear(2, 1), data=(data, data), task="regression", name="a×b", trainer=settings)
    Path("trained").touch()
"""


@exhaustive
@pytest.mark.parametrize("output", [Output("", encoding="ascii"), Output("2>&1" + GONE), Output(">&- 2>&- <&-")])
def test_output_never_ends_a_training_from_python(tmp_path: Path, output: Output) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    run_to(output, "program.py", tmp_path)
    assert (tmp_path / "trained").exists()


class Ending(NamedTuple):
    """What is printed to which place, and how the command ends."""

    arguments: str
    place: str
    status: str
    error: str = ""


FULL = "The output can't be written: No space left on device.\n"


@pytest.mark.parametrize(
    "ending",
    [
        Ending("job=runs", ">/dev/full", status="1", error=FULL),
        Ending("job=runs", GONE, status="141"),
        pytest.param(Ending("job=runs runs.format=csv", ">/dev/full", status="1", error=FULL), marks=exhaustive),
        pytest.param(Ending("job=plan recipe=toy", ">/dev/full", status="1", error=FULL), marks=exhaustive),
        pytest.param(Ending("job=plan recipe=toy", GONE, status="141"), marks=exhaustive),
        pytest.param(Ending("--help", ">/dev/full", status="1", error=FULL), marks=exhaustive),
        pytest.param(Ending("--cfg job recipe=toy", GONE, status="141"), marks=exhaustive),
        pytest.param(Ending("--version", ">/dev/full", status="1", error=FULL), marks=exhaustive),
    ],
)
def test_a_lost_answer_is_an_exit_status(tmp_path: Path, ending: Ending) -> None:
    assert run_to(Output(f"2>errors {ending.place}"), f"-m framework {ending.arguments}", tmp_path) == ending.status
    assert (tmp_path / "errors").read_text() == ending.error


@exhaustive
def test_ranks_finish_without_a_reader_of_output(tmp_path: Path) -> None:
    """The reader leaves after the command's first line, while the ranks are starting."""
    trouble.write_recipe(tmp_path, Fault())
    result = run_in_shell("$PYTHON -m framework recipe=trouble 2>errors | head -n 1", tmp_path)
    assert len(result.stdout.splitlines()) == 1
    wait_until(lambda: run_file(tmp_path)["status"] != "running")
    assert (tmp_path / "errors").read_text() == ""
    assert run_file(tmp_path)["status"] == "finished"
    # The log holds the model's summary.
    assert "  Linear  " in (trouble.run_dir(tmp_path) / "logs" / "rank_0.log").read_text()

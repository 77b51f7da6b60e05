"""One failure, one report: it names the first cause, its rank, phase, step and stack, and no process is left.

`benchmarks/failures.py` draws such cases by the hundred.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.failures import FAULTS, Case, Result, draw, run, table, wrong_in_report
from tests.helpers import results, trouble
from tests.helpers.trouble import EVERY, PHASES, Fault

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_state")]
exhaustive = pytest.mark.exhaustive
SHOW_CURSOR = "\x1b[?25h"
# What the command sends to a terminal at the end of a failed run, after a carriage return.
CLEAR_UP = f"\x1b[J{SHOW_CURSOR}"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen() -> tuple[Terminal, Terminal]:
    """What `misbehave` prints: stdout and stderr."""
    return Terminal(), Terminal()


@pytest.fixture
def misbehave(train: Callable[..., Path], tmp_path: Path, screen: Any) -> Callable[..., Path]:
    """Run a training in which a rank has a fault; `code` ends the recipe's module. Return the run directory."""

    def run(fault: Fault, *overrides: str, procs: int = 2, status: int = 1, code: str = "") -> Path:
        trouble.write_recipe(tmp_path, fault)
        recipe = tmp_path / "recipes" / "trouble.py"
        recipe.write_text(f"{recipe.read_text()}\n{code}")
        with redirect_stdout(screen[0]), redirect_stderr(screen[1]):
            return train("recipe=trouble", f"topology.procs_per_node={procs}", *overrides, status=status)

    return run


def report(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "failure.json").read_text())
    return content


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A fault in a run of `procs` processes, and what its report says; `frame` is a function of the stack."""

    fault: Fault
    procs: int = 2
    cause: str
    frame: str | None = None


@pytest.mark.parametrize(
    "failure",
    [
        Failure(fault=Fault("SIGKILL", rank=1, phase="backward", step=5), procs=3, cause="killed by SIGKILL"),
        Failure(fault=Fault("SIGSEGV", rank=0, phase="forward", step=3), cause="killed by SIGSEGV", frame="in do"),
        Failure(
            fault=Fault("raise", rank=2, phase="optimizer", step=6), procs=3, cause="ValueError: the fault was raised"
        ),
        Failure(fault=Fault("os._exit", rank=1, phase="evaluate", step=EVERY), cause="exited with status 0 before"),
        Failure(fault=Fault("sys.exit", rank=0, phase="checkpoint", step=2 * EVERY), cause="SystemExit: 3"),
        Failure(
            fault=Fault("sleep", rank=1, phase="data", step=6), procs=3, cause="hung; the others waited", frame="in do"
        ),
        pytest.param(
            Failure(fault=Fault("SIGSTOP", rank=0, phase="forward", step=5), cause="was stopped", frame="in do"),
            marks=exhaustive,
        ),
        pytest.param(
            Failure(fault=Fault("os._exit", rank=0, phase="backward", step=9), procs=4, cause="with status 0"),
            marks=exhaustive,
        ),
        pytest.param(
            Failure(fault=Fault("SIGKILL", rank=0, phase="checkpoint", step=EVERY), cause="SIGKILL"), marks=exhaustive
        ),
    ],
    ids=lambda failure: f"{failure.fault.what}-{failure.fault.phase}",
)
def test_the_first_cause_is_reported_once(
    misbehave: Callable[..., Path], tmp_path: Path, screen: Any, failure: Failure
) -> None:
    timeout_s = 3.0 if FAULTS[failure.fault.what].waits else 60.0
    run_dir = misbehave(failure.fault, f"backend.timeout={timeout_s}", procs=failure.procs)
    found = report(run_dir)
    done = trouble.done(tmp_path)
    assert done is not None
    first = found["first"]
    assert list(wrong_in_report(Case(0, failure.procs, failure.fault, timeout_s), first, done=done)) == []
    assert first["step"] == failure.fault.step - (failure.fault.phase not in ("evaluate", "checkpoint"))
    assert failure.cause in first["cause"]
    assert all(other["lost_peer"] or other["timed_out"] for other in found["others"])
    assert failure.fault.rank not in {other["rank"] for other in found["others"]}
    if failure.frame is not None:
        assert failure.frame in first["stacks"]
        assert "recipes/trouble.py" in first["stacks"]
    out, err = (stream.getvalue() for stream in screen)
    # The cursor is visible again, whoever had hidden it.
    assert SHOW_CURSOR in out
    # An exception of the user's data names the sample instead.
    assert err.count("Traceback") == (first["kind"] == "exception" and failure.fault.phase != "data")
    (header,) = [line for line in err.splitlines() if line.removeprefix(CLEAR_UP).startswith("────")]
    assert f"Rank {failure.fault.rank} of {failure.procs} (pid {done['pid']})" in header
    assert f"in {failure.fault.phase} after step {first['step']}" in err
    assert results.run_file(run_dir)["status"] == "failed"


@pytest.mark.parametrize(
    ("what", "cause", "kind"),
    [
        ("os._exit(0)", "exited with status 0 before", "exit"),
        pytest.param("time.sleep(300)", "hung; the others waited", "hung", marks=exhaustive),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL", "signal", marks=exhaustive),
    ],
)
def test_a_missing_rank_is_named(misbehave: Callable[..., Path], screen: Any, what: str, cause: str, kind: str) -> None:
    code = f"if os.environ['RANK'] == '1': {what}"
    first = report(misbehave(Fault(), "backend.init_timeout=4s", procs=3, code=code))["first"]
    assert (first["rank"], first["step"], first["kind"]) == (1, 0, kind)
    assert first["phase"] == "starting"
    assert cause in first["cause"]
    assert "before its first step" in screen[1].getvalue()


def test_a_recipe_missing_on_one_rank_is_refused(misbehave: Callable[..., Path], tmp_path: Path, screen: Any) -> None:
    misbehave(Fault(), procs=3, code="if os.environ['RANK'] == '1': import no_such_module", status=2)
    assert "no_such_module" in screen[1].getvalue()
    assert "Traceback" not in screen[1].getvalue()
    assert not list(tmp_path.glob("outputs/*/*"))


def test_a_rank_that_is_late_is_waited_for(misbehave: Callable[..., Path], screen: Any) -> None:
    fault = Fault("delay", rank=1, phase="data", step=6, seconds=2.0)
    run_dir = misbehave(fault, "launcher.late_after=1s", "backend.timeout=30s", procs=3, status=0)
    (late,) = results.run_file(run_dir)["late"]
    assert (late["rank"], late["phase"], late["step"]) == (1, "data", 5)
    assert late["seconds"] >= 1.0
    # Each line first erases what a live view shows.
    lines = [line.removeprefix("\x1b[J") for line in screen[1].getvalue().splitlines()]
    lines = [line for line in lines if line.startswith("Rank")]
    assert [bool(re.match(r"Rank 1 (\(pid \d+\) is late|caught up)", line)) for line in lines] == [True, True]
    assert not (run_dir / "failure.json").exists()
    # No rank was ended early.
    assert SHOW_CURSOR not in screen[0].getvalue()


TOGETHER = """
WHAT = {"0": "%s", "2": "%s"}

class Task(Task):
    def training_step(self, model, batch):
        output, rank = super().training_step(model, batch), os.environ["RANK"]
        if steps == 5 and rank in WHAT:
            Path(f"here_{rank}").touch()
            while len(list(Path().glob("here_*"))) < len(WHAT): pass
            do(WHAT[rank])
        return output
"""


@pytest.mark.parametrize(
    ("what", "causes", "said"),
    [
        (("raise", "SIGKILL"), {"ValueError: the fault was raised", "killed by SIGKILL"}, "also failed: "),
        pytest.param(("SIGKILL", "SIGKILL"), {"killed by SIGKILL"}, "also failed: killed", marks=exhaustive),
        pytest.param(
            ("raise", "raise"), {"ValueError: the fault was raised"}, "failed with the same", marks=exhaustive
        ),
    ],
)
def test_ranks_that_fail_together_are_all_named(
    misbehave: Callable[..., Path], screen: Any, what: tuple[str, str], causes: set[str], said: str
) -> None:
    found = report(misbehave(Fault(), procs=3, code=TOGETHER % what))
    themselves = [each for each in [found["first"], *found["others"]] if not each["lost_peer"]]
    assert {each["rank"] for each in themselves} == {0, 2}
    assert {each["cause"] for each in themselves} == causes
    assert f"Rank {themselves[0]['rank']} of 3" in screen[1].getvalue()
    assert f"ank {themselves[1]['rank']} {said}" in screen[1].getvalue()


SPOILED = """
import shutil
for folder in Path("outputs/trouble").iterdir(): (folder / "failure.json").mkdir(exist_ok=True)
"""


def test_a_failure_that_cannot_be_saved_is_shown(misbehave: Callable[..., Path], screen: Any) -> None:
    misbehave(Fault("raise", rank=1), code=SPOILED)
    err = screen[1].getvalue()
    assert "ValueError: the fault was raised" in err
    assert "failure.json can't be written" in err.splitlines()[-1]


@exhaustive
@pytest.mark.parametrize("launcher", ["local", "elastic"])
@pytest.mark.parametrize(
    "how", ["threading.Thread(target=time.sleep, args=(300,)).start()", "atexit.register(time.sleep, 300)"]
)
def test_a_finished_rank_that_stays_is_ended(misbehave: Callable[..., Path], launcher: str, how: str) -> None:
    code = f"import atexit, threading\nif os.environ['RANK'] == '1': {how}"
    run_dir = misbehave(Fault(), f"launcher={launcher}", status=0, code=code)
    assert "doesn't leave after its work" in (run_dir / "logs" / "rank_1.log").read_text()
    assert results.run_file(run_dir)["status"] == "finished"
    assert results.results(run_dir)["steps"] == 3 * EVERY


# The benchmark


@exhaustive
@pytest.mark.parametrize("what", FAULTS)
def test_a_random_case_is_reported_by_the_command(what: str) -> None:
    seed = list(FAULTS).index(what)
    assert run(draw(seed, processes=(2, 3), whats=[what], timeout_s=5.0)).wrong == ()


def test_seeds_are_repeatable_and_cover_all_cases() -> None:
    given = [draw(seed, processes=(2, 8), whats=list(FAULTS), timeout_s=5.0) for seed in (*range(300), *range(300))]
    assert given[:300] == given[300:]
    assert {each.num_processes for each in given} == set(range(2, 9))
    assert {(each.fault.what, each.fault.phase) for each in given} == set(itertools.product(FAULTS, PHASES))
    assert all(0 <= each.fault.rank < each.num_processes and 1 < each.fault.step < 3 * EVERY for each in given)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"step": 6}, []),
        ({"step": 7}, ["step is 7, not 5"]),
        ({"pid": 43}, ["pid is 43, not 42"]),
        ({"kind": "stopped"}, ["kind is 'stopped', not 'hung'"]),
        ({"stacks": ""}, ["no Python stacks of the rank, which lived"]),
    ],
)
def test_a_wrong_report_is_seen_and_counted(changed: dict[str, object], said: list[str]) -> None:
    hung = Case(seed=0, num_processes=2, fault=Fault("sleep", rank=1, phase="data", step=5), timeout_s=5.0)
    first = {"rank": 1, "pid": 42, "node": 0, "local_rank": 1, "kind": "hung", "signal": None, "phase": "data"}
    first |= {"step": 4, "exception": None, "stacks": "Current thread"}
    assert list(wrong_in_report(hung, {**first, **changed}, done={"rank": 1, "pid": 42})) == said
    shown = table([Result(hung, tuple(said), 0.5), Result(hung, (), 2.0)]).splitlines()
    assert shown[2:] == [f"| {each} | 2 | {2 - len(said)} | 2.0 |" for each in ("sleep", "all")]

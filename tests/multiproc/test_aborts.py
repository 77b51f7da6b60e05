"""A library aborts the process, as NCCL's watchdog does 0.1 s after an error of a GPU: the report has the error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import trouble
from tests.helpers.trouble import Fault

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_state")]
exhaustive = pytest.mark.exhaustive

ASSERT = "CUDA error: device-side assert triggered"
# `where` the error is raised; the watchdog aborts meanwhile, since closing takes longer.
WATCHDOG = f"""
import threading

def watch():
    time.sleep(0.1)
    os.write(2, b"[rank] Process group watchdog thread terminated with exception: {ASSERT}\\nmore of C++\\n")
    os.abort()

def fail():
    if os.environ["RANK"] == FAULT["rank_that_fails"]:
        threading.Thread(target=watch, daemon=True).start()
        if FAULT["is_seen"]:
            raise RuntimeError("{ASSERT}\\nCompile with TORCH_USE_CUDA_DSA")
        time.sleep(60)

class Task(Task):
    def training_step(self, model, batch):
        if FAULT["where"] == "step" and steps == 5:
            fail()
        return super().training_step(model, batch)
    def validation_step(self, model, batch):
        if FAULT["where"] == "validation" and steps:
            fail()
        return super().validation_step(model, batch)

class Model(torch.nn.Linear):
    def __init__(self, **keywords):
        super().__init__(**keywords)
        if FAULT["where"] == "model":
            fail()

class Slow:
    def on_fit_end(self): pass
    def close(self): time.sleep(1)
"""


@pytest.fixture
def failure_of(train: Callable[..., Path], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Train with a watchdog; return what the report says of the first rank that failed."""

    def run(*, where: str, rank: int, procs: int, is_seen: bool) -> dict[str, Any]:
        trouble.write_recipe(tmp_path, Fault())
        file = tmp_path / "fault.json"
        fault = {"where": where, "rank_that_fails": str(rank), "is_seen": is_seen}
        file.write_text(json.dumps(json.loads(file.read_text()) | fault))
        recipe = tmp_path / "recipes" / "trouble.py"
        recipe.write_text(f"{recipe.read_text()}\n{WATCHDOG}")
        slow = ("model._target_=recipes.trouble.Model", "+callbacks.slow._target_=recipes.trouble.Slow")
        run_dir = train("recipe=trouble", f"topology.procs_per_node={procs}", *slow, status=1)
        first: dict[str, Any] = json.loads((run_dir / "failure.json").read_text())["first"]
        assert first["rank"] == rank
        return first

    return run


@pytest.mark.parametrize(
    ("where", "rank", "procs"),
    [
        ("step", 1, 2),
        pytest.param("step", 0, 1, marks=exhaustive),
        pytest.param("validation", 0, 2, marks=exhaustive),
        pytest.param("model", 1, 2, marks=exhaustive),
    ],
)
def test_an_aborted_process_still_reports_its_error(
    failure_of: Callable[..., Any], where: str, rank: int, procs: int
) -> None:
    first = failure_of(where=where, rank=rank, procs=procs, is_seen=True)
    assert first["kind"] == "exception"
    assert first["cause"].startswith(f"RuntimeError: {ASSERT}")
    assert "in fail" in first["traceback"]


@exhaustive
def test_ten_of_ten_aborts_report_their_error(failure_of: Callable[..., Any]) -> None:
    causes = [failure_of(where="step", rank=1, procs=2, is_seen=True)["cause"] for _ in range(10)]
    assert [cause.partition("\n")[0] for cause in causes] == [f"RuntimeError: {ASSERT}"] * 10


@pytest.mark.parametrize(("rank", "procs"), [(0, 2), pytest.param(1, 2, marks=exhaustive)])
def test_an_unseen_abort_is_reported_with_its_output(
    failure_of: Callable[..., Any], capfd: pytest.CaptureFixture[str], rank: int, procs: int
) -> None:
    """Rank 0's output goes to the terminal, too."""
    first = failure_of(where="step", rank=rank, procs=procs, is_seen=False)
    assert first["cause"] == f"killed by SIGABRT: {ASSERT}"
    assert "more of C++" in Path(first["log"]).read_text()
    printed = capfd.readouterr().err
    assert "failed first: killed by SIGABRT\n" in printed
    assert f"  printed  {ASSERT}\n" in printed
    assert "CUDA_LAUNCH_BLOCKING=1" in printed

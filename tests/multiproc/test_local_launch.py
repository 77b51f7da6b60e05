"""What the ranks that the launcher starts are given, by every way to meet, and where their output goes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_state")]
PROBE = '''
import json, os, subprocess, sys, time
from pathlib import Path

class Probe:
    """Leaves what this rank sees of itself in a file, and writes to every stream."""
    def __init__(self):
        seen = {"environment": dict(os.environ), "cwd": os.getcwd(), "argv": sys.argv, "stdin": sys.stdin.read()}
        Path(f"seen_{os.environ['RANK']}.json").write_text(json.dumps(seen))
        print("printed")
        print("complained", file=sys.stderr)
        subprocess.run(["/bin/sh", "-c", "echo from a descriptor"], check=True)
        if (pid := os.fork()) == 0:
            sys.exit(3)
        os.waitpid(pid, 0)  # its end is not this rank's
    def on_train_step_end(self, report): pass
'''
OVERRIDES = ("recipe=toy", "trainer.max_steps=2", "+callbacks.probe._target_=probe.Probe")


@pytest.fixture
def probe(train: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[Path, list[dict[str, Any]]]]:
    """Run a short training; return its directory and what each rank saw."""

    def run(procs: int, *overrides: str) -> tuple[Path, list[dict[str, Any]]]:
        (tmp_path / "probe.py").write_text(PROBE)
        run_dir = train(*OVERRIDES, f"topology.procs_per_node={procs}", *overrides)
        return run_dir, [json.loads((tmp_path / f"seen_{rank}.json").read_text()) for rank in range(procs)]

    return run


def test_ranks_get_torchruns_variables_and_the_world(
    probe: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SET_LATER", "after the fork server was started")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(sys, "argv", ["framework", "recipe=some"])
    run_dir, seen = probe(3)
    for rank, each in enumerate(seen):
        environment = each["environment"]
        wanted = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3}
        assert {name: int(environment[name]) for name in wanted} == wanted
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert environment["TORCHELASTIC_RESTART_COUNT"] == "0"
        assert environment["SET_LATER"] == os.environ["SET_LATER"]
        assert "HOME" not in environment
        assert (each["cwd"], each["argv"], each["stdin"]) == (str(tmp_path), ["framework", "recipe=some"], "")
        lines = (run_dir / "logs" / f"rank_{rank}.log").read_text().splitlines()
        assert {"printed", "complained"} <= set(lines)
        # What C code of rank 0 writes goes to the terminal.
        assert ("from a descriptor" in lines) is (rank > 0)
    assert len({each["environment"]["MASTER_PORT"] for each in seen}) == 1


@pytest.mark.parametrize("method", ["tcp", "file"])
def test_ranks_meet_by_every_init_method(probe: Callable[..., Any], method: str) -> None:
    """The path of the run directory may have any letters; torch cuts the path of a file at some."""
    run_dir, _ = probe(2, f"backend.init_method={method}", "path.outputs='outputs/a#b?c%20d e'")
    assert json.loads((run_dir / "run.json").read_text())["status"] == "finished"


LEAVER = """
class Leaver:
    def on_train_step_end(self, report): raise SystemExit(0)
"""


def test_leaving_early_in_process_is_a_failure(
    train: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "leaver.py").write_text(LEAVER)
    train("recipe=toy", "launcher=in_process", "+callbacks.leaver._target_=leaver.Leaver", status=1)
    err = capsys.readouterr().err
    assert "SystemExit(0) was raised at " in err
    assert "leaver.py:3" in err

"""Torch isn't imported where seconds count: by what reads the configuration, and by commands that only answer.

A package named torch stands in for it that notes who imported it, in whatever process; then every import fails.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import framework
import framework.strategies
from tests.helpers.command import run_framework, run_python
from tests.helpers.internals import JOBS
from tests.helpers.source import modules_in

PARENT_SIDE = sorted(
    name
    for name in modules_in("framework")
    if name == "framework"
    or name.split(".")[1]
    in ("command", "config", "errors", "launch", "media", "runs", "sweeps", "system", "types", "__main__")
    or name.removeprefix("framework.jobs.") in JOBS
)

STAND_IN = """
import os, sys, traceback
with open(os.environ["TORCH_NOTES"], "a") as notes:
    notes.write(f"{sys.argv}\\n" + "".join(traceback.format_stack()))
raise ImportError("torch was imported")
"""


@pytest.fixture
def tripwire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every process that imports torch from now on writes its call stack to this file."""
    package = tmp_path / "stand_in" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    notes = tmp_path / "notes"
    path = os.pathsep.join(filter(None, [str(package.parent), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("TORCH_NOTES", str(notes))
    return notes


def noted(tripwire: Path) -> str:
    return tripwire.read_text() if tripwire.exists() else ""


def test_the_tripwire_sees_an_import_in_a_child(tripwire: Path) -> None:
    run_python("-c", "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import torch'])")
    assert "<module>" in noted(tripwire)


def test_importing_the_parent_side_leaves_torch_out(tripwire: Path) -> None:
    """All in one process; what is noted has the line of the import."""
    result = run_python("-c", f"import {', '.join(PARENT_SIDE)}")
    assert noted(tripwire) == ""
    assert result.returncode == 0, result.stderr


def test_dir_lists_public_names_without_torch(tripwire: Path) -> None:
    program = "import framework; print(*dir(framework))"
    assert run_python("-c", program).stdout.split() == sorted(framework.__all__)
    assert noted(tripwire) == ""
    for module in (framework, framework.strategies):
        assert dir(module) == sorted(module.__all__)
        assert all(hasattr(module, name) for name in dir(module))


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--help"], 0),
        (["job=runs"], 0),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in (
                (["recipe=toy", "--cfg", "job", "--resolve"], 0),
                (["--info", "defaults"], 0),
                (["recipe=no"], 2),
            )
        ),
    ],
    ids=str,
)
def test_a_command_that_only_answers_imports_no_torch(
    arguments: list[str], status: int, tripwire: Path, tmp_path: Path
) -> None:
    """A wrong request may have had the fork server try, whose attempt fails here: another process answers."""
    result = run_framework(*arguments, cwd=tmp_path)
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr
    if status == 0:
        assert noted(tripwire) == ""
        assert result.stdout.strip()
    importers = [line for line in noted(tripwire).splitlines() if line.startswith("[")]
    assert [line for line in importers if "fork_server" not in line and arguments[0] in line] == []

"""Running notebooks in a real kernel, as `jupyter execute` does."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import nbformat

from tests.helpers.command import Started, started_program

_EXECUTE = "from nbclient.cli import main; main()"


def write_notebook(path: Path, cells: Sequence[str]) -> Path:
    """A notebook with these code cells."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    path.write_text(nbformat.writes(notebook))
    return path


@contextmanager
def started_notebook(path: Path, *, cwd: Path) -> Iterator[Started]:
    """A notebook that is running; its outputs go to `executed.ipynb` in `cwd`."""
    # ipykernel doesn't show what child processes print if it believes to be under test itself.
    command = ("env", "--unset=PYTEST_CURRENT_TEST", sys.executable, "-W", "ignore", "-c", _EXECUTE)
    arguments = ("--allow-errors", f"--output={cwd / 'executed.ipynb'}", "--timeout=100", str(path))
    with started_program(*command, *arguments, cwd=cwd) as started:
        yield started


def run_notebook(path: Path, *, cwd: Path, timeout: float = 110.0) -> list[str]:
    """What each code cell showed, its error included. Fails the test if a process is left behind."""
    with started_notebook(path, cwd=cwd) as started:
        assert started.wait(timeout=timeout) == 0, started.printed()
        started.assert_all_gone()
    executed = json.loads((cwd / "executed.ipynb").read_text())
    cells = [cell for cell in executed["cells"] if cell["cell_type"] == "code"]
    return ["".join(map(_text, cell["outputs"])) for cell in cells]


def _text(output: dict[str, object]) -> str:
    match output["output_type"]:
        case "stream":
            return "".join(output["text"])  # type: ignore[arg-type]
        case "error":
            return f"{output['ename']}: {output['evalue']}\n"
        case _:
            return "".join(output["data"].get("text/plain", "")) + "\n"  # type: ignore[attr-defined]

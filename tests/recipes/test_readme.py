"""The README's Python, with the files that it shows: each program runs to its end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.command import run_framework, run_python
from tests.helpers.documents import write_shown_files
from tests.helpers.source import ROOT

pytestmark = [pytest.mark.multiproc, pytest.mark.exhaustive]

BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def test_every_python_block_runs(tmp_path: Path) -> None:
    write_shown_files(tmp_path)
    (tmp_path / "conf" / "recipe" / "mine.yaml").unlink(missing_ok=True)
    assert BLOCKS
    for number, block in enumerate(BLOCKS):
        program = tmp_path / f"block_{number}.py"
        program.write_text(block)
        done = run_python(program.name, cwd=tmp_path, timeout=100)
        assert done.returncode == 0, done.stderr
    done = run_framework("recipe=mine", "trainer.max_steps=1", "trainer.max_epochs=null", cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr

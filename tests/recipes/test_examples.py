"""The scripts and the notebook in `examples/`, run as a user would."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.command import ROOT, run_framework, run_python
from tests.helpers.notebooks import run_notebook

EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.multiproc


def run_example(name: str, cwd: Path) -> str:
    done = run_python(str(EXAMPLES / name), cwd=cwd, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run_here() -> None:
    # tests/multiproc runs collectives.py.
    listed = {"digits.py", "learning_rates.py", "autoencoder.py", "digits.ipynb", "collectives.py"}
    assert {file.name for file in EXAMPLES.iterdir() if file.is_file()} == listed


def test_digits(tmp_path: Path) -> None:
    printed = run_example("digits.py", tmp_path)
    accuracy = float(printed.partition("tested: ")[2].partition(",")[0])
    assert accuracy > 0.7
    assert "9,674 parameters, trained in digits" in printed


@pytest.mark.exhaustive
def test_the_script_of_the_documentation(tmp_path: Path) -> None:
    script = (ROOT / "docs/python.md").read_text().partition("```python\n")[2].partition("```")[0]
    (tmp_path / "train_digits.py").write_text(script)
    done = run_python("train_digits.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Training train_digits: 2 processes, CPU" in done.stdout
    assert "{'val/loss': " in done.stdout


@pytest.mark.exhaustive
def test_learning_rates(tmp_path: Path) -> None:
    printed = run_example("learning_rates.py", tmp_path)
    (best,) = (line for line in printed.splitlines() if line.endswith("best"))
    typed = run_framework("recipe=best_rate", cwd=tmp_path)
    assert typed.returncode == 0, typed.stderr
    assert f"val/accuracy {float(best.split()[3]):.4g}".rstrip("0") in typed.stdout


@pytest.mark.exhaustive
def test_autoencoder(tmp_path: Path) -> None:
    printed = run_example("autoencoder.py", tmp_path)
    assert "EarlyStopping: val/loss did not improve" in printed
    assert float(printed.partition("pixels within 0.1: ")[2].split()[0]) > 0.6


@pytest.mark.exhaustive
def test_notebook(tmp_path: Path) -> None:
    *_, table, metrics, accuracy, predicted, failure = run_notebook(EXAMPLES / "digits.ipynb", cwd=tmp_path)
    assert "val/accuracy" in table
    assert "Resuming digits_notebook: 2 processes, CPU" in metrics
    assert float(accuracy) > 0.8
    assert predicted.startswith("tensor([")
    assert failure.rstrip().endswith("1 ValueError: a mistake on one process")

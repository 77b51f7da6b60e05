"""What `benchmarks.prove_gpu` installs, runs and reports on a machine with a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import prove_gpu
from benchmarks.prove_gpu import Report
from tests.helpers.source import ROOT

TOO_LARGE = {"torch", "torchvision", "numpy", "scikit-learn"}

PYTEST_PRINTS = """\
tests/gpu/test_training.py::test_one[gpu] SKIPPED (needs 1 GPU(s), and torch sees 0) [  7%]
tests/gpu/test_training.py::test_two[dataloader data.num_workers=2-cpu] PASSED [ 14%]
tests/gpu/test_failures.py::test_three[cpu] FAILED                       [ 21%]

=================================== FAILURES ===================================
E   assert 1 == 2
FAILED tests/gpu/test_failures.py::test_three[cpu] - assert 1 == 2
""".splitlines()


def test_every_outcome_has_a_line_and_failures_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove_gpu, "_lines", lambda *_, **__: iter(PYTEST_PRINTS))
    report = Report(tmp_path / "GPU.md")
    assert not prove_gpu.tests(report, {}, limit_s=10.0, has_gpu=False)
    written = (tmp_path / "GPU.md").read_text()
    for cell in (
        "| test_training.py::test_one[gpu] | skipped: needs 1 GPU(s), and torch sees 0 |",
        "| test_training.py::test_two[dataloader data.num_workers=2-cpu] | passed |",
        "| test_failures.py::test_three[cpu] | failed |",
        "1 skipped, 1 passed, 1 failed",
        "E   assert 1 == 2",
    ):
        assert cell in written


def test_the_wheels_have_all_that_the_project_needs_but_for_what_is_too_large() -> None:
    listed = (ROOT / "benchmarks" / "gpu_wheels.txt").read_text().splitlines()
    wheels = {re.split(r"[=<>]", line)[0].lower() for line in listed if not line.startswith("#")}
    project = (ROOT / "pyproject.toml").read_text()
    needed = re.findall(r'"([\w-]+)[^"]*"', project[project.index("dependencies = [") : project.index("[project.opt")])
    assert {name.lower() for name in needed} - TOO_LARGE <= wheels

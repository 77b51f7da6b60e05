"""What `benchmarks.prove_gpu` runs and reports on a machine with a GPU, and the wheels that it takes along."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import gpu_wheels, prove_gpu
from benchmarks.gpu_events import PREFIX
from benchmarks.gpu_wheels import Package
from benchmarks.on_gpu import PLANNED
from tests.helpers.source import ROOT

WITH_TORCH = {"torch", "torchvision", "scikit-learn"}

# What stands for tests/gpu: all outcomes, and a test that doesn't end.
TESTS = """
import subprocess, sys, time
import pytest

def test_passes(): pass

@pytest.mark.parametrize("number", [1])
def test_fails(number):
    print("a line it printed")
    text = "x" * 30_000
    assert text == "short" + "``` of three"

@pytest.fixture
def leaves():
    yield
    raise RuntimeError("it left something behind")

def test_leaves(leaves): pass

def test_skips(): pytest.skip("needs 2 GPU(s) | and sees 1")

def test_hangs():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    open("hangs", "w").close()
    time.sleep(600)

def test_after(): pass
"""


@pytest.fixture
def fake_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with such tests, in place of the repository."""
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "tests" / "gpu" / "test_some.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--exhaustive', action='store_true')\n"
    )
    monkeypatch.setattr(prove_gpu, "ROOT", tmp_path)
    monkeypatch.setattr(prove_gpu.Command, "is_asked_to_end", False)
    return tmp_path


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def processes_of(folder: Path) -> list[str]:
    """Return the command lines of living processes that work in a folder."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if link.resolve() == folder.resolve():
                found.append((link.parent / "cmdline").read_text())
        except OSError:
            # The process has ended, or is another user's.
            continue
    return found


def test_a_cut_run_names_its_test_and_failures(
    fake_tests: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It also ends what the test has started, even in another session. A signal cuts it, so no time matters."""
    stopper = threading.Thread(target=ask_to_end_once, args=(fake_tests / "hangs", monkeypatch))
    stopper.start()
    report = prove_gpu.Report(fake_tests / "GPU.md", ["# head"])
    outcome = prove_gpu.tests(report, environment(), limit_s=100.0, has_gpu=False)
    stopper.join()
    assert (outcome.is_well, outcome.was_cut) == (False, True)
    written = (fake_tests / "GPU.md").read_text()
    printed = capsys.readouterr().out
    rows = re.findall(r"^\| test_some.py::(\S+) \| (.+?) \| [\d.–]+ \|$", written, flags=re.MULTILINE)
    assert rows == [
        ("test_passes", "passed"),
        ("test_fails[1]", "failed"),
        ("test_leaves", "error"),
        ("test_skips", r"skipped: needs 2 GPU(s) \| and sees 1"),
        ("test_hangs", "cut"),
    ], printed
    assert "Cut during `test_some.py::test_hangs`. 1 passed, 1 failed, 1 error, 1 skipped, in " in written
    for shown in (written, printed):
        assert "x" * 30_000 in shown
        assert "a line it printed" in shown
        assert "RuntimeError: it left something behind" in shown
    deadline = time.monotonic() + 10
    while processes_of(fake_tests):
        assert time.monotonic() < deadline, processes_of(fake_tests)
        time.sleep(0.05)


def ask_to_end_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deadline = time.monotonic() + 90
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    monkeypatch.setattr(prove_gpu.Command, "is_asked_to_end", True)


def test_tests_that_cannot_be_imported_are_shown(fake_tests: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (fake_tests / "tests" / "gpu" / "test_some.py").write_text("import nothing_of_that_name")
    report = prove_gpu.Report(fake_tests / "GPU.md", ["# head"])
    outcome = prove_gpu.tests(report, environment(), limit_s=100.0, has_gpu=False)
    assert (outcome.is_well, outcome.was_cut) == (False, False)
    assert "No module named 'nothing_of_that_name'" in (fake_tests / "GPU.md").read_text()


class FakeCommand:
    """Prints lines and looks at the report meanwhile: what is there if all is killed at that moment."""

    def __init__(self, lines: list[str], report: Path, *, was_cut: bool = False, status: int = 0) -> None:
        self.given = lines
        self.report = report
        self.was_cut = was_cut
        self.status = status
        self.seen: list[str] = []

    def __call__(self, *_: Any, **__: Any) -> FakeCommand:
        return self

    def lines(self) -> Any:
        for line in self.given:
            yield line
            self.seen.append(self.report.read_text())

    def seconds(self) -> float:
        return 7.0


def test_the_report_always_names_the_running_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "GPU.md"
    begins = f"..{PREFIX}{json.dumps({'begins': 'tests/gpu/test_a.py::test_b[gpu]'})}"
    command = FakeCommand([begins], file)
    monkeypatch.setattr(prove_gpu, "Command", command)
    prove_gpu.tests(prove_gpu.Report(file, ["# head"]), {}, limit_s=10.0, has_gpu=True)
    assert "Running: `test_a.py::test_b[gpu]`" in command.seen[0]


@pytest.mark.parametrize("was_cut", [False, True])
def test_missing_rows_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_cut: bool) -> None:
    """A row that is printed again, after another round, replaces the first."""
    file = tmp_path / "GPU.md"
    lines = [f"{PLANNED}a step ÷ theirs", f"{PLANNED}a compiled step ÷ theirs"]
    lines += ["| on_gpu | a step ÷ theirs | 1 µs | 2 µs | 0.50 | – | – |", "  round 1 of 1: ours: wall 1e-6"]
    lines += ["| on_gpu | a step ÷ theirs | 1 µs | 4 µs | 0.25 | – | – |"]
    command = FakeCommand(lines, file, was_cut=was_cut, status=-9 if was_cut else 0)
    monkeypatch.setattr(prove_gpu, "Command", command)
    outcome = prove_gpu.benchmarks(prove_gpu.Report(file, ["# head"]), {}, limit_s=10.0, has_gpu=True)
    assert outcome == prove_gpu.Outcome(not was_cut, was_cut)
    written = file.read_text()
    assert "| on_gpu | a compiled step ÷ theirs | missing | missing | – | – | – |" in written
    assert "Cut: 1 of 2 rows are missing." in written
    assert "2 µs" not in written
    assert "4 µs" in written
    assert written.count("step ÷ theirs |") == 2
    assert "a compiled step ÷ theirs | missing" in command.seen[1]


def test_a_command_is_cut_at_its_limit() -> None:
    code = "import time; print('one', flush=True); time.sleep(100)"
    command = prove_gpu.Command(["-c", code], environment(), limit_s=prove_gpu._END_S + 5)
    assert list(command.lines()) == ["one"]
    assert (command.was_cut, command.status) == (True, -signal.SIGKILL)


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        ([(True, False), (True, False)], 0),
        ([(False, False), (True, False)], 1),
        ([(False, True), (True, False)], 3),
        ([(False, False), (False, True)], 3),
    ],
)
def test_the_exit_status_says_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_state: None, outcomes: list[tuple[bool, bool]], status: int
) -> None:
    for part, outcome in zip(prove_gpu.PARTS, outcomes, strict=True):
        monkeypatch.setattr(prove_gpu, part, lambda *_, ended=outcome, **__: prove_gpu.Outcome(*ended))
    monkeypatch.setattr(prove_gpu, "read_facts", lambda _: {"GPUs": 1})
    monkeypatch.setattr(sys, "argv", ["prove_gpu", "--report", str(tmp_path / "GPU.md")])
    assert prove_gpu.main() == status


def test_reports_are_joined_with_what_differs(tmp_path: Path) -> None:
    made = {"TESTS": ("torch: 2.11", "GPU 0: H100"), "BENCHMARKS": ("torch: 2.11", "GPU 0: H200")}
    for name, (torch, gpu) in made.items():
        report = prove_gpu.Report(tmp_path / name, [prove_gpu.TITLE, "", f"- {torch}", f"- {gpu}"])
        section = report.begin(name.lower(), ["| head |", "|---|"])
        section.rows["row"] = f"| a row of {name} |"
        section.texts["failed"] = "# no title\n## nor this\n```"
        report.write()
    both = tmp_path / "GPU.md"
    prove_gpu.join([tmp_path / name for name in made], both)
    text = both.read_text()
    assert text.startswith(f"{prove_gpu.TITLE}\n\n- torch: 2.11\n- GPU 0: H100\n\n## tests\n")
    assert "## benchmarks\n\nHere:\n\n- GPU 0: H200\n" in text
    assert [text.count(word) for word in ("torch: 2.11", "a row of TESTS", "a row of BENCHMARKS")] == [1, 1, 1]
    assert text.count("## nor this") == 2


# The wheels


def test_the_wheels_have_the_projects_versions_of_all_but_torch() -> None:
    listed = gpu_wheels.read_requirements()
    project = (ROOT / "pyproject.toml").read_text()
    dependencies = project[project.index("dependencies = [") : project.index("[project.opt")]
    for text in re.findall(r'"([^"]+)"', dependencies):
        needed = Requirement(text)
        if needed.name not in WITH_TORCH:
            assert str(listed[canonicalize_name(needed.name)].specifier) == str(needed.specifier), text
    assert {"pytest", "pytest-timeout", "hypothesis", "lightning", "accelerate"} <= listed.keys()


def test_torch_and_installed_packages_are_left_out() -> None:
    packages = [
        Package("torch", "2.14", frozenset({"sympy", "cuda-toolkit"})),
        Package("sympy", "1.14", frozenset({"mpmath"})),
        Package("mpmath", "1.3", frozenset()),
        Package("cuda-toolkit", "13.0", frozenset()),
        Package("nvidia-cufft", "12.0", frozenset()),
        Package("numpy", "2.4", frozenset()),
        Package("nvidia-ml-py", "13.6", frozenset()),
        Package("hypothesis", "6.1", frozenset({"sortedcontainers"})),
        Package("sortedcontainers", "2.4", frozenset()),
        Package("pytest", "9.2", frozenset()),
        Package("rich", "15.0", frozenset()),
        Package("omegaconf", "2.3.1", frozenset()),
    ]
    have = gpu_wheels.read_pip_list(
        "Package      Version\n------------ ------------\nPyTest       8.1.0\nrich         14.0.0\n"
        "torch        2.11.0+cu130\nomegaconf==2.5.0.dev3\n"
    )
    assert have["torch"] == "2.11.0+cu130"
    wanted = gpu_wheels.to_download(packages, have=have, requirements=gpu_wheels.read_requirements())
    # pytest and omegaconf are there, in versions that aren't allowed.
    names = ["nvidia-ml-py", "hypothesis", "sortedcontainers", "pytest", "omegaconf"]
    assert [package.name for package in wanted] == names


def test_what_pip_has_chosen_is_read_without_extras() -> None:
    needs = ["sortedcontainers<3,>=2.1", "numpy>=1; extra == 'numpy'", "tomli; python_version < '3'"]
    entry = {"metadata": {"name": "Hypothesis", "version": "6.1", "requires_dist": needs}}
    (package,) = gpu_wheels.chosen({"install": [entry]})
    assert package == Package("hypothesis", "6.1", frozenset({"sortedcontainers"}))

"""Output that the documentation shows is what the command prints, except for what depends on the machine."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import results
from tests.helpers.command import run_framework
from tests.helpers.documents import documents, shown_text
from tests.helpers.internals import compose
from tests.helpers.source import ROOT

pytestmark = pytest.mark.multiproc

README = ROOT / "README.md"
_EXCERPT = re.compile(r"^```text\n\$ python -m framework (.*)\n((?:.*\n)*?)```", re.MULTILINE)
_COMMANDS: dict[str, str] = {}
for _file in documents():
    _COMMANDS |= dict(_EXCERPT.findall(_file.read_text()))
_RUN = re.compile(r"outputs/\w+/(?:\.\.\.|[\d_-]+_[0-9a-f]{4})")
_NUMBER = re.compile(r"\d[\d,.]*\b")

# Sweeps print measured times.
_ANSWERS = [command for command in _COMMANDS if not command.startswith("-m ")]

Typed = Callable[..., tuple[int, str]]


def words(text: str, *, numbers: bool = True) -> list[str]:
    """The words of a text, however its lines are wrapped. numbers: false where one number is as good as another."""
    text = _RUN.sub("RUN", text)
    return (text if numbers else _NUMBER.sub("#", text)).split()


@pytest.fixture
def typed(fork_server, tmp_path, monkeypatch, capfd) -> Typed:
    """Type a command in an empty folder; return its exit status and all that it prints."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        capfd.readouterr()
        status = compose.main(arguments, fork_server=fork_server)
        return status, "".join(capfd.readouterr())

    return run


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", _ANSWERS)
def test_documented_output_is_what_a_command_prints(typed: Typed, command: str) -> None:
    """An excerpt that ends in `…` is the beginning."""
    shown = _COMMANDS[command].rstrip()
    _, printed = typed(*shlex.split(command))
    if shown.endswith("…"):
        lines = shown.splitlines()[:-1]
        assert printed.splitlines()[: len(lines)] == lines
    else:
        assert printed.rstrip() == shown


def test_documented_run_files_and_damaged_checkpoint(typed: Typed, tmp_path: Path) -> None:
    page = ROOT / "docs/checkpoints.md"
    short = ("trainer.gpus=0", "trainer.max_epochs=2", "trainer.limit_train_batches=2")
    assert typed("recipe=toy", *short)[0] == 0
    (run_dir,) = tmp_path.glob("outputs/toy/*")
    tree = shown_text(README, begins="outputs/digits/")
    names = {re.sub(r"(?<=tfevents\.).*", "", path.name) for path in run_dir.iterdir()}
    assert names <= set(re.findall(r"[\w.]+", tree))
    tree = shown_text(page, begins="checkpoints/\n")
    last = run_dir / "checkpoints" / "last"
    assert {path.name for path in last.iterdir()} == set(re.findall(r"^    ([\w.]+)", tree, re.MULTILINE))

    with (last / "training.pt").open("r+b") as file:
        file.truncate(4)
    assert typed(f"resume={run_dir.relative_to(tmp_path)}")[0] == 0
    log = " ".join(words(results.log(run_dir).replace(f"{tmp_path}/", ""), numbers=False))
    for line in shown_text(page, begins="The checkpoint outputs/digits").splitlines():
        assert " ".join(words(line, numbers=False)) in log


# What depends on the machine or the run is replaced.
_MASKS = (
    (re.compile(r"(?:/\S*/)?outputs/\S+"), "RUN"),
    (re.compile(r"\bcpu [A-Z].*"), "cpu"),
    (re.compile(r"digits_\d+"), "MODEL"),
    (re.compile(r"\b(?:features|classifier)\.[\w.]+"), "LAYER"),
    (re.compile(r"(?<![\w.])[-+]?\d[\d.,:]*(?:e[-+]\d+)?(?: (?:[KMG]i?B|B|[mµn]?s)\b)?"), "#"),
    (re.compile(r"best and last \(step #\)|best \(step #\) last \(step #\)"), "BEST"),
    (re.compile(r"# (?:#|–)$"), "#"),
)
_DIGITS = ("recipe=digits", "trainer.limit_train_batches=10")


def masked(text: str) -> list[str]:
    """Return the lines of a text without what depends on the machine or the run."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for pattern, stands_for in _MASKS:
        lines = [pattern.sub(stands_for, line) for line in lines]
    return lines


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("page", "begins", "commands"),
    [
        ("README.md", "$ python -m framework\nTraining digits", [(*_DIGITS, "trainer.max_epochs=3")]),
        ("docs/tune.md", "Tuning digits", [("job=tune", "recipe=digits", "tune.max_batch_size=16")]),
        ("docs/parity.md", "Comparing mnist", [("job=parity", "recipe=mnist")]),
        (
            "docs/export.md",
            "Exported ConvNet",
            [(*_DIGITS, "trainer.max_epochs=1"), ("job=export", "checkpoint.path=RUN", "export.format=onnx")],
        ),
    ],
)
def test_each_line_of_an_excerpt_is_printed(
    tmp_path: Path, request: pytest.FixtureRequest, page: str, begins: str, commands: list[tuple[str]]
) -> None:
    if page == "docs/export.md" and not all(map(importlib.util.find_spec, ("onnxruntime", "onnxscript"))):
        pytest.skip("onnxruntime or onnxscript isn't installed")
    for command in commands:
        run = next(tmp_path.glob("outputs/*/2*"), tmp_path)
        arguments = [text.replace("RUN", str(run)) for text in command] + ["trainer.gpus=0"]
        if "recipe=mnist" in command:
            arguments.append(f"data.root={request.getfixturevalue('data_root')}")
        result = run_framework(*arguments, cwd=tmp_path, timeout=110)
        printed = result.stdout + result.stderr
        assert result.returncode == 0, printed
    shown = shown_text(ROOT / page, begins=begins).replace("$ python -m framework\n", "")
    absent = set(masked(shown)) - set(masked(printed.replace(" trainer.gpus=0", ""))) - {"…"}
    assert not absent, printed

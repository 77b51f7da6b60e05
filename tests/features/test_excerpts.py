"""Output that the documentation shows is what the command prints, except for what depends on the machine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from framework import cli
from framework.launch.failure import Kind, RankFailure
from framework.launch.panel import render
from framework.launch.report import FailureReport
from tests.helpers import results
from tests.helpers.documents import documents, shown_text
from tests.helpers.source import ROOT

pytestmark = pytest.mark.multiproc

README = ROOT / "README.md"
_COMMANDS = {
    found[1]: found[2]
    for file in documents()
    for found in re.finditer(r"^```text\n\$ python -m framework (.*)\n((?:.*\n)*?)```", file.read_text(), re.MULTILINE)
}
_RUN = re.compile(r"outputs/\w+/(?:\.\.\.|[\d_-]+_[0-9a-f]{4})")
_NUMBER = re.compile(r"\d[\d,.]*\b")

_ANSWERS = [command for command in _COMMANDS if not command.startswith("-m ")]  # sweeps print what they measured

Typed = Callable[..., tuple[int, str]]


def words(text: str, *, numbers: bool = True) -> list[str]:
    """The words of a text, however its lines are wrapped. numbers: false where one number is as good as another."""
    text = _RUN.sub("RUN", text)
    return (text if numbers else _NUMBER.sub("#", text)).split()


@pytest.fixture
def typed(warm, tmp_path, monkeypatch, capfd) -> Typed:
    """Type a command in an empty folder; return its exit status and all that it prints."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        capfd.readouterr()
        status = cli.main(arguments, warm=warm)
        return status, "".join(capfd.readouterr())

    return run


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", _ANSWERS)
def test_what_is_shown_below_a_command_is_what_it_prints(typed: Typed, command: str) -> None:
    """An excerpt that ends in `…` is the beginning."""
    shown = _COMMANDS[command].rstrip()
    _, printed = typed(*shlex.split(command))
    if shown.endswith("…"):
        lines = shown.splitlines()[:-1]
        assert printed.splitlines()[: len(lines)] == lines
    else:
        assert printed.rstrip() == shown


@pytest.mark.exhaustive
def test_files_that_cannot_be_downloaded(typed: Typed, tmp_path: Path) -> None:
    shown = shown_text(ROOT / "docs/data.md", begins="train-images-idx3-ubyte.gz and 3 more")
    status, printed = typed("recipe=mnist", "trainer.gpus=0", "data.mirrors=[http://files.example/mnist]")
    assert status != 0
    printed = printed[printed.index("train-images") :].replace(str(tmp_path), "/home/me")
    reason = re.compile(r" \([^()]*\)\.$", re.MULTILINE)  # of a network that is or isn't there
    assert words(reason.sub("", printed))[: len(words(reason.sub("", shown)))] == words(reason.sub("", shown))


def test_the_report_of_a_rank_that_hangs() -> None:
    def failure(rank: int, kind: Kind, **facts: object) -> RankFailure:
        place = {"node": 0, "host": "gpu01", "local_rank": rank, "devices": f"GPU {rank}", "pid": 16778 + rank}
        log = f"{run_dir}/logs/rank_{rank}.log"
        return RankFailure(rank=rank, kind=kind, step=3, time=0.0, log=log, **place, **facts)  # type: ignore[arg-type]

    run_dir = "outputs/mine/2026-11-21_07-08-22_74b4"
    calls = [("recipes/mine.py", 27, "decode"), ("recipes/mine.py", 36, "__getitem__")]
    calls += [("framework/data/fetch.py", 100, "_load")]
    stack = "".join(f'  File "{file}", line {line} in {name}\n' for file, line, name in calls)
    report = FailureReport(
        world_size=4,
        first=failure(
            1,
            Kind.HUNG,
            phase="data",
            waited_s=60.0,
            waited_in="backward",
            stacks=f"Current thread 0x7f00 (most recent call first):\n{stack}",
        ),
        others=tuple(failure(rank, Kind.EXCEPTION, phase="backward", timed_out=True) for rank in (0, 2, 3)),
        file=f"{run_dir}/failure.json",
    )
    assert render(report) == shown_text(ROOT / "docs/failures.md", begins="──── Rank 1").rstrip()
    assert render(report).startswith(shown_text(README, begins="──── Rank 1").rstrip())


@pytest.mark.exhaustive
def test_a_model_that_leaves_out_parameters_under_ddp(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "partly.py").write_text(
        "from torch import nn\n\n\n"
        "class Partly(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.used, self.other = nn.Linear(10, 5), nn.Linear(10, 5)\n\n"
        "    def forward(self, x):\n"
        "        return self.used(x)\n"
    )
    two = ("trainer.gpus=0", "topology.procs_per_node=2", "strategy=ddp")
    _, printed = typed("recipe=toy", "model._target_=partly.Partly", *two)
    shown = words(shown_text(ROOT / "docs/strategies.md", begins="strategy=ddp awaits"))
    printed = printed[printed.index("strategy=ddp awaits") :]
    assert words(printed)[: len(shown)] == shown


def test_files_of_a_run_and_the_answer_to_a_damaged_checkpoint(typed: Typed, tmp_path: Path) -> None:
    page = ROOT / "docs/checkpoints.md"
    short = ("trainer.gpus=0", "trainer.max_epochs=2", "trainer.limit_train_batches=2")
    assert typed("recipe=toy", *short)[0] == 0
    (run_dir,) = tmp_path.glob("outputs/toy/*")
    tree = shown_text(README, begins="outputs/digits/")
    assert {path.name for path in run_dir.iterdir()} <= set(re.findall(r"[\w.]+", tree))
    tree = shown_text(page, begins="checkpoints/\n")
    last = run_dir / "checkpoints" / "last"
    assert {path.name for path in last.iterdir()} == set(re.findall(r"^    ([\w.]+)", tree, re.MULTILINE))

    with (last / "training.pt").open("r+b") as file:
        file.truncate(4)
    assert typed(f"resume={run_dir.relative_to(tmp_path)}")[0] == 0
    log = " ".join(words(results.log(run_dir).replace(f"{tmp_path}/", ""), numbers=False))
    for line in shown_text(page, begins="The checkpoint outputs/digits").splitlines():
        assert " ".join(words(line, numbers=False)) in log

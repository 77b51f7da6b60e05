"""Runs whose files are damaged: lists, comparisons and reports name them and go on; what names one is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers import results
from tests.helpers.internals import compose

SHORT = ("recipe=toy", "trainer.max_steps=20", "trainer.log_every_n_steps=10")
Train = Callable[..., Path]


class Damage(NamedTuple):
    """What is damaged, and whether the run can still be shown: the loss of metrics costs these alone."""

    name: str
    make: Callable[[Path], object]
    is_readable: bool = False
    costs_metrics: bool = False


def content(file: str, text: str | bytes) -> Callable[[Path], object]:
    raw = text.encode() if isinstance(text, str) else text
    return lambda run: (run / file).write_bytes(raw)


def truncated(file: str) -> Callable[[Path], object]:
    return lambda run: (run / file).write_bytes((run / file).read_bytes()[:101])


def facts(**changed: Any) -> Callable[[Path], object]:
    return lambda run: (run / "run.json").write_text(json.dumps(results.run_file(run) | changed))


def folder(file: str) -> Callable[[Path], object]:
    def replace(run: Path) -> None:
        (run / file).unlink()
        (run / file).mkdir()

    return replace


def dangling(file: str) -> Callable[[Path], object]:
    def replace(run: Path) -> None:
        (run / file).unlink()
        (run / file).symlink_to("nowhere")

    return replace


def fifo(file: str) -> Callable[[Path], object]:
    def replace(run: Path) -> None:
        (run / file).unlink()
        os.mkfifo(run / file)

    return replace


HUGE = 10**400
WRONG_FACTS: list[dict[str, Any]] = [
    {"status": None},
    {"status": 1},
    {"started": "yesterday"},
    {"started": "2026-01-01T00:00:00"},
    {"ended": []},
    {"recipe": {}},
    {"monitor": ["val/loss"]},
    {"mode": 1},
    {"overrides": None},
    {"overrides": [["seed=1"]]},
    {"earlier": ["once"]},
    {"earlier": {"started": "x"}},
    {"command": 5},
    {"git": "abc"},
    {"git": {"revision": 1, "diff": None}},
    {"git": {"diff": []}},
    {"versions": []},
    {"hardware": "large"},
    {"topology": [1]},
    {"results": []},
    {"results": {"best": 1}},
    {"results": {"best": {"metrics": {"val/loss": "low"}}}},
    {"results": {"last": {"metrics": {"val/loss": HUGE}}}},
    {"results": {"test": {"metrics": []}}},
    {"results": {"texts": {"table": 5}}},
    {"results": {"steps": "ten"}},
]
ODD_BUT_READABLE: list[dict[str, Any]] = [
    {"results": {"best": {"metrics": {"val/loss": float("nan")}}, "last": {"metrics": {"val/loss": float("inf")}}}},
    {"results": {"steps": 5}},
    {"results": None, "earlier": None, "git": None, "versions": None, "hardware": None, "topology": None},
    {"hardware": {"gpus": [1]}, "topology": {"nnodes": "two"}, "versions": {"torch": []}},
    {"command": "python 'open"},
]
ROWS = [
    '{"step": 1, "val/loss": "low"}\n',
    '{"step": 1, "val/loss": 1e999}\n',
    f'{{"step": 1, "val/loss": {HUGE}}}\n{{"step": {HUGE}, "val/loss": 1}}\n',
    '{"step": 1, "val/loss": NaN}\n{"step": 2, "val/loss": [1]}\nnot a row\n',
    "",
]
KINDS = (folder, dangling, fifo)


def damages() -> list[Damage]:
    table = []
    for text in ("[]", "{}", "", "{", "null", b"\xff\xfe"):
        table.append(Damage(f"run.json is {text!r}", content("run.json", text)))
    for wrong in WRONG_FACTS:
        table.append(Damage(f"run.json with {wrong}", facts(**wrong)))
    for odd in ODD_BUT_READABLE:
        table.append(Damage(f"run.json with {odd}", facts(**odd), is_readable=True))
    for row in ROWS:
        table.append(
            Damage(
                f"metrics.jsonl is {row!r}", content("metrics.jsonl", row), is_readable=True, costs_metrics=row != ""
            )
        )
    for text in ("", "[]", "{", "a: [1", b"\xff"):
        table.append(Damage(f"config.yaml is {text!r}", content("config.yaml", text)))
    # Somebody has edited them.
    for text in ("{1: {2: 3}}", "checkpoint: 5\n"):
        table.append(Damage(f"config.yaml is {text!r}", content("config.yaml", text), is_readable=True))
    for text in ("", "{}", "- 'a"):
        table.append(Damage(f"overrides.yaml is {text!r}", content("overrides.yaml", text)))
    for make in KINDS:
        metrics = make("metrics.jsonl")
        table.append(Damage(f"metrics.jsonl is a {make.__name__}", metrics, is_readable=True, costs_metrics=True))
        table.append(Damage(f"run.json is a {make.__name__}", make("run.json")))
        table.append(Damage(f"config.yaml is a {make.__name__}", make("config.yaml")))
    table.append(Damage("run.json is cut", truncated("run.json")))
    table.append(Damage("run.json is gone", lambda run: (run / "run.json").unlink()))
    table.append(Damage("config.yaml is gone", lambda run: (run / "config.yaml").unlink()))
    return table


class Answer(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., Answer]:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Answer:
        capsys.readouterr()
        return Answer(compose.main(arguments), *capsys.readouterr())

    return run


@pytest.fixture
def made(shared_run: Train, tmp_path: Path) -> Callable[..., Path]:
    """Copies a run to `outputs/toy/NAME`."""

    def copy(name: str) -> Path:
        run_dir = tmp_path / "outputs" / "toy" / name
        shutil.copytree(shared_run(*SHORT), run_dir, symlinks=True, ignore=shutil.ignore_patterns("checkpoints"))
        return run_dir

    return copy


@pytest.fixture
def hurt(made: Callable[..., Path]) -> dict[str, Damage]:
    """Makes `outputs/toy/hurt_N` for each damage, and the undamaged runs `whole` and `other`."""
    made("whole")
    made("other")
    runs = {}
    for number, damage in enumerate(damages()):
        run_dir = made(f"hurt_{number}")
        damage.make(run_dir)
        runs[display(run_dir)] = damage
    return runs


def display(run_dir: Path) -> str:
    return f"outputs/toy/{run_dir.name}"


READERS = {
    "list": ("job=runs",),
    "sorted by a key": ("job=runs", "runs.sort=optimizer.lr"),
    "csv": ("job=runs", "runs.format=csv"),
    "comparison": ("job=compare", "runs=outputs/toy"),
    "report": ("job=report", "runs=outputs/toy", "report.output=page.html"),
}


def test_damaged_runs_are_named_and_others_are_shown(tmp_path: Path, ask: Any, hurt: dict[str, Damage]) -> None:
    wrong = []
    for name, arguments in READERS.items():
        answer = ask(*arguments)
        assert answer.status == 0, (name, answer.err)
        out = (tmp_path / "page.html").read_text() if name == "report" else answer.out
        assert re.search(r"outputs/toy/whole\b", out)
        for run, damage in hurt.items():
            is_shown = re.search(rf"{run}\b", out) is not None
            is_named = re.search(rf"^{run} is damaged: ", answer.err, re.MULTILINE) is not None
            if (is_shown, is_named) != (damage.is_readable, not damage.is_readable):
                wrong.append((name, damage.name[:80]))
            if name == "report" and answer.err.count(f"{run}/metrics.jsonl") != damage.costs_metrics:
                wrong.append((name, damage.name[:80]))
    assert wrong == []
    num_damaged = sum(not damage.is_readable for damage in hurt.values())
    assert f"and {num_damaged} damaged runs\n" in ask("job=runs").out


@pytest.mark.exhaustive
def test_a_damaged_run_that_is_named_is_refused(ask: Any, hurt: dict[str, Damage]) -> None:
    for run, damage in hurt.items():
        if damage.is_readable:
            continue
        answer = ask("job=compare", f"runs=[outputs/toy/whole,{run}]")
        assert answer.status == 2, damage.name
        assert f"runs={run}: {run} is damaged: " in answer.err


@pytest.mark.exhaustive
def test_no_damage_ends_resuming_with_a_traceback(ask: Any, hurt: dict[str, Damage]) -> None:
    # Composing costs a second.
    for run in list(hurt)[::5]:
        for key in ("resume", "rerun"):
            answer = ask("--cfg", "job", f"{key}={run}")
            assert answer.status == 0 or run in answer.err


def test_damaged_metrics_of_an_unfinished_run_are_named(ask: Any, made: Any) -> None:
    made("whole")
    run_dir = made("hurt")
    facts(status="failed", results=None)(run_dir)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "val/loss": "low"}\n')
    named = (
        r"outputs/toy/hurt/metrics\.jsonl: line \d is damaged \(val/loss isn't a finite number\)\. What is .* out\.\n"
    )
    for arguments in READERS.values():
        assert re.fullmatch(named, ask(*arguments).err)


def test_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, ask: Any, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made("whole")
    (tmp_path / "outputs/secret").mkdir()
    iterdir = Path.iterdir

    def refusing(self: Path) -> Any:
        if self.name == "secret":
            raise PermissionError(13, "Permission denied", str(self))
        return iterdir(self)

    monkeypatch.setattr(Path, "iterdir", refusing)
    answer = ask("job=runs")
    assert "1 run in outputs" in answer.out
    assert answer.err == "outputs/secret can't be read: Permission denied.\n"


def test_a_run_named_twice_counts_once(tmp_path: Path, ask: Any, made: Any) -> None:
    made("whole")
    made("hurt")
    (tmp_path / "link").symlink_to("outputs/toy")
    runs = f"runs=[outputs/toy/whole,{tmp_path}/outputs/toy/whole,./outputs/../outputs/toy/whole,link/whole]"
    assert len(json.loads(ask("job=runs", runs, "runs.format=json").out)) == 1
    assert len(json.loads(ask("job=runs", "runs=[link,outputs/toy/hurt,outputs]", "runs.format=json").out)) == 2
    assert ask("job=compare", runs).status == 2


@pytest.mark.parametrize("recipe", ["parity", "eval", "plan"])
def test_a_recipe_may_have_the_name_of_a_job(tmp_path: Path, ask: Any, made: Any, recipe: str) -> None:
    made("whole")
    (tmp_path / "outputs/toy").rename(tmp_path / "outputs" / recipe)
    assert f"outputs/{recipe}/whole" in ask("job=runs").out
    assert f"outputs/{recipe}/whole" in ask(f"resume=outputs/{recipe}/whol").err

"""`job=runs`, `job=compare`, `rerun` and `job=report`, of runs in one folder of outputs."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from framework import Image, Table
from framework.loggers import JsonlLogger
from tests.helpers import results
from tests.helpers.internals import RunDir, compose, find_runs, locked, read_rows

SHORT = ("recipe=toy", "trainer.max_steps=40", "trainer.val_check_interval=20", "trainer.log_every_n_steps=10")


class Answer(NamedTuple):
    status: int
    out: str
    err: str


Command = Callable[..., Answer]
Made = Callable[..., Path]


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Type a command, without a fork server: none of these starts a rank."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, columns: int | None = None) -> Answer:
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns is not None:
            monkeypatch.setenv("COLUMNS", str(columns))
        capsys.readouterr()
        return Answer(compose.main(arguments), *capsys.readouterr())

    return run


@pytest.fixture
def made(shared_run: Made, tmp_path: Path) -> Made:
    """Copies a run to `outputs/toy/NAME`, with other facts in its run.json."""

    def copy(name: str, *overrides: str, folder: str = "outputs/toy", **facts: Any) -> Path:
        place = tmp_path / folder / name
        shutil.copytree(shared_run(*SHORT, *overrides), place, symlinks=True)
        (place / "run.json").write_text(json.dumps(results.run_file(place) | facts))
        return place

    return copy


def names(out: str) -> list[str]:
    return [Path(row["run"]).name for row in json.loads(out)]


# job=runs


def test_the_list_fits_the_terminal_completely(answer: Command, made: Made) -> None:
    made("2026-01-01_10-00-00_aaaa", started="2026-01-01T10:00:00+00:00", ended="2026-01-02T11:30:05+00:00")
    made("0", "optimizer.lr=0.01", folder="outputs/multirun/2026-01-02_10-00-00_bbbb")
    for columns in (60, 80, 160):
        out = answer("job=runs", columns=columns).out
        assert max(map(len, out.splitlines())) <= columns
        for text in ("outputs/toy/2026-01-01_10-00-00_aaaa", "outputs/multirun/2026-01-02_10-00-00_bbbb/0"):
            assert text in out
        for text in ("finished", "val/loss", "25:30:05", "2026-01-01 1", "optimizer.lr=0.01"):
            # Lines may be wrapped anywhere.
            assert text in " ".join(out.split())
        assert out.endswith("2 runs in outputs: 2 finished\n")
    # The output is a pipe.
    one_line = answer("job=runs").out.splitlines()
    assert len(one_line) == 1 + 2 + 2
    assert all(text in one_line[-3] for text in SHORT[1:])


def test_a_run_is_listed_as_running_or_crashed(answer: Command, made: Made) -> None:
    for status in ("finished", "stopped", "failed", "interrupted", "running"):
        made(status, status=status)
    lock = RunDir(made("locked", status="running", results=None))
    with locked(lock):
        found = {Path(row["run"]).name: row for row in json.loads(answer("job=runs", "runs.format=json").out)}
        assert lock.lock_file.exists()
    statuses = {name: row["status"] for name, row in found.items()}
    assert statuses == {name: name for name in ("finished", "stopped", "failed", "interrupted")} | {
        "running": "crashed",
        "locked": "running",
    }
    # Without results in run.json, those of metrics.jsonl so far.
    assert found["locked"]["best"] == pytest.approx(found["finished"]["best"])
    assert found["locked"]["last"] == pytest.approx(found["finished"]["last"])


def test_a_run_is_named_without_its_folder(answer: Command, made: Made) -> None:
    made("one")
    made("two")
    made("two", folder="outputs/digits")
    assert names(answer("job=runs", "runs=one", "runs.format=json").out) == ["one"]
    several = answer("job=runs", "runs=two")
    assert several.status == 2
    assert "runs=two: several have this name: outputs/digits/two, outputs/toy/two" in several.err
    assert names(answer("job=runs", "runs=outputs/digits/two", "runs.format=json").out) == ["two"]


def test_runs_are_filtered_and_sorted(answer: Command, made: Made) -> None:
    made("slow", started="2026-01-01T10:00:00+00:00")
    made("fast", "optimizer.lr=0.01", started="2026-01-02T10:00:00+00:00", status="failed")

    def listed(*arguments: str) -> list[str]:
        return names(answer("job=runs", "runs.format=json", *arguments).out)

    assert listed() == ["slow", "fast"]
    assert listed("runs.sort=-started") == ["fast", "slow"]
    assert listed("runs.sort=val/loss") == ["fast", "slow"]
    # A low loss is better.
    assert listed("runs.sort=-best") == ["fast", "slow"]
    assert listed("runs.sort=best") == ["slow", "fast"]
    assert listed("runs.sort=-optimizer.lr") == ["fast", "slow"]
    loss = results.metrics(Path("outputs/toy/fast"))["val/loss"]
    for condition, expected in {
        "status=failed": ["fast"],
        "status!=fail*": ["slow"],
        "recipe=toy status=finished": ["slow"],
        "optimizer.lr>=0.01": ["fast"],
        "optimizer.lr=0.001": ["slow"],
        "trainer.deterministic=false": ["slow", "fast"],
        f"val/loss<{loss + 1e-6}": ["fast"],
        "run=*/slow": ["slow"],
        "recipe=digits": [],
    }.items():
        assert listed(f"runs.filter={condition}") == expected, condition
    assert answer("job=runs", "runs.filter=recipe=digits").out == "None of the 2 runs in outputs meets runs.filter\n"
    assert names(answer("job=runs", "runs=outputs/toy", "runs.format=json").out) == ["slow", "fast"]


def test_the_list_as_csv(answer: Command, made: Made) -> None:
    run_dir = made("one", "optimizer.lr=0.01")
    (row,) = csv.DictReader(answer("job=runs", "runs.format=csv").out.splitlines())
    assert (row["run"], row["recipe"], row["monitor"]) == ("outputs/toy/one", "toy", "val/loss")
    assert "optimizer.lr=0.01" in row["overrides"]
    found = results.results(run_dir)
    assert float(row["best"]) == float(row["val/loss"]) == found["best"]["metrics"]["val/loss"]
    assert float(row["test/loss"]) == found["test"]["metrics"]["test/loss"]


def test_trials_are_listed_in_the_order_of_their_numbers(answer: Command, made: Made) -> None:
    for number in (10, 2, 0):
        made(str(number), started="2026-01-01T10:00:00+00:00")
    assert names(answer("job=runs", "runs.format=json").out) == ["0", "2", "10"]


def test_evaluations_and_parity_trainings_are_not_listed(answer: Command, made: Made) -> None:
    made("one")
    made("other", job="eval")
    made("1", folder="outputs/toy/parity/2026/processes")
    assert names(answer("job=runs", "runs.format=json").out) == ["one"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("job=runs runs.filter=statu=failed", "statu status"),
        ("job=runs runs.filter=failed", "failed NAME=VALUE"),
        ("job=runs runs.filter=status>3", "status>3 finished"),
        ("job=runs runs.sort=vall/loss", "vall/loss val/loss"),
        ("job=runs runs=outputs/toyy", "outputs/toyy Did outputs/toy?"),
        ("job=compare", "job=compare runs=[outputs/RECIPE/RUN,…]"),
        ("job=compare runs=outputs/toy/one", "two runs outputs/toy/one"),
        ("job=report runs=outputs/toy/one report.output=page.pdf", "report.output=page.pdf .html"),
        ("runs=outputs/toy/one", "runs=outputs/toy/one report upload."),
        ("rerun=outputs/toy/one resume=outputs/toy/one", "resume rerun"),
        ("rerun=outputs/toy/one job=plan", "rerun job=plan"),
        ("rerun=outputs/toy/one recipe=digits", "recipe=digits rerun toy"),
        ("rerun=outputs/toy/two", "rerun=outputs/toy/two outputs/toy/one"),
        ("-m job=runs seed=1,2", "job=runs -m"),
    ],
)
def test_wrong_requests(answer: Command, made: Made, arguments: str, words: str) -> None:
    made("one")
    status, out, err = answer(*arguments.split())
    assert (status, out) == (2, "")
    assert "Traceback" not in err
    for word in words.split():
        assert word in err


# job=compare


def git(revision: str, **files: str) -> dict[str, str]:
    parts = (f"diff --git a/{name} b/{name}\n@@ -1 +1 @@\n{text}\n" for name, text in files.items())
    return {"revision": revision * 40, "diff": "".join(parts)}


def test_a_comparison_has_what_differs_and_all_metrics(answer: Command, made: Made) -> None:
    versions = {"python": "3.10.1", "torch": "2.10.0"}
    made("a", git=git("a", same="+1", mine="+1\n+2"), versions=versions)
    made("b", "optimizer.lr=0.01", git=git("b", same="+1", mine="-0\n+3"), versions=versions | {"torch": "2.15.0"})
    typed = ("job=compare", "runs=[outputs/toy/a,outputs/toy/b]")
    found = json.loads(answer(*typed, "runs.format=json").out)
    assert found["runs"] == ["outputs/toy/a", "outputs/toy/b"]
    assert found["configuration"] == {"optimizer.lr": [0.001, 0.01]}
    assert found["code"] == {"revision": ["a" * 40, "b" * 40], "uncommitted mine": ["+2 -0", "+1 -1"]}
    assert found["versions"] == {"torch": ["2.10.0", "2.15.0"]}
    assert found["machine"] == {}
    tested = [results.results(Path(run))["test"]["metrics"]["test/loss"] for run in found["runs"]]
    assert found["metrics"]["test/loss"] == tested
    assert {"val/loss (best)", "val/loss (last)"} <= found["metrics"].keys()

    lines = answer(*typed, columns=80).out.splitlines()
    assert max(map(len, lines)) <= 80
    assert ["optimizer.lr", "0.001", "0.01"] in map(str.split, lines)
    assert lines[-1] == "  The same: machine"
    rows = list(csv.reader(answer(*typed, "runs.format=csv").out.splitlines()))
    assert ["configuration", "optimizer.lr", "0.001", "0.01"] in rows


def test_different_changes_of_the_same_size_differ(answer: Command, made: Made) -> None:
    made("a", git=git("a", mine="+1"))
    made("b", git=git("a", mine="+2"))
    one, other = json.loads(answer("job=compare", "runs=outputs/toy", "runs.format=json").out)["code"][
        "uncommitted mine"
    ]
    assert one != other
    assert one.startswith("+1 -0 ")


# rerun


def test_a_rerun_has_the_same_weights(train, capfd, tmp_path: Path) -> None:
    original = train(*SHORT, "optimizer.lr=0.02", "seed=3")
    capfd.readouterr()
    # A default changed after the run.
    changed = tmp_path / "conf/optimizer/sgd.yaml"
    changed.parent.mkdir(parents=True)
    changed.write_text("{_target_: torch.optim.SGD, lr: 0.5, momentum: 0.9, weight_decay: 0, nesterov: false}\n")
    again = train(f"rerun={original}")
    assert "versions and machine are the same" in capfd.readouterr().err
    results.assert_same(results.weights(again), results.weights(original))
    assert results.run_file(again)["rerun_of"] == str(original)

    facts = results.run_file(original)
    (original / "run.json").write_text(json.dumps(facts | {"git": git("a", mine="+1")}))
    other = train(f"rerun={again}", "optimizer.lr=0.01")
    assert results.differ(results.weights(other), results.weights(original))
    typed = (other / "overrides.yaml").read_text()
    assert "seed=3" in typed
    assert "optimizer.lr=0.01" in typed
    assert "0.02" not in typed
    assert results.run_file(other)["rerun_of"] == str(again)

    capfd.readouterr()
    train(f"rerun={original}", "trainer.max_steps=20")
    warning = capfd.readouterr().err
    assert "Warning" in warning
    assert "a" * 12 in warning
    assert "uncommitted mine: +1 -0 → –" in warning


def test_a_resumed_rerun_can_be_evaluated(train, capfd) -> None:
    original = train(*SHORT)
    again = train(f"rerun={original}")
    assert train(f"resume={again}", "trainer.max_steps=50") == again
    assert "Rerun" not in capfd.readouterr().err.partition("Resuming")[2]
    assert results.results(again)["steps"] == 50
    assert "rerun_of" not in results.run_file(train("job=eval", f"checkpoint.path={again}"))


# job=report


class Page(HTMLParser):
    """Fails the test where a tag isn't closed, or is closed where it wasn't opened."""

    VOID = frozenset({"meta", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data


def test_a_report_is_whole_and_loads_nothing(answer: Command, made: Made) -> None:
    made("a", overrides=["recipe=toy", "name=<script>alert(1)</script>"], git=git("a", mine="+<b>"))
    other = made("b", "optimizer.lr=0.01")
    with (other / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "epoch": 0, "time": 0, "train/loss": null, "nonfinite": {"train/loss": "nan"}}\n{"st')
    shutil.rmtree(other / "media")
    logger = JsonlLogger(run_dir=RunDir(other))
    worst = [Image(torch.zeros(4, 4), caption="<u>"), Image(torch.ones(4, 4))]
    for step in (20, 40):
        # The newest evaluation of a name counts.
        errors = Table(["index", "label"], [[7, "<i>"]])
        logger.log({"val/worst": worst, "val/errors": errors}, step=step, epoch=0)
    status, out, _ = answer("job=report", "runs=outputs/toy")
    assert (status, out.startswith("Report of 2 runs: report.html")) == (0, True)
    page = Page(Path("report.html").read_text())

    charts = [attributes["aria-label"] for tag, attributes in page.tags if tag == "svg"]
    assert {"val/loss over steps", "train/loss over steps", "train/lr over steps"} <= set(charts)
    lines = [attributes for tag, attributes in page.tags if tag == "polyline"]
    assert {line["class"] for line in lines} == {"line c0 p0", "line c1 p0"}
    for text in (
        "<script>alert(1)</script>",
        "+<b>",
        "not finite",
        "optimizer.lr",
        "val/worst, step 40",
        "val/errors, step 40",
        "<i>",
        "<u>",
    ):
        assert text in page.text
    for name in ("Runs", "Results", "Curves", "Media", "Differences", "Environment", "Configuration"):
        assert name in page.text
    sources = set()
    for _, attributes in page.tags:
        sources |= {str(value).partition(",")[0] for key, value in attributes.items() if key in ("src", "href")}
    assert sources == {"data:image/png;base64"}

    status, _, err = answer("job=report", "runs=outputs/toy/a")
    assert status == 2
    assert "exists already" in err


def test_a_profile_of_another_version_is_left_out(answer: Command, made: Made) -> None:
    ranks = [{"compute": 0.9, "idle": 0.1}] * 20
    operators = [{"name": "<mm>", "calls": 6, "seconds": 0.3, "share": 0.5}]
    profile = {"steps": [5, 7], "step_s": None, "profiled_step_s": 0.2, "ranks": ranks, "operators": operators}
    made("a", profile=profile)
    made("b", profile={**profile, "ranks": [1]})
    assert answer("job=report", "runs=outputs/toy").status == 0
    page = Page(Path("report.html").read_text())
    for text in ("Where the time went in steps 5 to 7, 200 ms each", "<mm>", "can't be shown"):
        assert text in page.text
    # Of twenty ranks, the first and the last eight are shown.
    assert page.text.count("90.0 %") == 16


@pytest.mark.exhaustive
def test_a_report_has_confusion_matrices_and_failures(train, answer: Command, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "class Boom:\n    def on_train_step_end(self, report):\n        raise ValueError('an <error>')\n"
    )
    run_dir = train("recipe=digits", "trainer.max_epochs=1", "trainer.limit_train_batches=5")
    train("job=eval", f"checkpoint.path={run_dir}")
    failed = train("recipe=digits", "trainer.max_epochs=1", "+callbacks.boom._target_=own.Boom", status=1)
    assert answer("job=report", f"runs=[{run_dir},{failed}]").status == 0
    page = Page(Path("report.html").read_text())
    matrices = [attributes for tag, attributes in page.tags if attributes.get("class") == "matrix"]
    # The last validation, the test and the evaluation have one each.
    assert len(matrices) == 3
    for text in ("val/confusion", "test/confusion", "Evaluations", "ValueError: an <error>"):
        assert text in page.text


def test_damaged_lines_of_metrics_are_left_out(tmp_path):
    run_dir = RunDir(tmp_path)
    run_dir.metrics_file.write_text('{"step": 1, "val/loss": 0.5}garbage\n\x00\x01\n{"step": 2, "val/loss": 0.4}\n{"st')
    lines: list[str] = []
    assert [row["step"] for row in read_rows(run_dir, report=lines.append)] == [2]
    (line,) = lines
    assert ", and so are 2 more. What is damaged is left out." in line


def test_a_symlinked_run_is_listed_once(tmp_path):
    run_dir = tmp_path / "toy" / "run"
    run_dir.mkdir(parents=True)
    record = {
        "job": "train",
        "recipe": "toy",
        "status": "failed",
        "started": "2026-01-01T00:00:00+00:00",
        "overrides": [],
    }
    for name, text in {"run.json": json.dumps(record), "config.yaml": "{}", "overrides.yaml": "[]"}.items():
        (run_dir / name).write_text(text)
    (tmp_path / "toy" / "latest").symlink_to("run")
    (tmp_path / "toy" / "loop").symlink_to("..")
    assert [record.run_dir.path for record in find_runs(tmp_path).records] == [run_dir]

"""The table of a sweep at any width, results.csv, and the commands for the best trial."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.internals import TrialResult, best_text, csv_text, distinguishing, ranked_rows, table_text
from tests.unit.sweeps.trials import repeated, result

SCORES = {
    "lr=0.1": [0.90, 0.93, 0.91],
    "lr=0.01": [0.951, 0.978, 0.964],
    "lr=0.001": [0.950, 0.979, 0.961],
    "lr=1": [0.30, 0.31, 0.33],
}


def table(trials: Sequence[TrialResult], *, width: int = 10_000, mode: str = "max", monitor: str = "val/acc") -> str:
    rows = ranked_rows(trials, over=("seed",), monitor="m", mode=mode)
    return table_text(rows, monitor=monitor, over=("seed",), width=width)


def some_trials() -> list[TrialResult]:
    """Five settings with three or four seeds, some of which have failed."""
    others = [
        result(12, "lr=9", "seed=0", status="failed", cause="NaN loss"),
        result(13, "lr=9", "seed=1", status="failed", cause="NaN loss"),
        result(14, "lr=9", "seed=2", status="waiting"),
        result(15, "lr=0.1", "seed=3", status="failed", cause="out of memory", code_changed=True),
    ]
    return repeated(SCORES) + others


def test_rows_are_shown_best_first() -> None:
    lines = table(some_trials()).splitlines()
    cells = [" ".join(line.split()) for line in lines[:6]]
    assert cells[0] == "# trials overrides status mean val/acc n steps s"
    assert cells[1] == "1 3–5 lr=0.01 finished 0.964 ± 0.034 3 – –"
    assert cells[2] == "2 ≈ 6–8 lr=0.001 finished 0.963 ± 0.036 3 – –"
    assert cells[3] == "3 0–2, 15 * lr=0.1 3 finished, 1 failed: out of memory 0.913 ± 0.038 3 – –"
    assert cells[4].startswith("4 9–11 lr=1 finished 0.313 ± 0.038 3")
    assert cells[5] == "– 12–14 lr=9 2 failed: NaN loss, 1 waiting – 0 – –"
    assert lines[6] == ""
    assert [line[:2] for line in lines[7:10]] == ["±:", "≈:", "*:"]
    assert "paired by seed" in lines[8]
    assert lines[10:] == ["16 trials: 12 finished, 3 failed, 1 waiting"]


def test_marks_that_are_not_there_are_not_explained() -> None:
    once = [result(0, "lr=1", score=0.5, steps=1200, seconds=63.21), result(1, "lr=2", status="running", score=0.25)]
    lines = table(once, monitor="val/loss", mode="min").splitlines()
    assert [" ".join(line.split()) for line in lines[:3]] == [
        "# trial overrides status best val/loss steps s",
        "1 0 lr=1 finished 0.5 1,200 63.2",
        "– 1 lr=2 running 0.25 – –",
    ]
    assert lines[3:] == ["", "2 trials: 1 finished, 1 running"]


def test_trials_without_a_metric_are_not_compared() -> None:
    note = "not compared: checkpoint.monitor=null. Set it to a metric such as val/loss, with checkpoint.mode"
    trainings = [result(0, "fold=0", steps=40), result(1, "fold=1", status="failed")]
    others = [result(2, "fold=0"), result(3, "fold=1")]

    def lines(trials: Sequence[TrialResult], *, monitor: str | None) -> list[str]:
        rows = ranked_rows(trials, over=("fold",), monitor=monitor, mode="min")
        return table_text(rows, monitor=monitor, over=("fold",), width=10_000).splitlines()

    assert note in lines(trainings, monitor=None)
    # Jobs without a training, and trainings that have their metric.
    assert note not in lines(others, monitor=None)
    assert note not in lines(trainings, monitor="val/loss")


@pytest.mark.parametrize("width", [120, 80, 60, 40])
def test_the_table_fits_the_terminal_with_whole_words(width: int) -> None:
    large = {"score": 0.7, "steps": 1_000_000, "seconds": 86_400.0}
    options = ("optimizer=adam", "optimizer.betas=[0.9,0.999]", "scheduler=one_cycle")
    trials = [*some_trials(), result(16, *options, **large)]
    lines = table(trials, width=width, monitor="val/accuracy").splitlines()
    assert max(map(len, lines)) <= width
    # The titles of columns that don't fit aren't shown.
    wanted = set(table(trials, monitor="val/accuracy").split()) - {"overrides", "status"}
    assert set(" ".join(lines).split()) >= wanted


def test_what_is_not_known_is_left_out_below() -> None:
    text = table(some_trials(), width=40)
    assert "– steps" not in " ".join(text.split())
    assert "lr=9 · 2 failed: NaN loss, 1 waiting" in text


@pytest.mark.parametrize(
    ("scores", "shown"),
    [
        ([0.91, 0.93, 0.92, 0.95, 0.94], "0.930 ± 0.020"),
        ([1234.5, 1299.5, 1250.0], "1261 ± 84"),
        ([2e9, 3e9], "2.5e+09 ± 6.4e+09"),
        ([1e-9, 2e-9, 3e-9], "2e-09 ± 2.5e-09"),
        ([0.5, 0.5, 0.5], "0.5 ± 0"),
        ([0.123456789], "0.1235"),
        ([1e308, -1e308], "0"),
    ],
)
def test_means_have_the_digits_that_their_interval_allows(scores: list[float], shown: str) -> None:
    line = table(repeated({"a=1": scores}), monitor="m").splitlines()[1]
    assert f"finished  {shown}  " in line


def test_control_characters_steer_nothing() -> None:
    trials = [result(0, "name=\x1b[2Jx", score=0.5), result(1, "name=a\u202eb", status="fini\nshed")]
    text = table(trials, monitor="val\x1b/loss")
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "fini\\nshed" in text


# results.csv


def test_the_csv_has_a_column_for_each_varied_key() -> None:
    trials = [
        result(0, "optimizer=sgd", "optimizer.lr=0.1", "seed=1", score=0.5, step=30, seconds=7.25),
        result(1, "optimizer=adam", "optimizer.lr=0.1", "seed=1", status="failed", cause="NaN loss"),
        result(2, "optimizer=adam", "~optimizer.lr", "seed=1", score=float("nan"), code_changed=True),
        result(3, "optimizer=adam", "+model.note='two\nlines, \"quoted\"'", "seed=1", status="waiting"),
    ]
    lines = csv_text(trials, monitor="val/loss").splitlines()
    # One for each trial.
    assert len(lines) == 5
    assert lines[0] == "trial,optimizer,optimizer.lr,model.note,status,cause,val/loss,step,seconds,code_changed,run"
    assert lines[1] == "0,sgd,0.1,,finished,,0.5,30,7.25,false,/sweep/0"
    assert lines[2] == "1,adam,0.1,,failed,NaN loss,,,,false,/sweep/1"
    assert lines[3] == "2,adam,~,,finished,,nan,,,true,/sweep/2"
    (row,) = list(csv.DictReader([lines[0], lines[4]]))
    assert (row["optimizer.lr"], row["status"]) == ("", "waiting")
    assert row["model.note"] == "'two\\nlines, \"quoted\"'"


def test_the_csv_of_one_trial_has_no_varied_key() -> None:
    text = csv_text([result(0, "seed=1", score=0.5)], monitor=None)
    assert text == "trial,status,cause,score,step,seconds,code_changed,run\n0,finished,,0.5,,,false,/sweep/0\n"


# The best trial


def test_the_best_trial_has_its_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = tmp_path / "outputs/multirun/x"
    (sweep / "1" / "checkpoints" / "best").mkdir(parents=True)
    trials = [
        result(0, "lr=0.1", score=0.5, run=sweep / "0"),
        result(1, "lr=0.2", score=0.25, run=sweep / "1"),
        result(2, "lr=0.3", status="failed", run=sweep / "2"),
    ]

    def shown(*trials: TrialResult) -> list[str]:
        return best_text(ranked_rows(trials, over=(), monitor="m", mode="min"), mode="min").splitlines()

    assert shown(*trials) == [
        "  best         trial 1: lr=0.2",
        "  train again  python -m framework rerun=outputs/multirun/x/1",
        "  evaluate     python -m framework job=eval checkpoint.path=outputs/multirun/x/1/checkpoints/best",
    ]
    # Without a checkpoint, nothing can be evaluated.
    assert [line.split()[0] for line in shown(trials[0])] == ["best", "train"]
    assert shown(trials[2]) == []


def test_the_commands_are_quoted_and_name_the_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "my runs, 2" / "0"
    rows = ranked_rows([result(0, "path.outputs='my runs, 2'", score=0.5, run=run)], over=(), monitor="m", mode="min")
    command = best_text(rows, mode="min").partition("train again")[2]
    assert shlex.split(command) == ["python", "-m", "framework", "rerun='my runs, 2/0'", "path.outputs='my runs, 2'"]


# Labels


@pytest.mark.parametrize(
    ("overrides", "labels"),
    [
        ([("a=1", "b=1"), ("a=1", "b=2")], ["b=1", "b=2"]),
        ([("a=1", "b=1")], ["a=1 b=1"]),
        ([("a=1",), ("b=1",)], ["a=1", "b=1"]),
        ([("a=1",), ("a=1",)], ["", ""]),
        ([("a=1", "hub.token=x1"), ("a=2", "hub.token=x2")], ["a=1 hub.token=***", "a=2 hub.token=***"]),
    ],
)
def test_trials_are_labelled_by_what_differs(overrides: list[tuple[str, ...]], labels: list[str]) -> None:
    assert distinguishing(overrides) == labels

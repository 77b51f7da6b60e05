"""What is left of a tuning: all that was found, whatever the picture and the loggers do."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from framework.config.parse import parse
from framework.data.batching import BatchPlan
from framework.run_dir import create_run_dir
from framework.session import Rank
from framework.tune import findings as module
from framework.tune.findings import Findings
from tests.unit.config.raw import raw_config
from tests.unit.small_trainer import make_trainer
from tests.unit.tune.curves import curve_of, loss_at

PLAN = BatchPlan(8, 1, 1)
BATCH = {"batch_size": 8}


class Promised:
    """A logger that relies on `fit_start`, as it may."""

    made: ClassVar[list[Promised]] = []

    def __init__(self) -> None:
        self.values: list[float] = []
        self.closed = 0
        Promised.made.append(self)

    def fit_start(self, info: Any) -> None:
        self.total = info.total_steps

    def metrics(self, values: Any, *, step: int, epoch: int) -> None:
        self.values.append(values["tune/lr"])
        assert len(self.values) <= self.total

    def text(self, tag: str, text: str) -> None: ...

    def close(self) -> None:
        self.closed += 1


class Broken(Promised):
    def metrics(self, values: Any, *, step: int, epoch: int) -> None:
        raise OSError("no space")

    def close(self) -> None:
        raise OSError("no space")


@pytest.fixture(autouse=True)
def none_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Promised, "made", [])


def rank(folder: Path, *loggers: type, number: int = 0) -> Rank:
    nodes = {each.__name__.lower(): {"_target_": f"{__name__}.{each.__name__}"} for each in loggers}
    made: Any = object.__new__(Rank)
    vars(made).update(
        config=parse(raw_config({"logger": nodes})),
        run_dir=create_run_dir(folder),
        context=SimpleNamespace(is_main=number == 0, world_size=1),
    )
    found: Rank = made
    return found


def found_in(one: Rank) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((one.run_dir.path / "tune.json").read_text())
    return content


def test_each_thing_is_kept_once_it_is_known(tmp_path: Path) -> None:
    one = rank(tmp_path)
    findings = Findings(one)
    findings.keep_batch(BATCH, {"data.batch_size": 8})
    found = found_in(one)
    assert (found["batch_size"], found["lr"]) == ({"batch_size": 8, "together": False}, None)
    assert one.run_dir.read_run()["results"] == {"overrides": {"data.batch_size": 8}}
    findings.keep_together()
    assert found_in(one)["batch_size"]["together"]
    findings.keep_rates(curve_of(loss_at), PLAN, key="optimizer.lr")
    found = found_in(one)
    assert found["overrides"] == {
        "data.batch_size": 8,
        "optimizer.lr": pytest.approx(found["lr"]["suggestion"]["lr"], rel=0.1),
    }
    assert one.run_dir.read_run()["results"] == {"overrides": found["overrides"]}


def test_loggers_are_made_once_and_told_what_they_are_promised(tmp_path: Path) -> None:
    findings, curve = Findings(rank(tmp_path, Promised)), curve_of(loss_at)
    findings.show(curve, PLAN, make_trainer())
    findings.close()
    (made,) = Promised.made
    assert made.values == [point.lr for point in curve.points]
    assert made.closed == 1


def test_what_cannot_be_shown_is_told_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def draw(*_: Any, **__: Any) -> str:
        raise OverflowError("too far")

    monkeypatch.setattr(module, "draw", draw)
    one, curve = rank(tmp_path, Broken, Promised), curve_of(loss_at)
    findings = Findings(one)
    findings.keep_rates(curve, PLAN, key="optimizer.lr")
    with caplog.at_level(logging.WARNING):
        findings.show(curve, PLAN, make_trainer())
        findings.close()
    told = [record.getMessage().partition(";")[0] for record in caplog.records]
    assert told == ["learning_rate.svg can't be drawn", "logger.broken failed", "logger.broken can't be closed"]
    assert len(Promised.made[1].values) == len(curve.points)
    assert found_in(one)["overrides"]


def test_another_rank_leaves_nothing(tmp_path: Path) -> None:
    one, curve = rank(tmp_path, Promised, number=1), curve_of(loss_at)
    findings = Findings(one)
    findings.keep_batch(BATCH, {"data.batch_size": 8})
    findings.keep_rates(curve, PLAN, key="optimizer.lr")
    findings.show(curve, PLAN, make_trainer())
    findings.close()
    assert Promised.made == []
    assert not (one.run_dir.path / "tune.json").exists()

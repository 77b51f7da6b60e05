"""That contestants run, with few steps: what they measure means nothing here."""

from __future__ import annotations

from itertools import chain
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from benchmarks import marks, memory, mnist_fast, on_gpu, scale, start_up, steps
from benchmarks.contest import Contest, Contestant, run
from framework.types import EvalReport
from tests.helpers.command import run_framework


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "WARM_UP", 2)
    monkeypatch.setattr(steps, "STEPS", 5)


def named(contestants: list[Contestant], name: str) -> Contestant:
    return next(each for each in contestants if each.name == name)


@pytest.mark.slow
def test_steps_are_timed_after_the_warm_up(few_steps: None) -> None:
    (report,) = run(named(steps.contestants(), "ours")).reports
    assert report["wall_s"] * steps.STEPS <= report["ended"] - report["begun"] + 0.01
    assert report["wall_s"] > 0
    assert report["cpu_s"] > 0


@pytest.mark.slow
def test_each_of_two_ranks_tells_when_its_first_step_was_done() -> None:
    outcome = run(named(start_up.contestants(), "ours, 2 processes"))
    assert len(outcome.reports) == 2
    assert 0 < outcome.worst("first_step") - outcome.begun < outcome.seconds


@pytest.mark.slow
def test_memory_of_all_processes_is_more_than_of_the_ranks() -> None:
    figures = memory.measure(memory.contestants(2)[0], processes=2)
    assert figures["all"] > 2 * figures["rank PSS"] > 0
    assert figures["rank RSS"] > figures["rank PSS"]


@pytest.mark.slow
def test_the_indices_of_an_epoch_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "SAMPLES", 4000)
    assert scale.epoch(named(scale.samplers(64), "ours"))["seconds"] > 0


def test_a_curve_leaves_validation_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    now = iter([10.0, 11.0, 12.0, 50.0, 51.5, 60.0])
    monkeypatch.setattr(marks, "report", lambda **figures: found.update(figures))
    monkeypatch.setattr("benchmarks.marks.time.perf_counter", lambda: next(now))
    curve = marks.Curve()
    info: Any = None  # it looks at neither
    curve.on_fit_start(info)
    for _ in range(2):
        curve.on_train_step_end(info)
    curve.on_validation_end(EvalReport("val", 2, 0, {"val/accuracy": 0.97}))
    curve.on_train_step_end(info)
    curve.on_validation_end(EvalReport("val", 3, 0, {"val/accuracy": 0.99}))
    curve.on_fit_end()
    assert found == {"curve": [(2.0, 0.97), (3.5, 0.99)], "seconds": 3.5}


def test_the_time_to_an_accuracy_is_the_first_that_shows_it_and_all_where_none_does() -> None:
    trained = mnist_fast.Trained([(1.0, 0.9), (2.0, 0.98), (3.0, 0.97)], 3.5, 0.975)
    assert [trained.seconds_to(accuracy) for accuracy in (0.9, 0.95, 0.99)] == [1.0, 2.0, 3.5]


def test_curves_are_drawn_from_the_least_accuracy_on_and_within_the_picture() -> None:
    text = mnist_fast.drawn(
        {"mnist": [(10.0, 0.5), (40.0, 0.95), (80.0, 0.98)], "mnist_fast": [(5.0, 0.96), (30.0, 1.0)]}
    )
    lines = [each.get("points") for each in ElementTree.fromstring(text) if each.tag.endswith("polyline")]
    points = [[tuple(map(float, point.split(","))) for point in (line or "").split()] for line in lines]
    assert [len(each) for each in points] == [2, 2]
    for x, y in chain(*points):
        assert 60 <= x <= 620
        assert 5 <= y <= 265
    (_, low), (_, high) = points[0]
    assert low > high  # better is further up


def test_both_recipes_are_validated_at_their_end() -> None:
    for recipe, interval in mnist_fast._RECIPES.items():
        settings = yaml.safe_load(run_framework("--cfg", "job", f"recipe={recipe}").stdout)
        images = settings["plan"]["train_samples"]
        steps_an_epoch = -(-images // settings["data"]["batch_size"])
        assert steps_an_epoch * settings["trainer"]["max_epochs"] % interval == 0


@pytest.mark.slow
def test_loops_for_the_gpu_run_on_the_cpu() -> None:
    place = on_gpu.Place("cpu", None)
    for each in on_gpu.network(place).contestants[:2]:
        assert on_gpu.step_time(each)["wall"] > 0
    milestones = on_gpu.milestones(place)
    assert milestones.measure(milestones.contestants[0])["is_done"]
    (row, *_) = milestones.rows({"command 98%": Contest({"ours": [7.25]})})
    assert row.ours == "7.2 s"

"""That contestants run, with few steps: what they measure means nothing here."""

from __future__ import annotations

import pytest

from benchmarks import memory, scale, start_up, steps
from benchmarks.contest import Contestant, run


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

"""The parts of the benchmarks run, with few steps: what they measure means nothing here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from benchmarks import memory, mnist_fast, on_gpu, scale, start_up, steps, sweeps, whole_run
from benchmarks.contest import Contest, Contestant, run
from tests.helpers.internals import compose_config, hydra_for, parse, resolved


def named(contestants: list[Contestant], name: str) -> Contestant:
    return next(each for each in contestants if each.name == name)


def compose_what_no_part_runs() -> None:
    """Runs with other overrides and the same callback, `Clock`, are made below."""
    contestants = [*steps.contestants(), *on_gpu.network(on_gpu.Place("cpu", None)).contestants]
    commands = [each.arguments[2:] for each in contestants if each.arguments[:2] == ("-m", "framework")]
    assert len(commands) == 5
    with hydra_for(None):
        for overrides in commands:
            raw, _ = resolved(compose_config("config", overrides))
            assert parse(raw).callbacks["benchmark"]["_target_"] == "benchmarks.marks.Clock"


def time_a_sweep_and_plan_one() -> None:
    two, _, planned, *_ = sweeps.contestants()
    plan = sweeps.measure(planned)
    whole = sweeps.measure(dataclasses.replace(two, arguments=(*two.arguments, "trainer.max_epochs=1", "seed=1,2")))
    assert 0 < plan["cpu"] < whole["cpu"]
    assert whole["wall"] > 0


def time_a_whole_run() -> None:
    work = whole_run.WORKS[0]._replace(epochs=3)
    for each in whole_run.contestants(work):
        figures = whole_run.measure(each)
        assert 0 < figures["training"] < figures["command"]
        assert figures["validation"] > 0


def time_the_first_step_of_two_ranks() -> None:
    outcome = run(named(start_up.contestants(), "ours, 2 processes"))
    assert len(outcome.reports) == 2
    assert 0 < outcome.worst("first_step") - outcome.begun < outcome.seconds


def weigh_two_ranks() -> None:
    figures = memory.measure(memory.contestants(2)[0], processes=2)
    assert figures["all"] > 2 * figures["rank PSS"] > 0
    assert figures["rank RSS"] > figures["rank PSS"]


def time_the_indices_of_an_epoch() -> None:
    assert scale.epoch(named(scale.samplers(64), "ours"))["seconds"] > 0


def run_what_is_for_a_gpu_on_the_cpu() -> None:
    place = on_gpu.Place("cpu", None)
    raw_loop = on_gpu.network(place).contestants[1]
    assert on_gpu.step_time(raw_loop)["wall"] > 0
    milestones = on_gpu.milestones(place)
    assert milestones.measure(milestones.contestants[0])["is_done"]
    (row, *_) = milestones.rows({"command 98%": Contest({"ours": [7.25]})})
    assert row.ours == "7.2 s"


def compare_the_memory_with_its_forecast() -> None:
    part = on_gpu.memory(on_gpu.Place("cpu", None))
    (contestant,) = part.contestants
    figures = part.measure(contestant)
    assert figures["forecast"] == pytest.approx(figures["measured"], rel=0.02)
    (row,) = part.rows({name: Contest({contestant.name: [figure]}) for name, figure in figures.items()})
    assert row.ratio == "1.00"
    (row,) = part.rows({"forecast": Contest({}, {contestant.name: "failed"})})
    assert row.ours == "failed"


def time_for_some_seconds() -> None:
    """Each program trains until the seconds are over, over several epochs, as on a GPU."""

    class Seconds(on_gpu.Place):
        def window(self, warm_up: int, steps: int) -> on_gpu.Window:
            return on_gpu.Window(2, 8, seconds=1.0)

    contestants = on_gpu.toy(Seconds("cpu", None)).contestants
    # It is the program of the ready-made batches.
    contestants.remove(named(contestants, "DataLoader"))
    for each in contestants:
        (report,) = run(each, timeout_s=60.0).reports
        assert report["steps"] > 8
        assert 1.0 <= report["ended"] - report["begun"] < 10.0
        assert report["cpu_s"] > 0
        assert report["wall_s"] * report["steps"] == pytest.approx(report["ended"] - report["begun"], abs=0.1)


def show_only_what_every_round_has() -> None:
    contests: dict[str, Contest] = {}
    on_gpu.add_round(contests, {"wall": Contest({"ours": [1.0], "theirs": [2.0]})})
    on_gpu.add_round(contests, {"wall": Contest({"ours": [3.0], "theirs": [4.0]})})
    assert contests["wall"].figures == {"ours": [1.0, 3.0], "theirs": [2.0, 4.0]}
    on_gpu.add_round(contests, {"wall": Contest({"ours": [5.0]}, {"theirs": "failed"})})
    assert contests["wall"].figures == {"ours": [1.0, 3.0, 5.0]}
    assert contests["wall"].absent == {"theirs": "failed"}


def validate_both_recipes_at_their_end() -> None:
    for recipe, interval in mnist_fast._RECIPES.items():
        with hydra_for(None):
            settings, _ = resolved(compose_config("config", [f"recipe={recipe}"]))
        steps_an_epoch = -(-settings["plan"]["train_samples"] // settings["data"]["batch_size"])
        assert steps_an_epoch * settings["trainer"]["max_epochs"] % interval == 0


PARTS = (
    compose_what_no_part_runs,
    time_a_sweep_and_plan_one,
    time_a_whole_run,
    time_the_first_step_of_two_ranks,
    weigh_two_ranks,
    time_the_indices_of_an_epoch,
    run_what_is_for_a_gpu_on_the_cpu,
    compare_the_memory_with_its_forecast,
    time_for_some_seconds,
    show_only_what_every_round_has,
    validate_both_recipes_at_their_end,
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs(part: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "SAMPLES", 4000)
    part()

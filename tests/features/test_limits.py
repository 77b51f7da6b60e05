"""How long a run trains and on how much: `max_*`, `limit_*_batches`, `fast_dev_run`, `overfit_batches`."""

from __future__ import annotations

import re

import pytest

from framework.checkpoint import complete_steps
from tests.helpers import results
from tests.helpers.loops import plain_loop, toy_batches, toy_loss

# There are 1,600 training samples: 80 batches of 20.
SHORT = ("recipe=toy", "logger=jsonl")


@pytest.mark.parametrize(
    ("overrides", "steps", "ended_by"),
    [
        (("trainer.max_epochs=2", "trainer.max_steps=90"), 90, "max_steps"),
        (("trainer.max_epochs=1", "trainer.max_steps=90"), 80, "max_epochs"),
        (("trainer.max_epochs=2", "trainer.limit_train_batches=0.25"), 40, "max_epochs"),
    ],
)
def test_the_first_limit_that_is_reached_ends_training(train, overrides, steps, ended_by):
    run_dir = train(*SHORT, *overrides)
    found = results.results(run_dir)
    assert (found["steps"], found["epochs"]) == (steps, 2 if steps == 40 else 1)
    assert found["ended_by"] == f"trainer.{ended_by} reached"
    assert results.pointed(run_dir, "last") == steps


def test_a_cut_epoch_trains_on_its_first_batches(train):
    run_dir = train(*SHORT, "trainer.limit_train_batches=7", "trainer.max_epochs=3")
    assert list(results.curve(run_dir, "val/loss")) == [7, 14, 21]
    results.assert_same(results.weights(run_dir), plain_loop(toy_batches(epochs=3, batches=7)))


@pytest.mark.parametrize(
    ("procs", "limit", "samples"), [(1, "0.5", 100), pytest.param(2, "3", 60, marks=pytest.mark.multiproc)]
)
def test_evaluation_is_cut_to_the_first_batches(train, procs, limit, samples):
    """The same samples on any number of processes, so the same numbers."""
    cut = (f"trainer.limit_{part}_batches={limit}" for part in ("val", "test"))
    short = ("trainer.max_epochs=1", "trainer.limit_train_batches=20", "data.eval_batch_size=20")
    run_dir = train(*SHORT, *short, *cut, f"topology.procs_per_node={procs}")
    weights = results.weights(run_dir)
    found = results.metrics(run_dir)
    for part in ("val", "test"):
        wanted = toy_loss(weights, part=part, samples=samples)
        assert found[f"{part}/loss"] == pytest.approx(wanted, rel=1e-6)
        assert wanted != pytest.approx(toy_loss(weights, part=part), rel=1e-4)


def test_a_limit_of_0_leaves_evaluation_out(train):
    off = ("trainer.limit_val_batches=0", "trainer.limit_test_batches=0", "checkpoint.monitor=null")
    run_dir = train(*SHORT, *off, "trainer.max_epochs=1")
    assert results.metrics(run_dir) == {}
    assert not any(name.startswith(("val/", "test/")) for name in results.logged_names(run_dir))
    assert results.pointed(run_dir, "last") == 80
    assert not (run_dir / "checkpoints" / "best").exists()


def test_fast_dev_run_runs_everything_and_leaves_nothing(train):
    callbacks = ("callbacks=[early_stopping,ema]", "callbacks.early_stopping.monitor=val/no_such")
    # The warm-up is longer than this run, but not than the whole one.
    warm_up = ("scheduler=cosine", "scheduler.schedule.warmup_steps=20")
    run_dir = train("recipe=toy", "trainer.fast_dev_run=3", "data.eval_batch_size=20", *callbacks, *warm_up)
    assert results.results(run_dir)["steps"] == 3
    assert results.metrics(run_dir).keys() == {"val/loss", "test/loss"}
    assert not {path.name for path in run_dir.iterdir()} & {"checkpoints", "metrics.jsonl"}
    assert not list(run_dir.glob("events.*"))


def test_epochs_are_counted_from_0_everywhere(train):
    begun = ("recipe=toy", "logger=[console,jsonl]", "trainer.limit_train_batches=7", "trainer.max_epochs=2")
    run_dir = train(*begun)
    log = results.log(run_dir)
    shown = {int(step): int(epoch) for epoch, step in re.findall(r"^epoch (\d+)  step (\d+)  val/", log, re.MULTILINE)}
    assert shown == {7: 0, 14: 1}
    assert shown == {row["step"]: row["epoch"] for row in results.rows(run_dir) if "val/loss" in row}
    assert "epoch 1/1  step 14/14" in log
    manifests = complete_steps(run_dir / "checkpoints").values()
    assert {manifest.step: manifest.epoch for _, manifest in manifests} == shown
    # These epochs were trained before.
    assert results.results(run_dir)["epochs"] == 2
    train(f"resume={run_dir}", "trainer.max_epochs=3")
    assert "Resuming after step 14, in epoch 2\n" in results.log(run_dir)


def test_overfitting_uses_the_same_few_batches(train):
    run_dir = train(*SHORT, "trainer.overfit_batches=2", "trainer.max_epochs=20")
    weights = results.weights(run_dir)
    results.assert_same(weights, plain_loop(toy_batches(epochs=20, batches=2, shuffle=False)))
    wanted = pytest.approx(toy_loss(weights, part="train", samples=40), rel=1e-6)
    assert results.metrics(run_dir) == {"val/loss": wanted}


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (("trainer.check_val_every_n_epoch=2",), [20, 40]),
        (("trainer.val_check_interval=15", "trainer.check_val_every_n_epoch=null"), [15, 30, 45]),
        (("trainer.check_val_every_n_epoch=null", "checkpoint.monitor=null"), []),
        (("trainer.val_check_interval=0.35",), [3, 6, 9, 13, 16, 19, 23, 26, 29, 33, 36, 39, 43, 46, 49]),
        (("trainer.val_check_interval=0.5", "trainer.check_val_every_n_epoch=3"), [25, 30]),
    ],
)
def test_validation_happens_when_it_should(train, overrides, steps):
    run_dir = train(*SHORT, "trainer.limit_train_batches=10", "trainer.max_epochs=5", *overrides)
    assert [row["step"] for row in results.rows(run_dir) if "val/loss" in row] == steps


def test_a_run_that_never_validates_says_so(train):
    log = results.log(train("recipe=toy", "trainer.max_steps=5"))
    assert "Nothing will be validated: training ends after 5 steps" in log
    assert "Use trainer.val_check_interval=5 to validate at the end." in log
    log = results.log(train("recipe=toy", "trainer.max_epochs=1", "trainer.val_check_interval=81"))
    assert "training ends after 80 steps, and the first validation is due after 81" in log
    log = results.log(train("recipe=toy", "trainer.max_steps=39", "trainer.val_check_interval=0.5"))
    assert "training ends after 39 steps, and the first validation is due after 40" in log

"""Clipping, accumulation and schedules do to weights what they do in a plain loop, and the log says so."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from framework.optim import cosine
from tests.helpers import results
from tests.helpers.loops import plain_loop, toy_batches, toy_model

LR = 0.001
EPOCHS, STEPS_PER_EPOCH = 4, 10
SHORT = ("recipe=toy", "logger=jsonl", "trainer.limit_test_batches=0", "trainer.log_every_n_steps=1")
SCHEDULED = (*SHORT, f"trainer.max_epochs={EPOCHS}", f"trainer.limit_train_batches={STEPS_PER_EPOCH}")


# Clipping


@pytest.fixture
def gradients():
    """Of the first step of a toy run, by parameter."""
    model = toy_model()
    ((inputs, targets),) = toy_batches(epochs=1, batches=1)
    nn.functional.mse_loss(model(inputs), targets).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.fixture
def after_one_step(train):
    def run(*overrides):
        return train(*SHORT, "trainer.max_steps=1", *overrides)

    return run


def norm(tensors):
    return math.sqrt(sum(float((tensor**2).sum()) for tensor in tensors.values()))


def moved(run_dir):
    """What the optimizer was given: the way the weights went, over the learning rate."""
    begun = toy_model().state_dict()
    return {name: (begun[name] - tensor) / LR for name, tensor in results.weights(run_dir).items()}


@pytest.mark.parametrize(
    "processes",
    [(), pytest.param(("topology.procs_per_node=2", "data.global_batch_size=20"), marks=pytest.mark.multiproc)],
    ids=["1", "2"],
)
def test_the_norm_of_all_gradients_is_clipped(after_one_step, gradients, processes):
    run_dir = after_one_step("trainer.gradient_clip_val=0.5", *processes)
    before = norm(gradients)
    assert before > 2
    for name, tensor in moved(run_dir).items():
        torch.testing.assert_close(tensor, gradients[name] * (0.5 / before), rtol=1e-3, atol=2e-4)
    assert results.curve(run_dir, "train/grad_norm")[1] == pytest.approx(before, rel=1e-5)


def test_each_value_is_clipped(after_one_step, gradients):
    run_dir = after_one_step("trainer.gradient_clip_val=0.2", "trainer.gradient_clip_algorithm=value")
    assert max(float(tensor.abs().max()) for tensor in gradients.values()) > 0.4
    for name, tensor in moved(run_dir).items():
        torch.testing.assert_close(tensor, gradients[name].clamp(-0.2, 0.2), rtol=1e-3, atol=2e-4)


def test_without_clipping_the_norm_is_logged_and_nothing_is_clipped(after_one_step, gradients):
    run_dir = after_one_step()
    for name, tensor in moved(run_dir).items():
        torch.testing.assert_close(tensor, gradients[name], rtol=1e-3, atol=2e-4)
    assert results.curve(run_dir, "train/grad_norm")[1] == pytest.approx(norm(gradients), rel=1e-5)


# Accumulation


def test_accumulated_batches_are_the_big_batch(train):
    """1,600 samples in steps of 96: the last one has 64. Micro-batches of 24 or, at the end, fewer."""
    common = ("recipe=toy", "logger=jsonl", "trainer.max_epochs=2", "data.global_batch_size=96")
    big = train(*common)
    small = train(*common, "trainer.accumulate_grad_batches=4")
    results.assert_same(results.weights(small), results.weights(big), tolerance=1e-6)
    assert results.results(small)["steps"] == results.results(big)["steps"] == 2 * 17
    losses = results.curve(small, "train/loss")
    assert losses == {step: pytest.approx(loss, rel=1e-5) for step, loss in results.curve(big, "train/loss").items()}


# Schedules: the rate that the log has at a step is the one the step was made with.


def rates(run_dir):
    curve = results.curve(run_dir, "train/lr")
    assert list(curve) == list(range(1, EPOCHS * STEPS_PER_EPOCH + 1))
    return list(curve.values())


def test_step_per_epoch(train):
    run_dir = train(*SCHEDULED, "scheduler=step", "scheduler.schedule.step_size=2")
    assert rates(run_dir) == pytest.approx([LR] * 20 + [LR / 10] * 20)


def test_step_per_step(train):
    run_dir = train(*SCHEDULED, "scheduler=step", "scheduler.schedule.step_size=15", "scheduler.interval=step")
    assert rates(run_dir) == pytest.approx([LR] * 15 + [LR / 10] * 15 + [LR / 100] * 10)


def test_cosine_falls_to_the_end_of_the_run(train):
    warm_up = ("scheduler.schedule.warmup_steps=5", "scheduler.schedule.min_factor=0.1")
    run_dir = train(*SCHEDULED, "scheduler=cosine", *warm_up)
    falling = [0.1 + 0.9 * (1 + math.cos(math.pi * step / 35)) / 2 for step in range(35)]
    assert rates(run_dir) == pytest.approx([LR * factor for factor in [0.2, 0.4, 0.6, 0.8, 1.0, *falling]])
    schedule = partial(cosine, total_steps=40, warmup_steps=5, min_factor=0.1)
    batches = toy_batches(epochs=EPOCHS, batches=STEPS_PER_EPOCH)
    results.assert_same(results.weights(run_dir), plain_loop(batches, schedule=schedule))


def test_cosine_counts_epochs_where_it_moves_with_them(train):
    run_dir = train(*SCHEDULED, "scheduler=cosine", "scheduler.interval=epoch")
    by_epoch = [LR * (1 + math.cos(math.pi * epoch / EPOCHS)) / 2 for epoch in range(EPOCHS)]
    assert rates(run_dir) == pytest.approx([rate for rate in by_epoch for _ in range(STEPS_PER_EPOCH)])


def test_one_cycle_is_the_plain_loops(train):
    run_dir = train(*SCHEDULED, "scheduler=one_cycle", "optimizer.lr=0.004")
    schedule = partial(OneCycleLR, max_lr=0.004, pct_start=0.3, total_steps=40)
    batches = toy_batches(epochs=EPOCHS, batches=STEPS_PER_EPOCH)
    results.assert_same(results.weights(run_dir), plain_loop(batches, schedule=schedule, lr=0.004))
    used = rates(run_dir)
    assert used[0] == pytest.approx(0.004 / 25)
    assert max(used) == pytest.approx(0.004)
    assert used.index(max(used)) == 11


def test_plateau_moves_after_each_validation_without_improvement(train):
    """Nothing counts as an improvement with a threshold of so much."""
    watched = ("scheduler.schedule.patience=0", "+scheduler.schedule.threshold=1e9")
    used = rates(train(*SCHEDULED, "scheduler=plateau", *watched))
    assert used == pytest.approx([LR / 10**epoch for epoch in range(EPOCHS) for _ in range(STEPS_PER_EPOCH)])


def test_a_schedule_goes_on_where_it_was(train):
    overrides = (*SCHEDULED, "scheduler=cosine")
    whole = train(*overrides)
    stopped = train(*overrides, "trainer.max_steps=17", "scheduler.total_steps=40")
    resumed = train(f"resume={stopped}", "trainer.max_steps=null")
    assert rates(resumed) == rates(whole)
    results.assert_same(results.weights(resumed), results.weights(whole))


def test_a_schedule_that_another_limit_would_stretch_needs_a_decision(train, capfd):
    """Half of the run, then all of it: on the old curve to its end and beyond, or on the new one at once."""

    def rate(step, *, total):
        return LR * (1 + math.cos(math.pi * min(step / total, 1.0))) / 2

    begun = (*SCHEDULED, "scheduler=cosine", "trainer.max_epochs=2")
    stopped = train(*begun, "trainer.max_steps=15", "scheduler.total_steps=20")
    begin = [rate(step, total=20) for step in range(15)]
    for total in (20, 40):
        run_dir = stopped if total == 40 else train(*begun, "trainer.max_steps=15", "scheduler.total_steps=20")
        whole = (f"resume={run_dir}", "trainer.max_steps=null", f"trainer.max_epochs={EPOCHS}")
        train(*whole, "scheduler.total_steps=null", status=2)
        said = capfd.readouterr().err
        assert "was made for 20 steps, and this run has 40" in said
        assert "scheduler.total_steps=20 keeps" in said
        change = f"at step 15 the learning rate changes from {rate(15, total=20):.3g} to {rate(15, total=40):.3g}"
        assert f"scheduler.total_steps=40 stretches it: {change}" in said
        resumed = train(*whole, f"scheduler.total_steps={total}")
        assert rates(resumed) == pytest.approx([*begin, *(rate(s, total=total) for s in range(15, 40))], abs=1e-15)


def test_one_cycle_keeps_its_length_and_cannot_be_stretched(train, capfd):
    """Its state holds the length."""
    cycle = (*SCHEDULED, "scheduler=one_cycle")
    whole, run_dir = train(*cycle), train(*cycle, "trainer.max_steps=17", "scheduler.total_steps=40")
    train(f"resume={run_dir}", "trainer.max_steps=30", "scheduler.total_steps=30", status=2)
    said = capfd.readouterr().err
    assert "was made for 40 steps, and this run has 30" in said
    assert "scheduler.total_steps=40 keeps" in said
    assert "stretches" not in said
    train(f"resume={run_dir}", "trainer.max_steps=null", "trainer.max_epochs=5", status=2)
    assert "OneCycleLR ends after 40 steps and can't continue, and the run has 50" in capfd.readouterr().err
    resumed = train(f"resume={run_dir}", "trainer.max_steps=null")
    assert rates(resumed) == rates(whole)
    results.assert_same(results.weights(resumed), results.weights(whole))

"""Keys of the optimizer and its schedule, in what a run leaves: the weights of a plain loop, and the rates used."""

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
EPOCHS = 4
STEPS_PER_EPOCH = 10
SHORT = ("recipe=toy", "logger=jsonl", "trainer.limit_test_batches=0", "trainer.log_every_n_steps=1")
SCHEDULED = (*SHORT, f"trainer.max_epochs={EPOCHS}", f"trainer.limit_train_batches={STEPS_PER_EPOCH}")
TWO = ("topology.procs_per_node=2", "data.global_batch_size=20")


@pytest.mark.parametrize(
    ("overrides", "clip"),
    [
        pytest.param(
            ("trainer.gradient_clip_val=0.5", *TWO),
            lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5),
            marks=pytest.mark.multiproc,
        ),
        (
            ("trainer.gradient_clip_val=0.2", "trainer.gradient_clip_algorithm=value"),
            lambda parameters: nn.utils.clip_grad_value_(parameters, 0.2),
        ),
    ],
    ids=["norm of two processes", "value"],
)
def test_gradients_are_clipped(train, overrides, clip):
    run_dir = train(*SHORT, "trainer.max_steps=1", *overrides)
    model = toy_model()
    begun = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ((inputs, targets),) = toy_batches(epochs=1, batches=1)
    nn.functional.mse_loss(model(inputs), targets).backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
    assert norm > 2
    clip(model.parameters())
    for name, parameter in model.named_parameters():
        # The gradient that the optimizer was given.
        moved = (begun[name] - results.weights(run_dir)[name]) / LR
        torch.testing.assert_close(moved, parameter.grad, rtol=1e-3, atol=2e-4)
    if "value" not in overrides[-1]:
        # The norm is measured before clipping.
        assert results.curve(run_dir, "train/grad_norm")[1] == pytest.approx(norm, rel=1e-5)


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


def by_epoch(factor):
    rates = []
    for epoch in range(EPOCHS):
        rates += [LR * factor(epoch)] * STEPS_PER_EPOCH
    return rates


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ("scheduler=step", "scheduler.schedule.step_size=15", "scheduler.interval=step"),
            [LR] * 15 + [LR / 10] * 15 + [LR / 100] * 10,
        ),
        (
            ("scheduler=cosine", "scheduler.interval=epoch"),
            by_epoch(lambda epoch: (1 + math.cos(math.pi * epoch / EPOCHS)) / 2),
        ),
        # Nothing counts as an improvement with a threshold of so much.
        (
            ("scheduler=plateau", "scheduler.schedule.patience=0", "+scheduler.schedule.threshold=1e9"),
            by_epoch(lambda epoch: 10.0**-epoch),
        ),
    ],
    ids=["by step", "by epoch", "plateau"],
)
def test_a_schedule_moves_by_steps_epochs_or_validations(train, overrides, expected):
    assert rates(train(*SCHEDULED, *overrides)) == pytest.approx(expected)


def test_a_schedule_ends_with_the_run(train):
    warm_up = ("scheduler.schedule.warmup_steps=5", "scheduler.schedule.min_factor=0.1")
    run_dir = train(*SCHEDULED, "scheduler=cosine", *warm_up)
    schedule = partial(cosine, total_steps=40, warmup_steps=5, min_factor=0.1)
    batches = toy_batches(epochs=EPOCHS, batches=STEPS_PER_EPOCH)
    results.assert_same(results.weights(run_dir), plain_loop(batches, schedule=schedule))


def test_a_schedule_of_transformers_ends_with_the_run(train):
    linear = "{_target_: transformers.get_linear_schedule_with_warmup, num_warmup_steps: 4}"
    common = (*SCHEDULED, f"scheduler.schedule={linear}", "scheduler.interval=step")
    warm_up = [LR * step / 4 for step in range(4)]
    assert rates(train(*common)) == pytest.approx(warm_up + [LR * (40 - step) / 36 for step in range(4, 40)])
    # A length that is set takes precedence.
    longer = rates(train(*common, "scheduler.total_steps=76"))
    assert longer == pytest.approx(warm_up + [LR * (76 - step) / 72 for step in range(4, 40)])


@pytest.mark.exhaustive
def test_resuming_with_another_schedule_length_needs_a_decision(train, capfd):
    """Half of the run, then all of it: on the old curve to its end and beyond, or on the new one from here on."""

    def rate(step, *, total):
        return LR * (1 + math.cos(math.pi * min(step / total, 1.0))) / 2

    begun = (*SCHEDULED, "scheduler=cosine", "trainer.max_epochs=2")
    for total in (20, 40):
        run_dir = train(*begun, "trainer.max_steps=15", "scheduler.total_steps=20")
        whole = (f"resume={run_dir}", "trainer.max_steps=null", f"trainer.max_epochs={EPOCHS}")
        if total == 20:
            train(*whole, "scheduler.total_steps=null", status=2)
            message = capfd.readouterr().err
            assert "was made for 20 steps, and this run has 40" in message
            assert "scheduler.total_steps=20 keeps" in message
            assert "scheduler.total_steps=40 stretches it" in message
        resumed = train(*whole, f"scheduler.total_steps={total}")
        expected = [rate(step, total=20) for step in range(15)]
        expected += [rate(step, total=total) for step in range(15, 40)]
        assert rates(resumed) == pytest.approx(expected, abs=1e-15)


@pytest.mark.exhaustive
def test_one_cycle_resumes_exactly_and_cannot_be_stretched(train, capfd):
    """The schedule's state holds its length."""
    cycle = (*SCHEDULED, "scheduler=one_cycle")
    whole = train(*cycle)
    run_dir = train(*cycle, "trainer.max_steps=17", "scheduler.total_steps=40")
    train(f"resume={run_dir}", "trainer.max_steps=30", "scheduler.total_steps=30", status=2)
    message = capfd.readouterr().err
    assert "was made for 40 steps, and this run has 30" in message
    assert "scheduler.total_steps=40 keeps" in message
    assert "stretches" not in message
    train(f"resume={run_dir}", "trainer.max_steps=null", "trainer.max_epochs=5", status=2)
    assert "OneCycleLR ends after 40 steps and can't continue, and the run has 50" in capfd.readouterr().err
    resumed = train(f"resume={run_dir}", "trainer.max_steps=null")
    assert rates(resumed) == rates(whole)
    results.assert_same(results.weights(resumed), results.weights(whole))
    schedule = partial(OneCycleLR, max_lr=LR, total_steps=40)
    batches = toy_batches(epochs=EPOCHS, batches=STEPS_PER_EPOCH)
    results.assert_same(results.weights(whole), plain_loop(batches, schedule=schedule))


NESTED = """
from torch.optim import lr_scheduler

def warm_up_then_decay(optimizer):
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)
    decay = lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, decay], milestones=[8])
"""


@pytest.mark.parametrize("stop", [5, 13])
def test_a_changed_rate_holds_under_nested_schedules(train, tmp_path, stop):
    (tmp_path / "nested.py").write_text(NESTED)
    nested = (*SCHEDULED, "scheduler.schedule={_target_:nested.warm_up_then_decay}")
    groups = ("+optimizer.groups=[{params: 'ndim<2', lr: 0.5, name: biases}]",)
    run = train(*nested, *groups, f"trainer.max_steps={stop}")
    changed = train(f"resume={run}", "trainer.max_steps=20", f"optimizer.lr={LR / 4}")
    again = train(f"resume={changed}", "trainer.max_steps=25")
    whole = train(*nested, *groups, "trainer.max_steps=25", f"optimizer.lr={LR / 4}")
    for name in ("train/lr", "train/lr/biases"):
        expected = results.curve(whole, name)
        later = {step: rate for step, rate in results.curve(again, name).items() if step > stop}
        assert later == {step: expected[step] for step in range(stop + 1, 26)}
    assert f"changed since the checkpoint: optimizer.lr={LR / 4}" in results.log(again)


def test_an_ineffective_learning_rate_is_refused(train, capfd):
    own = (*SCHEDULED, "scheduler=one_cycle", "scheduler.total_steps=40", "scheduler.schedule.max_lr=0.01")
    run = train(*own, "trainer.max_steps=5")
    train(f"resume={run}", "trainer.max_steps=8", "optimizer.lr=0.5", status=2)
    assert "optimizer.lr=0.5 has no effect: OneCycleLR sets it" in capfd.readouterr().err


LAYER_DECAY = """
from torch.optim import AdamW

def adamw(params, model, lr, layer_decay=0.5, weight_decay=0.01):
    layers = [module for module in model.modules() if list(module.parameters(recurse=False))]
    groups = []
    for height, layer in enumerate(reversed(layers)):
        groups.append({"params": list(layer.parameters(recurse=False)), "lr": lr * layer_decay**height})
    return AdamW(groups, lr=lr, weight_decay=weight_decay)
"""


@pytest.mark.parametrize(
    "key", ["+optimizer.layer_decay", pytest.param("optimizer.layer_decay", marks=pytest.mark.exhaustive)]
)
def test_what_only_the_target_knows_cannot_change(train, tmp_path, capfd, key):
    """The optimizer's own settings can, of the target's groups, too."""
    (tmp_path / "decayed.py").write_text(LAYER_DECAY)
    given = ",layer_decay:0.75" if key.startswith("optimizer") else ""
    own = (*SHORT, "~optimizer", f"+optimizer={{_target_:decayed.adamw,lr:0.01{given}}}", "trainer.max_steps=2")
    run = train(*own)
    train(f"resume={run}", "trainer.max_steps=3", f"{key}=0.9", status=2)
    refusal = capfd.readouterr().err
    assert "resume can't change optimizer.layer_decay: it is an argument of decayed.adamw" in refusal
    resumed = train(f"resume={run}", "trainer.max_steps=3", "optimizer.lr=0.02", "+optimizer.weight_decay=0.1")
    assert "changed since the checkpoint: optimizer.lr=0.02, optimizer.weight_decay=0.1" in results.log(resumed)

"""`trainer.precision`: every number format trains, and what is saved is of the type it should be."""

from __future__ import annotations

import math

import pytest
import torch

from framework import cli
from tests.helpers import results
from tests.helpers.loops import toy_model

TYPES = {
    "32-true": torch.float32,
    "bf16-mixed": torch.float32,
    "16-mixed": torch.float32,
    "bf16-true": torch.bfloat16,
    "64-true": torch.float64,
}
SHORT = ("recipe=toy", "logger=jsonl", "trainer.max_epochs=3", "trainer.log_every_n_steps=1")


@pytest.fixture(scope="module")
def runs(train_once):
    return {precision: train_once(*SHORT, f"trainer.precision={precision}") for precision in TYPES}


@pytest.mark.parametrize("precision", TYPES)
def test_the_loss_falls_and_is_finite(runs, precision):
    losses = list(results.curve(runs[precision], "train/loss").values())
    assert all(map(math.isfinite, losses))
    assert sum(losses[-20:]) < sum(losses[:20]) * 0.8


@pytest.mark.parametrize(("precision", "dtype"), TYPES.items())
def test_weights_and_optimizer_are_saved_in_their_type(runs, precision, dtype):
    assert {tensor.dtype for tensor in results.weights(runs[precision]).values()} == {dtype}


def test_a_short_format_computes_coarsely_and_a_long_one_finely(runs):
    """Relative to 32-true the first loss is off by what the format can't hold: 2**-8 for bf16, 2**-11 for fp16."""
    first = {precision: results.curve(run_dir, "train/loss")[1] for precision, run_dir in runs.items()}
    off = {precision: abs(loss / first["32-true"] - 1) for precision, loss in first.items()}
    assert 1e-6 < off["bf16-mixed"] < 2e-2
    assert 1e-6 < off["16-mixed"] < 2e-3
    assert 1e-6 < off["bf16-true"] < 2e-2
    assert 0 < off["64-true"] < 1e-6


def test_the_scaler_of_16_mixed_is_saved_and_no_other(runs):
    scalers = {precision: results.saved(run_dir)["training"]["scaler"] for precision, run_dir in runs.items()}
    assert scalers.pop("16-mixed")["scale"] >= 1
    assert not any(scalers.values())


def test_16_mixed_goes_on_exactly(train, runs):
    stopped = train(*SHORT, "trainer.precision=16-mixed", "trainer.max_steps=100")
    resumed = train(f"resume={stopped}", "trainer.max_steps=null")
    results.assert_same(results.weights(resumed), results.weights(runs["16-mixed"]))


@pytest.mark.multiproc
@pytest.mark.parametrize("precision", ["bf16-true", "16-mixed"])
def test_two_processes_end_with_about_the_same_weights(train, runs, precision):
    many = train(*SHORT, f"trainer.precision={precision}", "topology.procs_per_node=2", "data.global_batch_size=20")
    one, two = results.weights(runs[precision]), results.weights(many)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0.1, atol=0.05)


def test_clipping_sees_gradients_without_the_scale_of_the_loss(train):
    """20 steps of a norm of at most 0.01 each, at a learning rate of 0.001, move no further than 0.0002."""
    clip = ("trainer.gradient_clip_val=0.01", "trainer.max_steps=20", "trainer.precision=16-mixed")
    moved = results.weights(train(*SHORT, *clip))
    begun = toy_model().state_dict()
    distance = math.sqrt(sum(float(((moved[name] - begun[name]) ** 2).sum()) for name in begun))
    assert 0.00005 < distance < 0.0002 * 1.01


@pytest.mark.parametrize("precision", ["64-true", pytest.param("bf16-true", marks=pytest.mark.exhaustive)])
def test_a_loss_with_weights_is_of_the_type_of_the_model(train, warm, precision):
    """In training, and in an evaluation by itself."""
    loss = "+task.loss.weight={_target_: torch.ones, size: [10]}"
    short = ("trainer.max_steps=1", "trainer.val_check_interval=1", "trainer.limit_val_batches=1")
    run_dir = train("recipe=digits", "logger=none", f"trainer.precision={precision}", *short, loss)
    assert cli.main(["job=eval", f"checkpoint.path={run_dir}"], warm=warm) == 0

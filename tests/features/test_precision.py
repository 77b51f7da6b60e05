"""`trainer.precision`: every number format trains, resumes and is saved in the type it should be."""

from __future__ import annotations

import math

import pytest
import torch

from tests.helpers import results

TYPES = {
    "32-true": torch.float32,
    "bf16-mixed": torch.float32,
    "16-mixed": torch.float32,
    "bf16-true": torch.bfloat16,
    "64-true": torch.float64,
}
OFF = {"32-true": (0, 0), "bf16-mixed": (1e-6, 2e-2), "16-mixed": (1e-6, 2e-3), "bf16-true": (1e-6, 2e-2)}
"""How far the first loss is off that of 64-true, relative to it: 2**-8 for bf16, 2**-11 for fp16."""
SHORT = ("recipe=toy", "logger=jsonl", "trainer.max_epochs=2", "trainer.log_every_n_steps=1")


@pytest.mark.parametrize(("precision", "dtype"), TYPES.items())
def test_each_format_trains_and_saves_its_type(shared_run, precision, dtype):
    run_dir = shared_run(*SHORT, f"trainer.precision={precision}")
    losses = list(results.curve(run_dir, "train/loss").values())
    assert all(map(math.isfinite, losses))
    assert sum(losses[-20:]) < sum(losses[:20]) * 0.9
    assert {tensor.dtype for tensor in results.weights(run_dir).values()} == {dtype}
    exact = results.curve(shared_run(*SHORT, "trainer.precision=64-true"), "train/loss")[1]
    least, most = OFF.get(precision, (0, 0))
    assert least <= abs(losses[0] / exact - 1) <= max(most, 1e-6)
    scaler = results.saved(run_dir)["training"]["scaler"]
    assert scaler["scale"] >= 1 if precision == "16-mixed" else not scaler


def test_16_mixed_resumes_exactly(train, shared_run):
    stopped = train(*SHORT, "trainer.precision=16-mixed", "trainer.max_steps=100")
    resumed = train(f"resume={stopped}", "trainer.max_steps=null")
    whole = shared_run(*SHORT, "trainer.precision=16-mixed")
    results.assert_same(results.weights(resumed), results.weights(whole))


@pytest.mark.multiproc
def test_two_processes_end_with_about_the_same_weights(train, shared_run):
    half = (*SHORT, "trainer.precision=16-mixed")
    many = train(*half, "topology.procs_per_node=2", "data.global_batch_size=20")
    one = results.weights(shared_run(*half))
    two = results.weights(many)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0.1, atol=0.05)

"""Memory, time by phase and FLOP/s of a run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers import results
from tests.helpers.internals import peak_of_gpu

TOY_FLOPS = 700
"""Of a sample: 300 forward, 400 backward, in which the first layer's input needs no gradient."""
TOY = ("recipe=toy", "trainer.max_steps=30", "trainer.log_every_n_steps=10", "trainer.limit_val_batches=0")
UNWATCHED = ("checkpoint.monitor=null", "trainer.limit_test_batches=0")
MODEL = "model._target_=tests.features.flop_cases"


def time_shares(row):
    return {name: value for name, value in row.items() if name.startswith("time/")}


@pytest.mark.parametrize("more", [(), ("topology.procs_per_node=2", "trainer.accumulate_grad_batches=2")])
def test_a_run_logs_memory_flops_and_shares(shared_run, more):
    run_dir = shared_run(*TOY, *UNWATCHED, *more)
    rows = [row for row in results.rows(run_dir) if "train/samples_per_s" in row]
    for row in rows:
        assert row["train/tflop_per_s"] * 1e12 / row["train/samples_per_s"] == pytest.approx(TOY_FLOPS)
        # The CPU's peak isn't known.
        assert "train/mfu" not in row
    # The steps before the first log aren't timed.
    assert not time_shares(rows[0])
    for row in rows[1:]:
        shares = time_shares(row)
        assert shares.keys() >= {"time/data", "time/forward", "time/backward", "time/optimizer", "time/callbacks"}
        assert sum(shares.values()) == pytest.approx(1)
    memory = {"device/memory_gb"}
    if more:
        memory |= {"device/memory_gb_rank_0", "device/memory_gb_rank_1"}
    assert {name for name in rows[0] if "memory" in name} == memory
    assert 0.05 < rows[0]["device/memory_gb"] < 50


@pytest.mark.parametrize("more", [(), ("topology.procs_per_node=2", "data.batch_size=10")])
def test_counting_changes_nothing_that_is_trained(train, more):
    own = (f"{MODEL}.Counting", "+callbacks.count._target_=tests.features.flop_cases.CountCalls")
    weights = []
    for logger in ("none", "jsonl"):
        run_dir = train(*TOY, *UNWATCHED, *own, *more, f"logger={logger}")
        assert "30 forwards" in results.log(run_dir)
        weights.append(results.weights(run_dir))
    results.assert_same(*weights)
    assert results.curve(run_dir, "train/tflop_per_s")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ((f"{MODEL}.Uncopyable",), "holds a lock"),
        (("strategy=fsdp", "topology.procs_per_node=2"), None),
    ],
)
def test_models_that_cannot_be_counted_have_no_flops(train, overrides, reason):
    run_dir = train(*TOY, *UNWATCHED, *overrides)
    assert "train/samples_per_s" in results.rows(run_dir)[0]
    assert not any("tflop" in name for name in results.logged_names(run_dir))
    assert reason is None or f"FLOPs can't be counted: TypeError('{reason}')" in results.log(run_dir)


def test_what_is_recomputed_is_not_the_models_work(train):
    checkpointed = "trainer.activation_checkpointing=[Linear]"
    run_dir = train(*TOY, *UNWATCHED, checkpointed)
    row = results.rows(run_dir)[0]
    assert row["train/tflop_per_s"] * 1e12 / row["train/samples_per_s"] == pytest.approx(3 * 300)


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", 989.5e12),
        ("NVIDIA H100 80GB HBM3", "32-true", 67e12),
        ("NVIDIA H100 PCIe", "16-mixed", 756e12),
        ("NVIDIA GH200 480GB", "bf16-true", 989.5e12),
        ("NVIDIA A100-SXM4-80GB", "bf16-mixed", 312e12),
        ("NVIDIA L40S", "bf16-mixed", 362e12),
        ("NVIDIA L4", "bf16-mixed", 121e12),
        ("Tesla V100-PCIE-16GB", "16-mixed", 112e12),
        # The V100 has no bfloat16.
        ("Tesla V100-SXM2-16GB", "bf16-mixed", None),
        ("NVIDIA H100 80GB HBM3", "64-true", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16-mixed", None),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16-mixed", None),
        ("NVIDIA A10G", "bf16-mixed", None),
    ],
)
def test_peaks_of_gpus(name, precision, peak):
    assert peak_of_gpu(name, precision, allows_tf32=False) == peak


def test_tf32_is_used_if_allowed_and_available():
    assert peak_of_gpu("NVIDIA A100-SXM4-40GB", "32-true", allows_tf32=True) == 156e12
    assert peak_of_gpu("Tesla T4", "32-true", allows_tf32=True) == 8.1e12


NEW = "torch.backends.cuda.matmul.fp32_precision = "
OLD = "torch.set_float32_matmul_precision"


@pytest.mark.parametrize(
    ("settings", "peak"),
    [
        ("pass", 67e12),
        (f"{NEW}'tf32'", 494.5e12),
        (f"{NEW}'ieee'", 67e12),
        ("torch.backends.fp32_precision = 'tf32'", 494.5e12),
        (f"{OLD}('high')", 494.5e12),
        (f"{OLD}('medium')", 494.5e12),
        ("torch.backends.cuda.matmul.allow_tf32 = True", 494.5e12),
        (f"{OLD}('high'); {NEW}'ieee'", 67e12),
        (f"{NEW}'tf32'; {OLD}('highest')", 67e12),
        ("torch.backends.fp32_precision = 'tf32'; torch.backends.cuda.matmul.allow_tf32 = False", 67e12),
    ],
)
def test_the_peak_follows_both_tf32_settings(settings, peak):
    """The settings can't be undone, so a process of its own makes them. Torch raises where it reads the older one."""
    program = f"""
import torch
from tests.helpers.internals import Context, Topology, peak_of_run

torch.cuda.get_device_name = lambda device: "NVIDIA H100 80GB HBM3"
{settings}
context = Context(Topology(1, 1, 1, 1), 0, 0, 0, (torch.device("cuda:0"),), "nccl")
print(peak_of_run(context, "32-true"))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(found.stdout) == peak

"""The numbers of a plan, and what a plan refuses. Against real runs: tests/features/test_plan.py."""

from __future__ import annotations

from typing import Any

import pytest

from framework.errors import ConfigError, DataError, TargetError, TopologyError
from tests.helpers.internals import Topology, parse, plan_estimate_module
from tests.unit.config.raw import composed

FAKES = "tests.unit.fake_targets"
LARGE = {"_target_": "torch.nn.Linear", "in_features": 2000, "out_features": 6000, "bias": False}
LARGE_BYTES = 4 * 2000 * 6000
TOY_BYTES = 660

pytestmark = pytest.mark.usefixtures("own_state")


def facts(*overrides: str, procs: int = 1, nnodes: int = 1, **changes: Any) -> dict[str, Any]:
    """changes: whole sections of the composed configuration."""
    config = parse({**composed(*overrides), **changes})
    return plan_estimate_module.facts(config, Topology(nnodes, procs, gpus_per_node=0, span=1), backend="gloo")


BF16 = "strategy.mp_policy={param_dtype:bf16,reduce_dtype:bf16}"
QUARTERS = {"parameters": 1 / 4, "gradients": 1 / 4, "optimizer": 1 / 4}
HALVES = dict.fromkeys(QUARTERS, 1 / 2)


@pytest.mark.parametrize(
    ("overrides", "procs", "memory", "traffic", "checkpoint"),
    [
        ((), 1, {}, (0, 0), 2),
        ((), 2, {}, (1, 1), 2),
        ((), 4, {}, (1, 3 / 2), 2),
        (("strategy=allreduce",), 1, {}, (0, 0), 2),
        (("strategy=allreduce",), 2, {"buckets": 1}, (1, 1), 2),
        (("strategy=butterfly",), 3, {"buckets": 1}, (1, 4 / 3), 2),
        (("strategy=ddp", "strategy.gradient_as_bucket_view=false"), 2, {"buckets": 1}, (1, 1), 2),
        # Weights go around twice a step, gradients once; between copies of the model, shares of gradients twice.
        (("strategy=fsdp",), 4, QUARTERS, (1, 9 / 4), 2),
        (("strategy=fsdp", BF16), 4, QUARTERS, (1 / 2, 9 / 8), 2),
        (("strategy=hsdp", "strategy.data_parallel_shard_degree=2"), 4, HALVES, (1, 3 / 2 + 1 / 2), 2),
        # A checkpoint has each process's errors.
        (("strategy=ddp", "strategy.comm_hook=powersgd"), 4, {"errors": 1}, (1, 3 / 2), 2 + 4),
        (("strategy=ddp", "strategy.comm_hook={powersgd:{use_error_feedback:false}}"), 4, {}, (1, 3 / 2), 2),
        (("strategy=ddp", "strategy.comm_hook=bf16"), 4, {}, (1, 3 / 2), 2),
        # A checkpoint has each process's weights and state, the mean, and what the next exchange compares with.
        (("strategy=local_sgd",), 1, {"anchors": 1}, (0, 0), 3),
        (
            ("strategy=local_sgd", "strategy.every_n_steps=3", "strategy.warmup_steps=1"),
            4,
            {"anchors": 1, "buckets": 1},
            (1 / 3, 1 / 2),
            10,
        ),
        (
            ("strategy=local_sgd", "strategy.every_n_steps=3", "strategy.outer_momentum=0.5"),
            4,
            {"anchors": 2},
            (1 / 3, 1 / 2),
            11,
        ),
        (("callbacks=ema",), 1, {"averages": 1}, (0, 0), 4),
        (("trainer.precision=bf16-true",), 2, HALVES, (1 / 2, 1 / 2), 1),
        (("trainer.precision=bf16-mixed",), 2, {}, (1, 1), 2),
    ],
)
def test_memory_traffic_and_checkpoint(overrides, procs, memory, traffic, checkpoint):
    """As multiples of the size of the model, whose optimizer keeps one value for each parameter."""
    found = facts("recipe=toy", "optimizer.momentum=0.9", *overrides, model=LARGE, procs=procs)
    usual = {"parameters": 1, "gradients": 1, "optimizer": 1}
    names = ("buckets", "buffers", "averages", "anchors", "errors")
    wanted = {**usual, **dict.fromkeys(names, 0), **memory}
    assert {name: size / LARGE_BYTES for name, size in found["memory"].items()} == wanted
    sizes = found["traffic"]["reduced"], found["traffic"]["ring_per_rank"]
    assert [size / LARGE_BYTES for size in sizes] == pytest.approx(traffic)
    assert found["checkpoint"] / LARGE_BYTES == pytest.approx(checkpoint, rel=0.01)


def test_facts_of_a_strategy_that_shards_the_model():
    found = facts("recipe=toy", procs=4)
    assert (found["strategy"], found["optimizer"], found["shards"]) == ("DDP", "SGD", 1)
    assert facts("recipe=toy", "strategy=hsdp", procs=2, nnodes=2)["shards"] == 2


def test_a_pipeline():
    pipeline = ("recipe=toy_model_parallel", "topology=single_node", "strategy=pipeline", "data.batch_size=24")
    cut = facts(*pipeline, procs=2)
    copied = facts(*pipeline, "strategy.num_stages=2", procs=6)
    for found in (cut, copied):
        assert (found["shards"], found["memory"]["parameters"]) == (2, TOY_BYTES // 2)
    assert (cut["traffic"], cut["memory"]["buckets"]) == ({"reduced": 0, "ring_per_rank": 0}, 0)
    half = TOY_BYTES // 2
    assert (copied["traffic"], copied["memory"]["buckets"]) == ({"reduced": half, "ring_per_rank": 4 * half // 3}, half)
    assert copied["batch"]["per_rank"] == {"least": 24, "most": 24}
    assert copied["batch"]["per_forward"] == {"least": 3, "most": 3}
    twice = facts(*pipeline, "trainer.accumulate_grad_batches=2", procs=2)["batch"]
    assert (twice["global"], twice["accumulate_grad_batches"], twice["num_microbatches"]) == (48, 2, 8)
    for overrides, error, said in (
        (
            (*pipeline[:-1], "data.batch_size=7"),
            ConfigError,
            r"data\.batch_size=7 can't .* strategy\.num_microbatches=8",
        ),
        ((*pipeline, "data.global_batch_size=7"), ConfigError, r"global_batch_size=7 is .* each of the 8"),
        (("recipe=toy", "strategy=pipeline"), TargetError, "can't cut ToyModel into 2 stages"),
    ):
        with pytest.raises(error, match=said):
            facts(*overrides, procs=2)


def test_frozen_parameters_take_memory_alone():
    found = facts("recipe=toy", "optimizer=adam", model={"_target_": f"{FAKES}.HalfFrozen"}, procs=2)
    assert (found["model"]["parameters"], found["model"]["trainable"]) == (12, 4)
    assert (found["memory"]["parameters"], found["memory"]["gradients"]) == (48, 16)
    assert (found["memory"]["optimizer"], found["traffic"]["reduced"]) == (2 * 16 + 4, 16)


@pytest.mark.parametrize(
    ("overrides", "procs", "batch", "steps"),
    [
        ((), 1, (20, 20, 20, 1), (80, 800)),
        ((), 3, (60, 20, 20, 1), (27, 270)),
        (("trainer.accumulate_grad_batches=2",), 2, (80, 40, 20, 2), (20, 200)),
        (("data.global_batch_size=64",), 4, (64, 16, 16, 1), (25, 250)),
        (("data.global_batch_size=10",), 4, (10, 3, 3, 1), (160, 1600)),
        (("trainer.limit_train_batches=0.5", "trainer.max_epochs=3"), 2, (40, 20, 20, 1), (20, 60)),
        (("trainer.max_steps=7",), 1, (20, 20, 20, 1), (80, 7)),
        (("trainer.overfit_batches=3",), 2, (40, 20, 20, 1), (3, 30)),
        (("trainer.fast_dev_run=2",), 2, (40, 20, 20, 1), (2, 2)),
    ],
)
def test_batches_and_steps(overrides, procs, batch, steps):
    found = facts("recipe=toy", *overrides, procs=procs)
    sizes = found["batch"]
    most = (sizes["per_rank"]["most"], sizes["per_forward"]["most"])
    assert (sizes["global"], *most, sizes["accumulate_grad_batches"]) == batch
    assert sizes["per_rank"]["least"] == sizes["global"] // procs
    assert (found["steps"]["per_epoch"], found["steps"]["total"]) == steps


def test_a_debug_run_keeps_the_whole_schedule():
    debug = ("recipe=toy", "trainer=debug", "trainer.max_epochs=2", "scheduler=cosine")
    found = facts(*debug, "scheduler.schedule.warmup_steps=70")
    assert (found["steps"]["total"], found["checkpoint"]) == (1, None)
    with pytest.raises(ConfigError, match="warmup_steps=500 must be at least 0 and less than total_steps=160"):
        facts(*debug, "scheduler.schedule.warmup_steps=500")


# Data that isn't there


def test_steps_of_missing_data_are_unknown_unless_given():
    section = composed("recipe=toy")["data"]
    data = {**section, "datasets": {"_target_": f"{FAKES}.missing_data", "root": "/nowhere"}}
    unknown: dict[str, Any] = {"train": None, "val": None, "test": None, "streams": [], "source": None}
    found = facts("recipe=toy", data=data)
    assert (found["data"], found["steps"]["per_epoch"], found["steps"]["total"]) == (unknown, None, None)
    (note,) = found["notes"]
    assert "plan.train_samples=NUMBER" in note
    assert "/nowhere isn't there." in note
    limited = facts("recipe=toy", "trainer.max_epochs=null", "trainer.max_steps=9", data=data)
    assert limited["steps"]["total"] == 9
    found = facts("recipe=toy", "plan.train_samples=1600", data=data, procs=2)
    assert found["data"] == {**unknown, "train": 1600, "source": "plan.train_samples"}
    assert (found["steps"]["per_epoch"], found["notes"]) == (40, [])
    # The size of the real data counts.
    assert facts("recipe=toy", "plan.train_samples=5")["data"]["train"] == 1600


def test_steps_of_a_stream_are_unknown_unless_limited():
    data = {**composed("recipe=toy")["data"], "datasets": {"_target_": f"{FAKES}.stream"}, "shuffle": False}
    found = facts("recipe=toy", data=data)
    assert found["data"] == {"train": None, "val": 4, "test": None, "streams": ["train"], "source": "data"}
    assert (found["steps"]["per_epoch"], found["steps"]["total"]) == (None, None)
    assert any("The train part is a stream" in note for note in found["notes"])
    limited = facts("recipe=toy", "trainer.limit_train_batches=3", "trainer.max_epochs=2", data=data)
    assert (limited["steps"]["per_epoch"], limited["steps"]["total"]) == (3, 6)
    assert facts("recipe=toy", "scheduler=cosine", "trainer.max_steps=9", data=data)["steps"]["total"] == 9
    with pytest.raises(ConfigError, match=r"must know when training ends(.|\n)*Set trainer.max_steps"):
        facts("recipe=toy", "scheduler=cosine", data=data)
    with pytest.raises(ConfigError, match=r"data.shuffle=true can't go"):
        facts("recipe=toy", data={**data, "shuffle": True})


# Refused as training would be

RECORDING = (
    "+callbacks={recording: {_target_: framework.jobs.parity.recording.Recording, steps: 1, precision: 32-true}}"
)


@pytest.mark.parametrize(
    ("overrides", "procs", "error", "said"),
    [
        (("strategy=single",), 2, TopologyError, "strategy=single is for one process"),
        (("strategy=ddp", "strategy.comm_hook=fp32"), 2, ConfigError, "comm_hook=fp32: use one of fp16"),
        (("strategy=ddp", "strategy.sync_batchnorm=true"), 2, ConfigError, "sync_batchnorm=true needs GPUs"),
        (("strategy=fsdp", "callbacks=ema"), 2, ConfigError, "callbacks.ema keeps a whole copy of the model"),
        (
            ("strategy=fsdp", "strategy.mp_policy.param_dtype=fp16"),
            2,
            ConfigError,
            "fp16 can't go with trainer.precision=32-true",
        ),
        (
            ("strategy=ddp", "trainer.precision=16-mixed", "strategy.comm_hook=powersgd"),
            2,
            ConfigError,
            "Use trainer.precision=bf16-mixed",
        ),
        (("strategy=local_sgd", "trainer.precision=16-mixed"), 2, ConfigError, "Under strategy=local_sgd each process"),
        (("strategy=local_sgd", RECORDING), 2, ConfigError, "job=parity compares what each process has"),
        (("strategy=pipeline", RECORDING), 2, ConfigError, "strategy=pipeline can't go with job=parity"),
        ((), 1601, DataError, "The train dataset has 1600 samples for 1601 processes"),
        (("data.global_batch_size=3",), 4, ConfigError, "less than one sample for each of the 4 forward passes"),
        (("trainer.activation_checkpointing=[Blok]",), 1, ConfigError, "ToyModel has no module of the class Blok"),
        (("+optimizer.mu=1",), 1, TargetError, "optimizer.mu: torch.optim.SGD has no such keyword"),
        (("data.datasets._target_=recipes.toy.no",), 1, TargetError, "there is no no in recipes.toy"),
        (("+data.datasets.val_fraction=0",), 1, ConfigError, "checkpoint.monitor=val/loss is never computed"),
        (("callbacks=ema", "callbacks.ema.decay=2"), 1, ConfigError, "decay=2 is not between 0 and 1"),
    ],
)
def test_what_training_would_refuse_is_refused(overrides, procs, error, said):
    with pytest.raises(error) as caught:
        facts("recipe=toy", *overrides, procs=procs)
    assert said in str(caught.value)


def test_a_failing_optimizer_leaves_the_rest_known():
    found = facts("recipe=toy", optimizer={"_target_": "torch.optim.LBFGS"})
    assert (found["memory"]["optimizer"], found["memory"]["gradients"], found["checkpoint"]) == (None, 660, None)
    assert "closure" in found["notes"][0]

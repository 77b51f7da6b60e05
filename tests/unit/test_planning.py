"""The numbers of a plan, and what a plan refuses. Against real runs: tests/features/test_plan.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from framework.errors import ConfigError, DataError, TargetError, TopologyError
from tests.helpers.internals import Device, Topology, parse, peak_of_gpu, plan_estimate_module, plan_work_module
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


@dataclass(frozen=True, kw_only=True)
class Costs:
    """A plan, and its costs as multiples of the size of the model."""

    overrides: tuple[str, ...] = ()
    procs: int = 1
    memory: dict[str, float] = field(default_factory=dict)
    traffic: tuple[float, float] = (1, 1)
    checkpoint: int = 2


@pytest.mark.parametrize(
    "case",
    [
        Costs(traffic=(0, 0)),
        Costs(procs=2),
        Costs(procs=4, traffic=(1, 3 / 2)),
        Costs(overrides=("strategy=allreduce",), traffic=(0, 0)),
        Costs(overrides=("strategy=allreduce",), procs=2, memory={"buckets": 1}),
        Costs(overrides=("strategy=butterfly",), procs=3, memory={"buckets": 1}, traffic=(1, 4 / 3)),
        Costs(overrides=("strategy=ddp", "strategy.gradient_as_bucket_view=false"), procs=2, memory={"buckets": 1}),
        # Weights go around twice a step, gradients once; between copies of the model, shares of gradients twice.
        Costs(overrides=("strategy=fsdp",), procs=4, memory=QUARTERS, traffic=(1, 9 / 4)),
        Costs(overrides=("strategy=fsdp", BF16), procs=4, memory=QUARTERS, traffic=(1 / 2, 9 / 8)),
        Costs(
            overrides=("strategy=hsdp", "strategy.data_parallel_shard_degree=2"),
            procs=4,
            memory=HALVES,
            traffic=(1, 3 / 2 + 1 / 2),
        ),
        # A checkpoint has each process's errors.
        Costs(
            overrides=("strategy=ddp", "strategy.comm_hook=powersgd"),
            procs=4,
            memory={"errors": 1},
            traffic=(1, 3 / 2),
            checkpoint=2 + 4,
        ),
        Costs(
            overrides=("strategy=ddp", "strategy.comm_hook={powersgd:{use_error_feedback:false}}"),
            procs=4,
            traffic=(1, 3 / 2),
        ),
        Costs(overrides=("strategy=ddp", "strategy.comm_hook=bf16"), procs=4, traffic=(1, 3 / 2)),
        # A checkpoint has each process's weights and state, the mean, and what the next exchange compares with.
        Costs(overrides=("strategy=local_sgd",), memory={"anchors": 1}, traffic=(0, 0), checkpoint=3),
        Costs(
            overrides=("strategy=local_sgd", "strategy.every_n_steps=3", "strategy.warmup_steps=1"),
            procs=4,
            memory={"anchors": 1, "buckets": 1},
            traffic=(1 / 3, 1 / 2),
            checkpoint=10,
        ),
        Costs(
            overrides=("strategy=local_sgd", "strategy.every_n_steps=3", "strategy.outer_momentum=0.5"),
            procs=4,
            memory={"anchors": 2},
            traffic=(1 / 3, 1 / 2),
            checkpoint=11,
        ),
        Costs(overrides=("callbacks=ema",), memory={"averages": 1}, traffic=(0, 0), checkpoint=4),
        Costs(overrides=("trainer.precision=bf16-true",), procs=2, memory=HALVES, traffic=(1 / 2, 1 / 2), checkpoint=1),
        Costs(overrides=("trainer.precision=bf16-mixed",), procs=2),
    ],
)
def test_memory_traffic_and_checkpoint(case: Costs):
    """The optimizer keeps one value for each parameter."""
    found = facts("recipe=toy", "optimizer.momentum=0.9", *case.overrides, model=LARGE, procs=case.procs)
    usual = {"parameters": 1, "gradients": 1, "optimizer": 1}
    names = ("buckets", "buffers", "averages", "anchors", "errors")
    wanted = {**usual, **dict.fromkeys(names, 0), **case.memory}
    assert {name: size / LARGE_BYTES for name, size in found["memory"].items()} == wanted
    sizes = found["traffic"]["reduced"], found["traffic"]["ring_per_rank"]
    assert [size / LARGE_BYTES for size in sizes] == pytest.approx(case.traffic)
    assert found["checkpoint"] / LARGE_BYTES == pytest.approx(case.checkpoint, rel=0.01)


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


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A plan, its batch sizes, and its steps of an epoch and in all."""

    overrides: tuple[str, ...] = ()
    procs: int = 1
    global_size: int
    per_rank: int
    per_forward: int = 20
    accumulate: int = 1
    per_epoch: int
    total: int


@pytest.mark.parametrize(
    "case",
    [
        Steps(global_size=20, per_rank=20, per_epoch=80, total=800),
        Steps(procs=3, global_size=60, per_rank=20, per_epoch=27, total=270),
        Steps(
            overrides=("trainer.accumulate_grad_batches=2",),
            procs=2,
            global_size=80,
            per_rank=40,
            accumulate=2,
            per_epoch=20,
            total=200,
        ),
        Steps(
            overrides=("data.global_batch_size=64",),
            procs=4,
            global_size=64,
            per_rank=16,
            per_forward=16,
            per_epoch=25,
            total=250,
        ),
        Steps(
            overrides=("data.global_batch_size=10",),
            procs=4,
            global_size=10,
            per_rank=3,
            per_forward=3,
            per_epoch=160,
            total=1600,
        ),
        Steps(
            overrides=("trainer.limit_train_batches=0.5", "trainer.max_epochs=3"),
            procs=2,
            global_size=40,
            per_rank=20,
            per_epoch=20,
            total=60,
        ),
        Steps(overrides=("trainer.max_steps=7",), global_size=20, per_rank=20, per_epoch=80, total=7),
        Steps(overrides=("trainer.overfit_batches=3",), procs=2, global_size=40, per_rank=20, per_epoch=3, total=30),
        Steps(overrides=("trainer.fast_dev_run=2",), procs=2, global_size=40, per_rank=20, per_epoch=2, total=2),
    ],
)
def test_batches_and_steps(case: Steps):
    found = facts("recipe=toy", *case.overrides, procs=case.procs)
    sizes = found["batch"]
    assert (sizes["global"], sizes["accumulate_grad_batches"]) == (case.global_size, case.accumulate)
    assert sizes["per_rank"] == {"least": case.global_size // case.procs, "most": case.per_rank}
    assert sizes["per_forward"]["most"] == case.per_forward
    assert (found["steps"]["per_epoch"], found["steps"]["total"]) == (case.per_epoch, case.total)


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


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A plan, and the error that training would end with."""

    overrides: tuple[str, ...] = ()
    procs: int = 1
    error: type[Exception] = ConfigError
    said: str


@pytest.mark.parametrize(
    "case",
    [
        Refusal(
            overrides=("strategy=single",), procs=2, error=TopologyError, said="strategy=single is for one process"
        ),
        Refusal(overrides=("strategy=ddp", "strategy.comm_hook=fp32"), procs=2, said="comm_hook=fp32: use one of fp16"),
        Refusal(
            overrides=("strategy=ddp", "strategy.sync_batchnorm=true"), procs=2, said="sync_batchnorm=true needs GPUs"
        ),
        Refusal(
            overrides=("strategy=fsdp", "callbacks=ema"), procs=2, said="callbacks.ema keeps a whole copy of the model"
        ),
        Refusal(
            overrides=("strategy=fsdp", "strategy.mp_policy.param_dtype=fp16"),
            procs=2,
            said="fp16 can't go with trainer.precision=32-true",
        ),
        Refusal(
            overrides=("strategy=ddp", "trainer.precision=16-mixed", "strategy.comm_hook=powersgd"),
            procs=2,
            said="Use trainer.precision=bf16-mixed",
        ),
        Refusal(
            overrides=("strategy=local_sgd", "trainer.precision=16-mixed"),
            procs=2,
            said="Under strategy=local_sgd each process",
        ),
        Refusal(overrides=("strategy=local_sgd", RECORDING), procs=2, said="job=parity compares what each process has"),
        Refusal(overrides=("strategy=pipeline", RECORDING), procs=2, said="strategy=pipeline can't go with job=parity"),
        Refusal(procs=1601, error=DataError, said="The train dataset has 1600 samples for 1601 processes"),
        Refusal(
            overrides=("data.global_batch_size=3",),
            procs=4,
            said="less than one sample for each of the 4 forward passes",
        ),
        Refusal(
            overrides=("trainer.activation_checkpointing=[Blok]",), said="ToyModel has no module of the class Blok"
        ),
        Refusal(
            overrides=("+optimizer.mu=1",), error=TargetError, said="optimizer.mu: torch.optim.SGD has no such keyword"
        ),
        Refusal(
            overrides=("data.datasets._target_=recipes.toy.no",),
            error=TargetError,
            said="there is no no in recipes.toy",
        ),
        Refusal(overrides=("+data.datasets.val_fraction=0",), said="checkpoint.monitor=val/loss is never computed"),
        Refusal(overrides=("callbacks=ema", "callbacks.ema.decay=2"), said="decay=2 is not between 0 and 1"),
    ],
)
def test_what_training_would_refuse_is_refused(case: Refusal):
    with pytest.raises(case.error) as caught:
        facts("recipe=toy", *case.overrides, procs=case.procs)
    assert case.said in str(caught.value)


def test_a_failing_optimizer_leaves_the_rest_known():
    found = facts("recipe=toy", optimizer={"_target_": "tests.unit.fake_targets.NeedsClosure", "lr": 0.1})
    assert (found["memory"]["optimizer"], found["memory"]["gradients"], found["checkpoint"]) == (None, 660, None)
    assert "it can't step without training" in found["notes"][0]


@pytest.mark.parametrize("name", ["Tesla T4", "NVIDIA GTX"])
def test_the_work_of_a_step_is_compared_with_the_peak_of_this_gpu(name, monkeypatch):
    monkeypatch.setattr(plan_work_module, "find_device", lambda *_, **__: Device(name, None))
    work = plan_work_module.work_of_step(parse(composed("recipe=toy")), Topology(1, 1, gpus_per_node=1, span=1))
    assert work["device"] == name
    peak = peak_of_gpu(name, "32-true", allows_tf32=False)
    if peak is None:
        assert work["at_peak_s"] is None
        assert f"{name} isn't in the table" in work["notes"][0]
    else:
        assert work["at_peak_s"] == pytest.approx(work["flops"] / peak)

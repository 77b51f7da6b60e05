"""The numbers of a plan against those of real models and runs, and what a plan refuses."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch

from framework import planning
from framework.config.parse import parse
from framework.errors import ConfigError, DataError, TargetError, TopologyError
from framework.footprint import tensor_bytes
from framework.topology import Topology
from recipes.digits import ConvNet
from tests.conf.test_options import RECIPES
from tests.unit import fake_targets
from tests.unit.config.raw import composed

FAKES = "tests.unit.fake_targets"

pytestmark = pytest.mark.usefixtures("own_state")


def facts(
    *overrides: str,
    procs: int = 1,
    nnodes: int = 1,
    gpus: int = 0,
    span: int = 1,
    backend: str = "gloo",
    **changes: Any,
) -> dict[str, Any]:
    """changes: whole sections of the composed configuration."""
    config = parse({**composed(*overrides), **changes})
    return planning.facts(config, Topology(nnodes, procs, gpus, span), backend=backend)


def test_numbers_are_those_of_the_real_model():
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 1, 28, 28)).sum().backward()
    optimizer.step()
    state = [value for each in optimizer.state.values() for value in each.values()]
    found = facts("recipe=digits", procs=4)
    assert found["model"] == {
        "name": "ConvNet",
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }
    assert found["memory"] == {
        "parameters": tensor_bytes(model.parameters()),
        "gradients": tensor_bytes([p.grad for p in model.parameters() if p.grad is not None]),
        "optimizer": tensor_bytes(state),
        **dict.fromkeys(("buckets", "buffers", "averages", "anchors", "errors"), 0),
    }
    assert (found["strategy"], found["optimizer"], found["spread"], found["spread_over"]) == ("DDP", "SGD", False, 1)


@pytest.mark.parametrize(("procs", "sent"), [(1, 0), (2, 660), (4, 990), (100, 1306)])
def test_a_ring_moves_twice_the_gradients_but_for_one_share(procs, sent):
    traffic = facts("recipe=toy", procs=procs)["traffic"]
    assert traffic == {"reduced": 660 if procs > 1 else 0, "ring_per_rank": sent}


BF16 = "strategy.mp_policy={param_dtype:bf16,reduce_dtype:bf16}"


@pytest.mark.parametrize(
    ("overrides", "where", "shards", "reduced", "sent"),
    [
        (["fsdp"], {"procs": 4}, 4, 1, 9 / 4),  # weights go around twice a step, gradients once
        (["fsdp", BF16], {"procs": 4}, 4, 1 / 2, 9 / 8),
        (["hsdp", "strategy.data_parallel_shard_degree=2"], {"procs": 4}, 2, 1, 3 / 2 + 1 / 2),
        (["hsdp"], {"procs": 2, "nnodes": 2}, 2, 1, 3 / 2 + 1 / 2),
    ],
)
def test_a_sharded_model(overrides, where, shards, reduced, sent):
    whole = facts("recipe=digits", procs=4)
    found = facts("recipe=digits", f"strategy={overrides[0]}", *overrides[1:], **where)
    assert (found["spread"], found["spread_over"]) == (True, shards)
    assert {name: shards * size for name, size in found["memory"].items()} == whole["memory"]
    size = whole["memory"]["parameters"]
    assert found["traffic"] == {"reduced": int(reduced * size), "ring_per_rank": int(sent * size)}
    assert found["checkpoint"] == whole["checkpoint"]


def test_a_model_offloaded_to_the_cpu_is_noted():
    found = facts("recipe=digits", "strategy=fsdp", "strategy.cpu_offload=true", procs=4, gpus=4, backend="nccl")
    assert any("strategy.cpu_offload=true" in note for note in found["notes"])


def test_buffers_of_the_exchange_are_counted():
    for overrides, procs, has_them in (
        (("strategy=allreduce",), 2, True),
        (("strategy=butterfly",), 3, True),
        (("strategy=allreduce",), 1, False),
        (("strategy=ddp", "strategy.gradient_as_bucket_view=false"), 2, True),
        (("strategy=ddp",), 2, False),
    ):
        memory = facts("recipe=toy", *overrides, procs=procs)["memory"]
        assert memory["buckets"] == has_them * memory["gradients"], overrides


@pytest.mark.parametrize(
    ("option", "procs", "anchors", "buckets"),
    [
        ("strategy.warmup_steps=1", 4, 1, 1),
        ("strategy.outer_momentum=0.5", 4, 2, 0),
        ("strategy.warmup_steps=1", 1, 0, 0),
    ],
)
def test_local_sgd(option, procs, anchors, buckets):
    """A step has its share of the exchange; a checkpoint has each process's weights and state, and the mean."""
    usual, others = facts("recipe=digits", procs=procs), procs - 1
    size, state = usual["memory"]["parameters"], usual["memory"]["optimizer"]
    found = facts("recipe=digits", "strategy=local_sgd", "strategy.every_n_steps=3", option, procs=procs)
    assert found["memory"] == {**usual["memory"], "anchors": anchors * size, "buckets": buckets * size}
    assert found["exchanges_every"] == 3
    shares = {"reduced": size // 3, "ring_per_rank": 3 * 2 * size // 12}
    assert found["traffic"] == (shares if others else dict.fromkeys(shares, 0))
    kept = (anchors + bool(others)) * size + others * (size + state)
    assert found["checkpoint"] - usual["checkpoint"] == pytest.approx(kept, rel=0.05, abs=50_000)


def test_a_pipeline():
    one = ("recipe=toy_model_parallel", "topology=single_node", "strategy=pipeline", "data.batch_size=24")
    size = facts("recipe=toy")["memory"]["gradients"]
    cut, copied = facts(*one, procs=2), facts(*one, "strategy.num_stages=2", procs=6)
    assert (cut["spread_over"], copied["spread_over"]) == (2, 2)
    assert cut["memory"]["parameters"] == copied["memory"]["parameters"] == size // 2
    assert cut["traffic"] == {"reduced": 0, "ring_per_rank": 0}
    assert copied["traffic"] == {"reduced": size // 2, "ring_per_rank": 2 * 2 * (size // 2) // 3}
    assert (cut["memory"]["buckets"], copied["memory"]["buckets"]) == (0, size // 2)
    assert copied["batch"]["per_rank"] == {"least": 24, "most": 24}
    assert copied["batch"]["per_forward"] == {"least": 3, "most": 3}
    assert (copied["batch"]["accumulate_grad_batches"], copied["batch"]["num_microbatches"]) == (1, 8)
    twice = facts(*one, "trainer.accumulate_grad_batches=2", procs=2)["batch"]
    assert (twice["global"], twice["accumulate_grad_batches"], twice["num_microbatches"]) == (48, 2, 8)
    few = ("data.global_batch_size=40", "trainer.accumulate_grad_batches=3", "strategy.num_stages=2")
    for overrides, procs, error, said in (
        ((*one[:-1], "data.batch_size=7"), 2, ConfigError, r"data\.batch_size=7 can't .* strategy\.num_microbatches=8"),
        ((*one, *few), 4, ConfigError, r"global_batch_size=40 is .* each of the 48"),
        (("recipe=toy", "strategy=pipeline"), 2, TargetError, "can't cut ToyModel into 2 stages"),
    ):
        with pytest.raises(error, match=said):
            facts(*overrides, procs=procs)


def test_errors_that_a_comm_hook_keeps():
    """On each process, and in the checkpoint for all of them."""
    usual = facts("recipe=digits", "strategy=ddp", procs=4)
    size = usual["memory"]["gradients"]
    for hook, errors in (("powersgd", 1), ("{powersgd:{use_error_feedback:false}}", 0), ("bf16", 0)):
        found = facts("recipe=digits", "strategy=ddp", f"strategy.comm_hook={hook}", procs=4)
        assert found["memory"] == {**usual["memory"], "errors": errors * size}
        assert found["checkpoint"] - usual["checkpoint"] == pytest.approx(4 * errors * size, rel=0.03)


def test_precision_frozen_parameters_and_averages():
    memory = {
        precision: facts("recipe=digits", f"trainer.precision={precision}")["memory"]
        for precision in ("32-true", "bf16-true", "bf16-mixed")
    }
    doubled = {name: 2 * size for name, size in memory["bf16-true"].items()}
    assert doubled == memory["32-true"] == memory["bf16-mixed"]
    found = facts("recipe=toy", "optimizer=adam", model={"_target_": f"{FAKES}.HalfFrozen"}, procs=2)
    assert (found["model"]["parameters"], found["model"]["trainable"]) == (12, 4)
    assert (found["memory"]["parameters"], found["memory"]["gradients"]) == (48, 16)
    assert (found["memory"]["optimizer"], found["traffic"]["reduced"]) == (2 * 16 + 4, 16)
    plain, averaged = (facts("recipe=digits", *extra) for extra in ((), ("callbacks=ema",)))
    assert averaged["memory"]["averages"] == plain["memory"]["parameters"]
    assert averaged["checkpoint"] > plain["checkpoint"] + 2 * plain["memory"]["parameters"]
    assert facts("recipe=toy", "trainer=debug")["checkpoint"] is None
    assert facts("recipe=toy_model_parallel", gpus=8, span=8)["model"]["parameters"] == 7 * 110 + 55


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


@pytest.mark.parametrize(
    "recipe", [pytest.param(recipe, marks=[] if recipe == "toy" else pytest.mark.exhaustive) for recipe in RECIPES]
)
def test_a_debug_run_has_the_schedule_of_the_whole_run(recipe, tmp_path):
    nowhere = (f"data.root={tmp_path}", "data.mirrors=[]") if recipe.startswith("mnist") else ()
    chosen = (f"recipe={recipe}", "trainer=debug", "trainer.max_epochs=2", "scheduler=cosine", *nowhere)
    span = 2 if recipe == "toy_model_parallel" else 1
    assert facts(*chosen, "scheduler.schedule.warmup_steps=70", gpus=span, span=span)["steps"]["total"] == 1
    with pytest.raises(ConfigError, match="warmup_steps=50000 must be at least 0 and less than total_steps="):
        facts(*chosen, "scheduler.schedule.warmup_steps=50000", gpus=span, span=span)


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
    assert facts("recipe=toy", "plan.train_samples=5")["data"]["train"] == 1600  # the real data counts


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

RECORDING = "+callbacks={recording: {_target_: framework.parity.recording.Recording, steps: 1, precision: 32-true}}"


@pytest.mark.parametrize(
    ("overrides", "procs", "error", "said"),
    [
        (("strategy=single",), 2, TopologyError, "strategy=single is for one process"),
        (("strategy=ddp", "strategy.comm_hook=fp32"), 2, ConfigError, "comm_hook=fp32: there is none"),
        (("strategy=ddp", "strategy.sync_batchnorm=true"), 2, ConfigError, "sync_batchnorm=true needs GPUs"),
        (("strategy=allreduce", "strategy.bucket_cap_mb=-1"), 2, ConfigError, "bucket_cap_mb=-1 must be 0"),
        (("strategy=fsdp", "callbacks=ema"), 2, ConfigError, "callbacks.ema keeps a whole copy of the model"),
        (
            ("strategy=fsdp", "strategy.mp_policy.param_dtype=fp16"),
            *(2, ConfigError, "param_dtype=fp16 can't go with trainer.precision=32-true"),
        ),
        (
            ("strategy=ddp", "trainer.precision=16-mixed", "strategy.comm_hook=powersgd"),
            *(2, ConfigError, "Use trainer.precision=bf16-mixed"),
        ),
        (("strategy=local_sgd", "trainer.precision=16-mixed"), 2, ConfigError, "Under strategy=local_sgd each process"),
        (("strategy=local_sgd", RECORDING), 2, ConfigError, "job=parity compares what each process has"),
        ((), 1601, DataError, "The train dataset has 1600 samples for 1601 processes"),
        (("data.global_batch_size=3",), 4, ConfigError, "less than one sample for each of the 4 forward passes"),
        (("trainer.activation_checkpointing=[Blok]",), 1, ConfigError, "ToyModel has no module of the class Blok"),
        (("+optimizer.mu=1",), 1, TargetError, "optimizer.mu: torch.optim.SGD has no such keyword"),
        (("data.datasets._target_=recipes.toy.no",), 1, TargetError, "there is no no in recipes.toy"),
        (("+data.datasets.val_fraction=0",), 1, ConfigError, "checkpoint.monitor=val/loss is never known"),
        (("callbacks=ema", "callbacks.ema.decay=2"), 1, ConfigError, "decay=2 is not between 0 and 1"),
    ],
)
def test_what_training_would_refuse_is_refused(overrides, procs, error, said):
    with pytest.raises(error) as caught:
        facts("recipe=toy", *overrides, procs=procs)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "procs"),
    [
        (("strategy=local_sgd", "trainer.precision=16-mixed"), 1),
        (("strategy=ddp", "trainer.precision=16-mixed", "strategy.comm_hook=fp16"), 2),
        (("trainer.activation_checkpointing=[Linear]",), 1),
    ],
)
def test_their_neighbours_are_accepted(overrides, procs):
    assert facts("recipe=toy", *overrides, procs=procs)["model"] == facts("recipe=toy")["model"]


def test_models_that_can_not_be_planned_are_refused():
    with pytest.raises(TargetError) as caught:
        facts("recipe=toy", model={"_target_": f"{FAKES}.ReadsAValue"})
    for fact in ("PyTorch's meta device", "Tensor.item()", f"{fake_targets.__file__}, line "):
        assert fact in str(caught.value)
    with pytest.raises(TopologyError, match="ToyModel can't use 2 devices"):
        facts("recipe=toy", gpus=2, span=2)


def test_an_optimizer_that_can_not_step_leaves_the_rest_known():
    found = facts("recipe=toy", optimizer={"_target_": "torch.optim.LBFGS"})
    assert (found["memory"]["optimizer"], found["memory"]["gradients"], found["checkpoint"]) == (None, 660, None)
    assert "closure" in found["notes"][0]


def test_a_plan_opens_no_connection():
    """The hook can't be taken out of a process again: it is called here, and installed in children."""
    with socket.socket() as inet, socket.socket(socket.AF_UNIX) as unix:
        for event, arguments in {
            "socket.connect": (inet, ("192.0.2.1", 80)),
            "socket.getaddrinfo": ("example.org", 443, 0, 0, 0),
            "framework.download": ("images.gz", "/data"),
        }.items():
            with pytest.raises(DataError, match="job=plan downloads nothing"):
                planning._refuse_side_effects(event, arguments)
        planning._refuse_side_effects("socket.connect", (unix, "/some/path"))
        planning._refuse_side_effects("open", ("file", "w", 0))

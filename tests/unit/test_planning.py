"""Numbers of a plan, against those of really built and really trained ones; and what a plan refuses."""

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
from tests.conf.test_options import RECIPES, composed
from tests.unit import fake_targets

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


def test_parameters_gradients_and_state_are_those_of_the_real_model():
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
        "buckets": 0,
        "optimizer": tensor_bytes(state),
        "buffers": 0,
        "averages": 0,
        "anchors": 0,
        "errors": 0,
    }
    assert found["strategy"] == "DDP"
    assert found["optimizer"] == "SGD"


def test_of_a_spread_model_each_rank_has_its_share():
    """Weights go around twice a step, gradients once."""
    whole, spread = facts("recipe=digits", procs=4), facts("recipe=digits", "strategy=fsdp", procs=4)
    assert (whole["spread"], spread["spread"]) == (False, True)
    assert {name: 4 * size for name, size in spread["memory"].items()} == whole["memory"]
    size = whole["memory"]["parameters"]
    assert spread["traffic"] == {"reduced": size, "ring_per_rank": 3 * 3 * size // 4}
    assert any("The model is spread over the ranks" in note for note in spread["notes"])
    assert spread["checkpoint"] == whole["checkpoint"]


def test_of_several_copies_each_is_spread_over_some_ranks():
    """Gradients go around in each copy, and then their shares between copies; in the formats that were asked for."""
    whole = facts("recipe=digits", procs=4)
    copies = facts("recipe=digits", "strategy=hsdp", "strategy.data_parallel_shard_degree=2", procs=4)
    assert (copies["spread"], copies["spread_over"], whole["spread_over"]) == (True, 2, 1)
    assert {name: 2 * size for name, size in copies["memory"].items()} == whole["memory"]
    size = whole["memory"]["parameters"]
    assert copies["traffic"] == {"reduced": size, "ring_per_rank": 3 * size // 2 + size // 2}
    assert copies["checkpoint"] == whole["checkpoint"]
    by_node = facts("recipe=digits", "strategy=hsdp", procs=2, nnodes=2)
    assert by_node["traffic"] == copies["traffic"]
    short = facts("recipe=digits", "strategy=fsdp", "strategy.mp_policy={param_dtype:bf16,reduce_dtype:bf16}", procs=4)
    assert short["traffic"] == {"reduced": size // 2, "ring_per_rank": 3 * 3 * size // 8}
    assert short["memory"] == facts("recipe=digits", "strategy=fsdp", procs=4)["memory"]


def test_what_the_memory_of_the_cpu_holds_is_said():
    found = facts("recipe=digits", "strategy=fsdp", "strategy.cpu_offload=true", procs=4, gpus=4, backend="nccl")
    assert any("are in the CPU's memory (strategy.cpu_offload=true)" in note for note in found["notes"])


def test_formats_and_classes_that_training_would_refuse_are_refused():
    with pytest.raises(ConfigError, match=r"param_dtype=fp16 can't go with trainer\.precision=32-true"):
        facts("recipe=toy", "strategy=fsdp", "strategy.mp_policy.param_dtype=fp16", procs=2)
    with pytest.raises(
        ConfigError, match=r"trainer\.activation_checkpointing: ToyModel has no module of the class Blok"
    ):
        facts("recipe=toy", "trainer.activation_checkpointing=[Blok]")
    assert facts("recipe=toy", "trainer.activation_checkpointing=[Linear]")["model"] == facts("recipe=toy")["model"]


def test_what_gradients_are_exchanged_in_is_counted():
    """Where it is memory beside theirs, and there is anybody to exchange them with."""
    for overrides, procs, has_it in (
        (("strategy=allreduce",), 2, True),
        (("strategy=butterfly",), 3, True),
        (("strategy=allreduce",), 1, False),
        (("strategy=ddp", "strategy.gradient_as_bucket_view=false"), 2, True),
        (("strategy=ddp",), 2, False),
    ):
        memory = facts("recipe=toy", *overrides, procs=procs)["memory"]
        assert memory["buckets"] == has_it * memory["gradients"], overrides


def test_what_is_averaged_every_few_steps_costs_a_step_its_share_and_memory_for_what_it_began_with():
    """In a checkpoint all have weights and state of their own, and there is the mean."""
    several, alone = (facts("recipe=digits", procs=procs) for procs in (4, 1))
    size, state = several["memory"]["parameters"], several["memory"]["optimizer"]
    for option, usual, anchors, buckets in (
        ("strategy.warmup_steps=1", several, 1, 1),
        ("strategy.outer_momentum=0.5", several, 2, 0),
        ("strategy.warmup_steps=1", alone, 0, 0),
    ):
        others = 3 if usual is several else 0
        found = facts("recipe=digits", "strategy=local_sgd", "strategy.every_n_steps=3", option, procs=1 + others)
        assert found["memory"] == {**usual["memory"], "anchors": anchors * size, "buckets": buckets * size}
        assert found["exchanges_every"] == 3
        shares = {"reduced": size // 3, "ring_per_rank": 3 * 2 * size // 12}
        assert found["traffic"] == (shares if others else dict.fromkeys(shares, 0))
        kept = (anchors + bool(others)) * size + others * (size + state)
        assert found["checkpoint"] - usual["checkpoint"] == pytest.approx(kept, rel=0.05, abs=50_000)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.precision=16-mixed", "Under strategy=local_sgd each process would leave out steps of its own"),
        (
            "+callbacks={recording: {_target_: framework.parity.recording.Recording, steps: 1, precision: 32-true}}",
            "job=parity compares what each process has after every step",
        ),
    ],
)
def test_what_replicas_that_differ_cannot_have_is_refused(override, message):
    command = ("recipe=toy", "strategy=local_sgd", override)
    assert facts(*command, procs=1)["strategy"] == "LocalSGD"
    with pytest.raises(ConfigError, match=message):
        facts(*command, procs=2)


def test_of_a_model_in_stages_each_rank_has_a_part_and_copies_exchange_theirs():
    one = ("recipe=toy_model_parallel", "topology=single_node", "strategy=pipeline", "data.batch_size=24")
    whole = facts("recipe=toy")
    cut, copied = facts(*one, procs=2), facts(*one, "strategy.num_stages=2", procs=6)
    assert (cut["spread_over"], copied["spread_over"]) == (2, 2)
    size = whole["memory"]["gradients"]
    assert cut["memory"]["parameters"] == copied["memory"]["parameters"] == size // 2
    assert cut["traffic"] == {"reduced": 0, "ring_per_rank": 0}
    assert copied["traffic"] == {"reduced": size // 2, "ring_per_rank": 2 * 2 * (size // 2) // 3}
    assert (cut["memory"]["buckets"], copied["memory"]["buckets"]) == (0, size // 2)
    assert copied["batch"]["per_rank"] == {"least": 24, "most": 24}
    assert copied["batch"]["per_forward"] == {"least": 3, "most": 3}
    twice = facts(*one, "trainer.accumulate_grad_batches=2", procs=2)["batch"]
    assert (twice["global"], twice["accumulate_grad_batches"], twice["num_microbatches"]) == (48, 2, 8)
    assert (copied["batch"]["accumulate_grad_batches"], copied["batch"]["num_microbatches"]) == (1, 8)
    assert any("The model is cut into stages" in note for note in cut["notes"])
    with pytest.raises(
        ConfigError, match=r"data\.batch_size=7 can't be cut into strategy\.num_microbatches=8, .*\nUse"
    ):
        facts(*one[:-1], "data.batch_size=7", procs=2)
    few = ("data.global_batch_size=40", "trainer.accumulate_grad_batches=3", "strategy.num_stages=2")
    factors = r"2 copies of the model × trainer\.accumulate_grad_batches=3 × strategy\.num_microbatches=8"
    with pytest.raises(ConfigError, match=rf"global_batch_size=40 is .* each of the 48 .*\({factors}\)"):
        facts(*one, *few, procs=4)
    with pytest.raises(TargetError, match="can't cut ToyModel into 2 stages"):
        facts("recipe=toy", "strategy=pipeline", procs=2)


def test_a_callback_that_a_spread_model_cannot_have_is_refused():
    with pytest.raises(ConfigError, match=r"callbacks\.ema keeps a whole copy of the model"):
        facts("recipe=toy", "strategy=fsdp", "callbacks=ema", procs=2)


def test_what_a_hook_keeps_of_gradients_is_counted_for_each_process():
    """In the first one's checkpoint for all of them, and nowhere where it keeps none."""
    usual = facts("recipe=digits", "strategy=ddp", procs=4)
    size = usual["memory"]["gradients"]
    for hook, errors in (("powersgd", 1), ("{powersgd:{use_error_feedback:false}}", 0), ("bf16", 0)):
        found = facts("recipe=digits", "strategy=ddp", f"strategy.comm_hook={hook}", procs=4)
        assert found["memory"] == {**usual["memory"], "errors": errors * size}
        assert found["checkpoint"] - usual["checkpoint"] == pytest.approx(4 * errors * size, rel=0.03)


def test_a_hook_that_an_overflow_would_stay_in_is_refused_with_a_scaled_loss():
    command = ("recipe=toy", "strategy=ddp", "trainer.precision=16-mixed")
    assert facts(*command, "strategy.comm_hook=fp16", procs=2)["strategy"] == "DDP"
    with pytest.raises(ConfigError, match=r"precision=16-mixed scales the loss, .*\nUse trainer\.precision=bf16-mixed"):
        facts(*command, "strategy.comm_hook=powersgd", procs=2)


def test_precision_is_honoured():
    whole, half, mixed = (
        facts("recipe=digits", f"trainer.precision={precision}")["memory"]
        for precision in ("32-true", "bf16-true", "bf16-mixed")
    )
    assert {name: 2 * size for name, size in half.items()} == whole == mixed


def test_what_is_frozen_has_neither_gradient_nor_state():
    found = facts("recipe=toy", "optimizer=adam", model={"_target_": f"{FAKES}.HalfFrozen"})
    assert (found["model"]["parameters"], found["model"]["trainable"]) == (12, 4)
    assert (found["memory"]["parameters"], found["memory"]["gradients"]) == (48, 16)
    assert found["memory"]["optimizer"] == 2 * 16 + 4
    assert facts("recipe=toy", procs=2, model={"_target_": f"{FAKES}.HalfFrozen"})["traffic"]["reduced"] == 16


@pytest.mark.parametrize(("procs", "sent"), [(1, 0), (2, 660), (4, 990), (100, 1306)])
def test_a_ring_moves_twice_the_gradients_but_for_one_share(procs, sent):
    traffic = facts("recipe=toy", procs=procs)["traffic"]
    assert traffic == {"reduced": 660 if procs > 1 else 0, "ring_per_rank": sent}


@pytest.mark.parametrize(
    ("overrides", "procs", "batch", "steps"),
    [
        ((), 1, (20, 20, 20, 1), (80, 800)),
        ((), 3, (60, 20, 20, 1), (27, 270)),
        (("trainer.accumulate_grad_batches=2",), 2, (80, 40, 20, 2), (20, 200)),
        (("data.global_batch_size=64",), 4, (64, 16, 16, 1), (25, 250)),
        (("trainer.limit_train_batches=0.5", "trainer.max_epochs=3"), 2, (40, 20, 20, 1), (20, 60)),
        (("trainer.max_steps=7",), 1, (20, 20, 20, 1), (80, 7)),
        (("trainer.overfit_batches=3",), 2, (40, 20, 20, 1), (3, 30)),
        (("trainer.fast_dev_run=2",), 2, (40, 20, 20, 1), (2, 2)),
    ],
)
def test_batches_and_steps(overrides, procs, batch, steps):
    found = facts("recipe=toy", *overrides, procs=procs)
    per_rank, per_forward = found["batch"]["per_rank"], found["batch"]["per_forward"]
    assert per_rank["least"] == per_rank["most"]
    assert per_forward["least"] == per_forward["most"]
    assert (
        found["batch"]["global"],
        per_rank["most"],
        per_forward["most"],
        found["batch"]["accumulate_grad_batches"],
    ) == batch
    assert (found["steps"]["per_epoch"], found["steps"]["total"]) == steps


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_debug_run_has_the_schedule_of_the_whole_run(recipe, tmp_path):
    nowhere = (f"data.root={tmp_path}", "data.mirrors=[]") if recipe.startswith("mnist") else ()
    chosen = (f"recipe={recipe}", "trainer=debug", "trainer.max_epochs=2", "scheduler=cosine", *nowhere)
    span = 2 if recipe == "toy_model_parallel" else 1
    assert facts(*chosen, "scheduler.schedule.warmup_steps=70", gpus=span, span=span)["steps"]["total"] == 1
    with pytest.raises(ConfigError, match="warmup_steps=50000 must be at least 0 and less than total_steps="):
        facts(*chosen, "scheduler.schedule.warmup_steps=50000", gpus=span, span=span)


def test_a_batch_that_is_not_dealt_evenly_has_two_sizes():
    assert facts("recipe=toy", "data.global_batch_size=10", procs=4)["batch"]["per_rank"] == {"least": 2, "most": 3}


def test_averages_are_a_second_copy_of_the_model():
    plain, averaged = (facts("recipe=digits", *extra) for extra in ((), ("callbacks=ema",)))
    assert averaged["memory"]["averages"] == plain["memory"]["parameters"]
    assert averaged["checkpoint"] > plain["checkpoint"] + 2 * plain["memory"]["parameters"]


def test_a_model_gets_all_devices_of_its_rank():
    assert facts("recipe=toy_model_parallel", gpus=8, span=8)["model"]["parameters"] == 7 * 110 + 55
    with pytest.raises(TopologyError, match="ToyModel can't use 2 devices"):
        facts("recipe=toy", gpus=2, span=2)


def test_without_checkpoints_there_is_no_size_of_any():
    assert facts("recipe=toy", "trainer=debug")["checkpoint"] is None


# Data that isn't there


def missing() -> dict[str, Any]:
    return {**composed("recipe=toy")["data"], "datasets": {"_target_": f"{FAKES}.missing_data", "root": "/nowhere"}}


def test_steps_of_data_that_is_not_there_are_not_known():
    found = facts("recipe=toy", data=missing())
    assert found["data"] == {"train": None, "val": None, "test": None, "streams": [], "source": None}
    assert (found["steps"]["per_epoch"], found["steps"]["total"]) == (None, None)
    (note,) = found["notes"]
    assert "plan.train_samples=NUMBER" in note
    assert "/nowhere isn't there." in note
    limited = facts("recipe=toy", "trainer.max_epochs=null", "trainer.max_steps=9", data=missing())
    assert limited["steps"]["total"] == 9


def test_samples_that_were_given_stand_for_data_that_is_not_there():
    found = facts("recipe=toy", "plan.train_samples=1600", data=missing(), procs=2)
    assert found["data"] == {"train": 1600, "val": None, "test": None, "streams": [], "source": "plan.train_samples"}
    assert (found["steps"]["per_epoch"], found["notes"]) == (40, [])
    assert facts("recipe=toy", "plan.train_samples=5")["data"]["train"] == 1600  # the real data counts


def test_of_a_stream_nobody_knows_the_steps():
    data = {**composed("recipe=toy")["data"], "datasets": {"_target_": f"{FAKES}.stream"}, "shuffle": False}
    found = facts("recipe=toy", data=data)
    assert found["data"] == {"train": None, "val": 4, "test": None, "streams": ["train"], "source": "data"}
    assert (found["steps"]["per_epoch"], found["steps"]["total"]) == (None, None)
    assert any("The train part is a stream" in note for note in found["notes"])
    limited = facts("recipe=toy", "trainer.limit_train_batches=3", "trainer.max_epochs=2", data=data)
    assert (limited["steps"]["per_epoch"], limited["steps"]["total"]) == (3, 6)
    with pytest.raises(ConfigError, match=r"must know when training ends(.|\n)*Set trainer.max_steps"):
        facts("recipe=toy", "scheduler=cosine", data=data)
    assert facts("recipe=toy", "scheduler=cosine", "trainer.max_steps=9", data=data)["steps"]["total"] == 9
    with pytest.raises(ConfigError, match=r"data.shuffle=true can't go"):
        facts("recipe=toy", data={**data, "shuffle": True})


# Refused as training would be


@pytest.mark.parametrize(
    ("overrides", "procs", "error", "said"),
    [
        (("strategy=single",), 2, TopologyError, "strategy=single is for one process"),
        (("strategy=ddp", "strategy.comm_hook=fp32"), 2, ConfigError, "comm_hook=fp32: there is none"),
        (("strategy=ddp", "strategy.sync_batchnorm=true"), 2, ConfigError, "sync_batchnorm=true needs GPUs"),
        (("strategy=allreduce", "strategy.bucket_cap_mb=-1"), 2, ConfigError, "bucket_cap_mb=-1 must be 0"),
        ((), 1601, DataError, "The train dataset has 1600 samples for 1601 processes"),
        (("data.global_batch_size=3",), 4, ConfigError, "less than one sample for each of the 4 forward passes"),
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


def test_a_model_that_reads_values_can_not_be_planned():
    with pytest.raises(TargetError) as caught:
        facts("recipe=toy", model={"_target_": f"{FAKES}.ReadsAValue"})
    message = str(caught.value)
    assert "can't be built on PyTorch's meta device" in message
    assert "Tensor.item() cannot be called on meta tensors" in message
    assert f"{fake_targets.__file__}, line " in message


def test_an_optimizer_that_can_not_step_leaves_the_rest_known():
    found = facts("recipe=toy", optimizer={"_target_": "torch.optim.LBFGS"})
    assert found["memory"]["optimizer"] is None
    assert found["memory"]["gradients"] == 660
    assert found["checkpoint"] is None
    assert "closure" in found["notes"][0]


# Nothing is downloaded. The hook can't be taken out of a process again: it is called here, and installed in children.


def test_every_way_out_of_the_machine_is_refused():
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

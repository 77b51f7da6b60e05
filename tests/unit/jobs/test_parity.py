"""What `job=parity` asks of its trainings, also on GPUs that aren't here, and what it says of each answer."""

from __future__ import annotations

from typing import Any

import pytest

from framework.errors import ConfigError, TopologyError
from tests.helpers.internals import (
    CAUSES,
    ExternalRanks,
    Request,
    detect,
    hardware_module,
    launch_base_module,
    parity_job_module,
    parse,
    render_parity,
)
from tests.unit.config.raw import raw_config

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


def request(changes: dict[str, Any], **others: Any) -> Request:
    raw = raw_config({"job": "parity", "trainer.gpus": 0, **changes})
    return Request(parse(raw), raw, overrides=(), **others)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of them."""
    for module in (parity_job_module, launch_base_module, hardware_module):
        monkeypatch.setattr(module, "count_gpus", lambda: 4)


@pytest.mark.parametrize(
    ("changes", "processes", "size"),
    [
        ({}, 2, 4),
        ({"topology.procs_per_node": 3, "trainer.accumulate_grad_batches": 2}, 3, 24),
        ({"data.global_batch_size": 30, "parity.processes": 7}, 7, 30),
    ],
)
def test_processes_and_the_global_batch_are_the_runs(changes: dict[str, Any], processes: int, size: int) -> None:
    assert parity_job_module.check_setup(request(changes))[1:] == (processes, size)


SHARED = {"trainer.gpus": 1, "topology.share_gpus": True, "topology.gpus_per_process": 1, "parity.processes": 3}


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("changes", "one", "many"),
    [
        ({"trainer.gpus": None}, (1, 1, 1), (4, 4, 1)),
        ({"trainer.gpus": None, "topology.min_gpus_per_process": 2}, (1, 2, 2), (2, 4, 2)),
        (SHARED, (1, 1, 1), (3, 1, 1)),
    ],
)
def test_processes_get_the_runs_number_of_gpus(
    changes: dict[str, Any], one: tuple[int, ...], many: tuple[int, ...]
) -> None:
    asked = request(changes)
    topology, processes, size = parity_job_module.check_setup(asked)
    found = []
    for number in (1, processes):
        config = parity_job_module.training(
            asked, topology, global_batch_size=size, processes=number, moves=False
        ).config
        found.append((config.topology.procs_per_node, config.trainer.gpus, config.topology.gpus_per_process))
    assert found == [one, many]


@pytest.mark.usefixtures("gpus")
def test_missing_gpus_and_external_ranks_are_refused() -> None:
    with pytest.raises(TopologyError, match=r"8 GPUs; there are 4\.\nUse fewer \(parity\.processes\)"):
        parity_job_module.check_setup(request({"trainer.gpus": 2, "parity.processes": 8}))
    place = detect({**TORCHRUN, "MASTER_ADDR": "node0", "MASTER_PORT": "29500"})
    assert place is not None
    with pytest.raises(ConfigError, match="without torchrun or srun"):
        parity_job_module.check_setup(request({}, external_ranks=ExternalRanks(place, [])))


def test_a_training_differs_only_in_what_is_compared() -> None:
    changes = {
        "callbacks": {"mine": {"_target_": "recipes.some.Callback"}},
        "strategy": {"_target_": "framework.strategies.FSDP", "mp_policy": {"param_dtype": "bf16"}},
        "trainer.max_steps": 1000,
        "trainer.fast_dev_run": True,
        "checkpoint.monitor": "val/loss",
    }
    asked = request(changes | {"launcher.max_restarts": 3})
    before = repr(asked.raw)
    topology, _, size = parity_job_module.check_setup(asked)
    made = parity_job_module.training(asked, topology, global_batch_size=size, processes=2, moves=True)
    config = made.config
    assert repr(asked.raw) == before
    assert parse(made.raw) == config
    mine, recording = config.callbacks
    assert mine == "mine"
    # Rounding is that of the format in which the strategy computes.
    assert config.callbacks[recording]["precision"] == "bf16-mixed"
    # Schedules keep their length.
    assert config.trainer.max_steps == 1000
    assert (config.trainer.fast_dev_run, config.trainer.limit_val_batches) == (False, 0)
    assert (config.checkpoint.enabled, config.logger, config.launcher.max_restarts) == (False, {}, 0)
    assert (config.model, config.optimizer, config.seed) == (asked.config.model, asked.config.optimizer, 0)


# What it says

# Importing rich draws a random number.
pytestmark = pytest.mark.usefixtures("own_state")

WORST = {"name": "fc.weight", "rank": 2, "difference": 0.4, "allowed": 2e-5, "rounding": 3e-6}
LAYER = {
    "name": "norm",
    "type": "BatchNorm1d",
    "kind": "output",
    "inside": "",
    "drew": False,
    "before": None,
    "rank": 0,
    "difference": 0.31,
    "allowed": 2e-5,
    "rounding": 3e-6,
}


def answer(allowed: float = 2e-5, **changes: Any) -> dict[str, Any]:
    worst = {**WORST, "difference": 3e-7, "step": 2, "allowed": allowed}
    parts: dict[str, Any] = {part: {"compared": 4, "greatest": worst} for part in ("layers", "gradients", "weights")}
    parts["buffers"] = {"compared": 0, "greatest": None}
    same = {
        "same": True,
        "processes": 4,
        "steps": 3,
        "model": "Net",
        "dropouts": 0,
        "parts": parts,
    }
    return {**same, "unsure": [], "first_difference": None, **changes}


@pytest.mark.parametrize(
    ("found", "parts"),
    [
        (answer(), ["The same: Net gets the same weights from 1 process and from 4 in 3 steps"]),
        (answer(dropouts=2), ["switched off in 2 modules"]),
        (answer(unsure=["k.bias"]), ["1 parameter can't be compared", "k.bias"]),
        (answer(0.7), ["gets the same gradients", "rounding is as large as the weights' changes"]),
        (answer(same=False), ["rounding is as large as the gradients", "trainer.precision=32-true"]),
    ],
)
def test_an_answer_says_no_more_than_was_sure(found: dict[str, Any], parts: list[str]) -> None:
    printed = render_parity(found)
    assert [part for part in parts if part not in printed] == [], printed


def test_every_reason_says_what_to_do() -> None:
    counted = {"number": 3, "first": WORST}
    first_difference = {"step": 1, "layer": LAYER, "parts": {"gradients": counted}}
    first_difference |= {"shares": [6, 5, 5], "module": "norm", "factor": 0.25, "names": ["a", "b", "c", "d"]}
    advice = set()
    for reason in CAUSES:
        printed = render_parity(answer(same=False, first_difference=first_difference | {"reason": reason}))
        for part in ("the output of norm (BatchNorm1d): 0.31 off", "first fc.weight, 0.4 off on rank 2"):
            assert part in printed
        advice.add(printed.partition("Probably:")[2])
    assert len(advice) == len(CAUSES)

"""What `job=parity` asks of its trainings, and what it refuses; the comparison itself is in tests/unit/parity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from framework.config.parse import parse
from framework.errors import ConfigError, TopologyError
from framework.jobs import parity
from framework.jobs.request import Place, Request
from framework.launch.environment import detect
from framework.launch.leader import Leader
from tests.unit.config.raw import raw_config

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
CPU = {"job": "parity", "trainer.gpus": 0}


def request(changes: dict[str, Any], **others: Any) -> Request:
    raw = raw_config({**CPU, **changes})
    return Request(parse(raw), raw, overrides=(), **others)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of them."""
    for module in ("framework.jobs.parity", "framework.jobs.choosing", "framework.hardware"):
        monkeypatch.setattr(f"{module}.count_gpus", lambda: 4)


@pytest.mark.parametrize(
    ("changes", "processes", "size"),
    [
        ({}, 2, 4),
        ({"topology.procs_per_node": 3}, 3, 12),
        ({"topology.procs_per_node": 3, "parity.processes": 2}, 2, 12),
        ({"trainer.accumulate_grad_batches": 2}, 2, 8),
        ({"data.global_batch_size": 30, "parity.processes": 7}, 7, 30),
    ],
)
def test_processes_and_the_global_batch_are_the_runs(changes: dict[str, Any], processes: int, size: int) -> None:
    setting = parity.check_setting(request(changes))
    assert (setting.processes, setting.global_batch_size) == (processes, size)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("changes", "one", "many"),
    [
        ({"trainer.gpus": None}, (1, 1, 1), (4, 4, 1)),
        ({"trainer.gpus": 1}, (1, 1, 1), (2, 2, 1)),
        ({"trainer.gpus": None, "topology.min_gpus_per_process": 2}, (1, 2, 2), (2, 4, 2)),
        (
            {"trainer.gpus": 1, "topology.share_gpus": True, "topology.gpus_per_process": 1, "parity.processes": 3},
            (1, 1, 1),
            (3, 1, 1),
        ),
    ],
)
def test_who_gets_which_gpus(changes: dict[str, Any], one: tuple[int, ...], many: tuple[int, ...]) -> None:
    asked = request(changes)
    setting = parity.check_setting(asked)
    found = []
    for processes in (1, setting.processes):
        config = parity.training(asked, setting, place=Place(Path(), processes), moves=False).config
        found.append((config.topology.procs_per_node, config.trainer.gpus, config.topology.gpus_per_process))
    assert found == [one, many]
    topology = parity.check(asked)
    assert (topology.procs_per_node, topology.gpus_per_node, topology.span) == many


@pytest.mark.usefixtures("gpus")
def test_too_few_gpus_are_said_with_what_to_do() -> None:
    with pytest.raises(TopologyError, match=r"8 GPUs; there are 4\.\nUse parity\.processes=4, or let them share"):
        parity.check_setting(request({"trainer.gpus": 2, "parity.processes": 8}))


def test_rounding_is_that_of_the_format_that_is_computed_in() -> None:
    for policy, name in (
        ({"param_dtype": "bf16"}, "bf16-mixed"),
        ({"reduce_dtype": None}, "32-true"),
        (None, "32-true"),
    ):
        asked = request({"strategy": {"_target_": "framework.strategies.FSDP", "mp_policy": policy}})
        made = parity.training(asked, parity.check_setting(asked), place=Place(Path(), 2), moves=False)
        assert made.config.callbacks["parity_recording"]["precision"] == name


def test_a_training_is_the_users_own_but_for_what_is_compared() -> None:
    mine = {"_target_": "recipes.some.Callback"}
    asked = request(
        {
            "callbacks": {"mine": mine},
            "trainer.max_steps": 1000,
            "trainer.fast_dev_run": True,
            "checkpoint.monitor": "val/loss",
            "launcher.max_restarts": 3,
        }
    )
    before = repr(asked.raw)
    setting = parity.check_setting(asked)
    made = parity.training(asked, setting, place=Place(Path("folder"), 2), moves=True)
    config = made.config
    assert repr(asked.raw) == before
    assert parse(made.raw) == config
    assert list(config.callbacks) == ["mine", "parity_recording"]
    recording = config.callbacks["parity_recording"]
    assert (recording["steps"], recording["moves_weights"], recording["precision"]) == (3, True, "32-true")
    assert config.trainer.max_steps == 1000  # what schedules are as long as
    assert (config.trainer.fast_dev_run, config.trainer.log_every_n_steps) == (False, 1)
    assert (config.trainer.limit_val_batches, config.trainer.limit_test_batches) == (0, 0)
    assert (config.checkpoint.enabled, config.checkpoint.monitor, config.logger) == (False, None, {})
    assert config.launcher.max_restarts == 0
    assert (config.model, config.optimizer, config.seed) == (asked.config.model, asked.config.optimizer, 0)


@pytest.mark.parametrize(
    ("changes", "others", "part"),
    [
        ({}, {"place": Place(Path(), 0)}, "can't go with a sweep"),
        ({"topology.nnodes": 2}, {}, "Use topology.nnodes=1"),
        ({"launcher.name": "in_place"}, {}, "Use launcher=local"),
        ({"parity.processes": 5}, {}, "less than one sample for each of the 5 forward"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], others: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        parity.check(request(changes, **others))


def test_processes_that_something_else_has_started_are_refused() -> None:
    place = detect({**TORCHRUN, "MASTER_ADDR": "node0", "MASTER_PORT": "29500"})
    assert place is not None
    with pytest.raises(ConfigError, match="torchrun has started these"):
        parity.check(request({}, leader=Leader(place, [])))

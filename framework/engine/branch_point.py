"""What a run takes over from the checkpoint at which it branches off another run, whatever its configuration changes.

A resume refuses changes with which it wouldn't be exact. At the branch point they are allowed: what no longer fits
begins from scratch, everything else is restored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from framework.checkpoint.layout import step_name
from framework.config.nested import is_equal
from framework.distributed.collectives import broadcast_object
from framework.engine.changed_settings import check_optimizer
from framework.engine.setup import RankSetup
from framework.errors import ConfigError
from framework.system.rank_log import warn
from framework.training.trainer import Trainer


def is_branch_point(setup: RankSetup, checkpoint: Path) -> bool:
    """Return True if a checkpoint is the one at which this run branches off another. Every rank must call it."""
    answer = False
    if setup.context.is_main:
        branch = setup.run_dir.read_run().get("branch_of")
        answer = branch is not None and checkpoint.name == step_name(branch["step"])
    is_point: bool = broadcast_object(answer, setup.context)
    return is_point


def with_changes(
    trainer: Trainer, training: Mapping[str, Any], *, now: Mapping[str, Any], before: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the `training` part of the other run's checkpoint as this run can load it.

    Args:
        trainer: as it was built: nothing has been restored but weights.
        now: the configuration of this run, as it is written.
        before: that of the checkpoint.
    """
    state = trainer.state
    adapted = dict(training)
    reset = []
    is_optimizer_kept = _is_optimizer_kept(now, before)
    if not is_optimizer_kept:
        adapted["optimizer"] = state.optimizer.state_dict()
        reset.append("the state of the optimizer")

    is_schedule_kept = all(is_equal(now[name], before[name]) for name in ("scheduler", "optimizer"))
    if not is_optimizer_kept or not is_schedule_kept or not state.schedule.fits(training["schedule"]):
        # As if settings and schedule had been these from the first step.
        progress = training["progress"]
        state.schedule.begin_at(steps=progress["step"], epochs=progress["epoch"])
        adapted["schedule"] = state.schedule.state_dict()
        groups = state.optimizer.state_dict()["param_groups"]
        adapted["optimizer"] = {**adapted["optimizer"], "param_groups": groups}

    if now["trainer"]["precision"] != before["trainer"]["precision"]:
        adapted["scaler"] = state.precision.scaler.state_dict()
    if now["task"].get("_target_") != before["task"].get("_target_"):
        adapted.pop("task", None)
        reset.append("the state of the task")

    callbacks = {}
    for name, callback_state in training["callbacks"].items():
        if _target_of(now["callbacks"], name) == _target_of(before["callbacks"], name):
            callbacks[name] = callback_state
    adapted["callbacks"] = callbacks

    is_data_kept = is_equal(_without_skips(now["data"]), _without_skips(before["data"]))
    if "data" in training and (not is_data_kept or now["seed"] != before["seed"]):
        adapted |= _at_place_in_data(trainer, training)
    if reset and trainer.context.is_main:
        warn(f"At the branch point, {' and '.join(reset)} begins from scratch")
    return adapted


def _at_place_in_data(trainer: Trainer, training: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `training` that say where in the train data to go on.

    The position in the epoch stays, although other samples may be there. With data of another size, the next epoch
    begins.
    """
    saved = training["data"]
    size = trainer.train_loader.identity.size
    if saved["size"] == size:
        return {"data": {**saved, "order": None, "sketch": None}}
    progress = dict(training["progress"])
    if progress["samples"] > 0:
        progress |= {"epoch": progress["epoch"] + 1, "samples": 0, "nominal_samples": 0}
        if trainer.context.is_main:
            warn("The train data has another size than before the branch point, so the next epoch begins")
    return {"data": {**saved, "size": size}, "progress": progress, "streams": []}


def _without_skips(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section without the keys that only leave samples out."""
    return {key: value for key, value in data.items() if key not in ("skip_steps", "defer_steps")}


def _is_optimizer_kept(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Return True if the optimizer's state is of the same class and the same groups."""
    try:
        check_optimizer(now["optimizer"], before["optimizer"])
    except ConfigError:
        return False
    return True


def _target_of(section: Mapping[str, Any], name: str) -> Any:
    """Return the class of an entry of a section; None if there is none."""
    return (section.get(name) or {}).get("_target_")

"""Read a checkpoint of Lightning's, to continue its training here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from framework.errors import CheckpointError
from framework.optim.schedule import with_calls
from framework.types import InitialTraining

_NEEDED = ("optimizer_states", "lr_schedulers", "loops", "global_step")
_REMEDY = "Leave out init.training to load weights only."


def read_initial_training(
    content: Mapping[str, Any], *, source: Path, trainer: Any, is_manual: bool
) -> InitialTraining:
    """Return how to continue the training of a checkpoint. Raises CheckpointError if that can't be done exactly.

    Args:
        trainer: the view with the optimizers and schedules of this run.
        is_manual: the module steps its optimizers itself, which Lightning counts as steps.
    """
    missing = [name for name in _NEEDED if name not in content]
    if missing:
        raise CheckpointError(
            f"{source} has no {', '.join(missing)}: it isn't a checkpoint of Lightning's, or one with the weights only "
            f"(save_weights_only).\n{_REMEDY}"
        )
    if "averaging_state" in content:
        raise CheckpointError(
            f"{source} was saved with Lightning's WeightAveraging, and its average can't be continued here.\n{_REMEDY}"
        )
    fit_loop = content["loops"]["fit_loop"]
    epochs = fit_loop["epoch_progress"]["total"]
    if epochs["processed"] < epochs["started"]:
        raise CheckpointError(
            f"{source} was saved within an epoch, and Lightning doesn't say which samples are left of it.\nUse one "
            f"that was saved at the end of an epoch. {_REMEDY}"
        )
    configs = trainer.lr_scheduler_configs
    has_plateau = any(isinstance(config.scheduler, ReduceLROnPlateau) for config in configs)
    if has_plateau and not is_manual and epochs["completed"] < epochs["processed"]:
        raise CheckpointError(
            f"{source} was saved before its ReduceLROnPlateau had stepped after the epoch.\nUse what "
            f"trainer.save_checkpoint(path) saves after Trainer.fit. {_REMEDY}"
        )
    optimizers = content["optimizer_states"]
    if len(optimizers) != len(trainer.optimizers) or len(content["lr_schedulers"]) != len(configs):
        raise CheckpointError(
            f"{source} has {len(optimizers)} optimizers and {len(content['lr_schedulers'])} schedules, and this run "
            f"has {len(trainer.optimizers)} and {len(configs)} of the module.\nUse optimizer=lightning and "
            f"scheduler=lightning, with configure_optimizers as it was. {_REMEDY}"
        )

    epoch = epochs["processed"]
    step = content["global_step"]
    if is_manual:
        step = fit_loop["epoch_loop.batch_progress"]["total"]["processed"]
    schedules = []
    for config, state in zip(configs, content["lr_schedulers"], strict=True):
        length = getattr(config.scheduler, "total_steps", None)
        saved_length = state.get("total_steps")
        if length != saved_length:
            raise CheckpointError(
                f"{source} has a {type(config.scheduler).__name__} of {saved_length} steps, and this run has one of "
                f"{length}: it can't be stretched.\nUse trainer.max_epochs of the whole training, as Lightning had it. "
                f"{_REMEDY}"
            )
        calls = epoch if config.interval == "epoch" else step
        schedules.append(with_calls(state, calls))
    return InitialTraining(epoch, step, optimizers, schedules)

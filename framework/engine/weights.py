"""Load the weights of a checkpoint, or of another file, into a model that isn't trained yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from typing import Any

from torch import nn

from framework.checkpoint import LocalStorage, find, find_damage, find_weights, load
from framework.checkpoint.layout import part_file
from framework.checkpoint.lookup import describe_others
from framework.checkpoint.reader import load_weights, read_training
from framework.checkpoint.replicas import mean_task_state
from framework.checkpoint.weights_file import copy_what_fits, load_what_fits, read_weights
from framework.config.renamed import with_present_names
from framework.config.schema import Config, InitConfig
from framework.config.targets import takes
from framework.config.yaml_files import load_yaml
from framework.distributed.context import Context
from framework.distributed.sharded import is_model_sharded
from framework.errors import CheckpointError
from framework.remote.weights import weights_path
from framework.system.rank_log import logger, show
from framework.training.content_hash import hash_of
from framework.training.task_state import with_model_state
from framework.training.train_state import LEFT_OUT
from framework.types import Task, hooks


def load_model(
    model: nn.Module, path: Path, *, context: Context, rebuild: Callable[[], nn.Module] | None = None
) -> Path:
    """Load only the weights of a checkpoint into the bare model. Every rank must call it.

    Args:
        path: a run, or one of its checkpoints.
        rebuild: as in `complete_weights`.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: it is missing, damaged or of another model.
    """
    directory = find(path)
    if not is_model_sharded(model):
        checkpoint = load(directory, map_location=context.device, parts=["model"])
        weights = complete_weights(model, checkpoint["model"], directory, rebuild=rebuild)
        load_weights(model, weights, source=directory)
        return directory

    # Takes most of a second to import.
    from framework.checkpoint.sharded_state import load_sharded

    damage = find_damage(directory, rank=context.rank, world_size=context.world_size)
    if damage is not None:
        raise CheckpointError(f"The checkpoint {directory} is damaged: {damage}.\n{describe_others(directory)}")
    load_sharded(directory, model)
    return directory


def load_initial_weights(model: nn.Module, config: Config, *, context: Context) -> str | None:
    """Load the weights of `init_from` into the bare model, as `init` says. Every rank must call it.

    Returns:
        The names that were loaded and those that weren't, which rank 0 has shown; None for a checkpoint of ours that
        goes into a sharded model as it is.

    Raises:
        CheckpointError: the weights can't be read or don't fit.
        ConfigError: no name matches a pattern of `init`.
    """
    path = weights_path(str(config.init_from), cache=config.path.cache)
    weight_files = find_weights(path)
    if weight_files is not None:
        state = read_weights(weight_files)
    elif is_model_sharded(model) and config.init == InitConfig():
        # Each rank reads no more than its shards.
        load_model(model, path, context=context)
        return None
    else:
        path = find(path)
        saved = load(path, map_location="cpu", parts=["model"])["model"]
        state = dict(complete_weights(model, saved, path))

    loaded = load_what_fits(model, state, config.init, source=path, context=context)
    text = loaded.describe(shown=None)
    if context.is_main:
        logger.info("%s", text)
        show(loaded.describe())
    return text


# The task


def load_for_task(model: nn.Module, config: Config) -> None:
    """Load the weights of `init_from` if the task's constructor takes the model, which it may copy.

    A momentum encoder or a reference model then begins with them, in a resumed run and an evaluation, too. The task may
    also change the model, so whatever doesn't fit yet is left to `load_initial_weights`, which all strategies call
    later.
    """
    if config.init_from is None or not takes(config.task, "model"):
        return
    path = weights_path(str(config.init_from), cache=config.path.cache)
    weight_files = find_weights(path)
    if weight_files is not None:
        state: Mapping[str, Any] = read_weights(weight_files)
    else:
        path = find(path)
        state = load(path, map_location="cpu", parts=["model"])["model"]
    copy_what_fits(model, state, config.init, source=path)


def load_task(task: Task, model: nn.Module, directory: Path) -> None:
    """Load the task's state of a checkpoint, such as a momentum encoder, once the model has its weights.

    Of states that differ between ranks, every rank gets the same one. Raises CheckpointError if the file is missing or
    damaged.
    """
    load_hooks = hooks([task], "load_state_dict")
    if not load_hooks:
        return
    storage, checkpoint = LocalStorage.of(directory)
    storage.check_file(checkpoint, part_file("training"), storage.read_manifest(checkpoint))
    training = read_training(directory)
    # Earlier versions saved none.
    if "task" in training:
        state = mean_task_state(training)
        for load_state in load_hooks:
            load_state(with_model_state(state, task, model))


def is_task_of(directory: Path, config: Config) -> bool:
    """Return True if the configuration has the kind of task that the checkpoint was saved with."""
    saved = with_present_names(load_yaml(directory / "config.yaml"))
    is_same: bool = saved["task"]["_target_"] == config.task["_target_"]
    return is_same


# What checkpoints leave out: checkpoint.only_trained


def is_partial(directory: Path) -> bool:
    """Return True if the checkpoint holds only what was trained. Reads no tensors."""
    return bool(read_training(directory).get(LEFT_OUT))


def loads_before_adapters(config: Config, checkpoint: Path | None) -> bool:
    """Return True if `init_from` is loaded when the model is built, before its adapters are added.

    That is so for a new run with adapters, and whenever checkpoints leave out what isn't trained. Otherwise a new run
    loads it into the wrapped model, of which each rank may have a part, and a resumed run doesn't need it.

    checkpoint: the one that will be restored; None for a new run.
    """
    if config.init_from is None:
        return False
    if config.checkpoint.only_trained:
        return True
    if checkpoint is None:
        return config.peft is not None
    return is_partial(checkpoint)


def complete_weights(
    model: nn.Module, state: Mapping[str, Any], directory: Path, *, rebuild: Callable[[], nn.Module] | None = None
) -> Mapping[str, Any]:
    """Return the weights of a checkpoint, with those that it leaves out as `model` has them.

    Args:
        model: not sharded.
        state: the checkpoint's weights.
        directory: the checkpoint.
        rebuild: builds the model again, for one that has been trained since; None: `model` is as it was built.

    Raises:
        CheckpointError: what the checkpoint leaves out differs from what the run began with.
    """
    if state.keys() >= model.state_dict().keys():
        return state
    left_out = read_training(directory).get(LEFT_OUT, {})
    own = model.state_dict()
    changed = _changed(left_out, own)
    if changed and rebuild is not None:
        own = rebuild().state_dict()
        changed = _changed(left_out, own)
    if changed:
        raise CheckpointError(
            f"The checkpoint {directory} holds only what was trained (checkpoint.only_trained), and {len(changed)} of "
            f"the {len(left_out)} frozen tensors, such as {changed[0]}, aren't built here as the run began with them.\n"
            "Use the run's configuration, with the same init_from and seed, and what these files held then. To start "
            "another run from the trained model, write all of its weights: job=export checkpoint.path=…"
        )
    # A copy has the versions that a module's state has as an attribute.
    whole: Any = copy(state)
    for name in left_out:
        whole[name] = own[name]
    completed: Mapping[str, Any] = whole
    return completed


def _changed(hashes: Mapping[str, str], state: Mapping[str, Any]) -> list[str]:
    """Return the names whose tensors have another hash, or are missing."""
    changed = []
    for name, value in hashes.items():
        if name not in state or hash_of(state[name].detach()) != value:
            changed.append(name)
    return changed

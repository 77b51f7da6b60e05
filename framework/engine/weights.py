"""Load the weights of a checkpoint, or of another file, into a model that isn't trained yet."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from framework.checkpoint import find, find_damage, find_weights, load
from framework.checkpoint.lookup import describe_others
from framework.checkpoint.reader import load_weights
from framework.checkpoint.weights_file import load_what_fits, read_weights
from framework.config.schema import Config, InitConfig
from framework.distributed.context import Context
from framework.distributed.sharded import is_model_sharded
from framework.errors import CheckpointError
from framework.system.rank_log import logger, show


def load_model(model: nn.Module, path: Path, *, context: Context) -> Path:
    """Load only the weights of a checkpoint into the bare model. Every rank must call it.

    Args:
        path: a run, or one of its checkpoints.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: it is missing, damaged or of another model.
    """
    directory = find(path)
    if not is_model_sharded(model):
        checkpoint = load(directory, map_location=context.device, parts=["model"])
        load_weights(model, checkpoint["model"], source=directory)
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
    path = Path(str(config.init_from))
    weight_files = find_weights(path)
    if weight_files is not None:
        state = read_weights(weight_files)
    elif is_model_sharded(model) and config.init == InitConfig():
        # Each rank reads no more than its shards.
        load_model(model, path, context=context)
        return None
    else:
        path = find(path)
        state = load(path, map_location="cpu", parts=["model"])["model"]

    loaded = load_what_fits(model, state, config.init, source=path, context=context)
    text = loaded.describe(shown=None)
    if context.is_main:
        logger.info("%s", text)
        show(loaded.describe())
    return text

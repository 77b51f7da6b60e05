"""A checkpoint into a model that is spread over ranks, whatever the checkpoint was of: each rank takes its part.

The other way, into a model that isn't spread, is `framework.checkpoint.load`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from framework.checkpoint.lookup import read_manifest
from framework.checkpoint.replicas import mean_training
from framework.checkpoint.spread import load_model, read_optimizer, spread_optimizer
from framework.checkpoint.store import load, load_unspread
from framework.checkpoint.weights import load_weights


def load_spread_model(directory: Path, model: nn.Module) -> None:
    """Only the weights of a step directory, those to evaluate. Exchanges nothing.

    Shards are taken to be as they were written (see `check_shards`). Raises CheckpointError where something can't be
    read, or the weights are another model's.
    """
    manifest = read_manifest(directory)
    if manifest.is_sharded:
        load_model(directory, manifest, load_unspread(directory, manifest, parts=["training"])["training"], model=model)
    else:
        load_weights(model, load(directory, map_location="cpu", parts=["model"])["model"], source=directory)


def load_spread(directory: Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The weights to train on into the model; gives `training` and `generators`, the first with the optimizer's state.

    That state is each rank's part, as `optimizer.load_state_dict` takes it. Otherwise as `load_spread_model`.
    """
    manifest = read_manifest(directory)
    if not manifest.is_sharded:
        state = load(directory, map_location="cpu")
        training = mean_training(state["training"])
        load_weights(model, training.get("model", state["model"]), source=directory)
        return {**state, "training": {**training, "optimizer": spread_optimizer(training["optimizer"], optimizer)}}
    state = load_unspread(directory, manifest, parts=["training", "generators"])
    training = state["training"]
    load_model(directory, manifest, training, model=model)
    own = read_optimizer(directory, manifest, training, optimizer=optimizer)
    return {**state, "training": {**training, "optimizer": own}}

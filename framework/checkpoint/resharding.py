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
from framework.checkpoint.staged import numbers_of, own_entries, own_optimizer
from framework.checkpoint.store import load, load_unspread
from framework.checkpoint.weights import load_weights
from framework.distributed.stages import layout_of


def load_spread_model(directory: Path, model: nn.Module) -> None:
    """Only the weights of a step directory, those to evaluate. Exchanges nothing.

    Shards are taken to be as they were written (see `check_shards`). Raises CheckpointError where something can't be
    read, or the weights are another model's.
    """
    manifest = read_manifest(directory)
    if manifest.is_sharded:
        load_model(directory, manifest, load_unspread(directory, manifest, parts=["training"])["training"], model=model)
    else:
        weights = load(directory, map_location="cpu", parts=["model"])["model"]
        load_weights(model, own_entries(model, weights), source=directory)


def load_spread(directory: Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The weights to train on into the model; gives `training` and `generators`, the first with the optimizer's state.

    That state is each rank's part, as `optimizer.load_state_dict` takes it. Otherwise as `load_spread_model`, but that
    ranks with stages of the model tell each other of their optimizers: every rank must call it.
    """
    manifest = read_manifest(directory)
    numbers = None if layout_of(model) is None else numbers_of(model, optimizer)
    if not manifest.is_sharded:
        state = load(directory, map_location="cpu")
        training = mean_training(state["training"])
        load_weights(model, own_entries(model, training.get("model", state["model"])), source=directory)
        whole = training["optimizer"]
        if numbers is None:
            part = spread_optimizer(whole, optimizer)
        else:
            part = own_optimizer(whole, {}, numbers=numbers, own=optimizer)
        return {**state, "training": {**training, "optimizer": part}}
    state = load_unspread(directory, manifest, parts=["training", "generators"])
    training = state["training"]
    load_model(directory, manifest, training, model=model)
    own = read_optimizer(directory, manifest, training, optimizer=optimizer, numbers=numbers)
    return {**state, "training": {**training, "optimizer": own}}

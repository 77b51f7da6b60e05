"""Write a LightningModule as a checkpoint of Lightning's, which `load_from_checkpoint` and `Trainer.fit` read."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from framework.checkpoint.reader import read_training
from framework.checkpoint.sharded_state import NOTE
from framework.errors import ConfigError
from framework.jobs.export.source import Source
from framework.optim.schedule import scheduler_states
from framework.optim.several import split_state
from framework.tasks.lightning import LightningTask

_OPTIMIZER = "framework.tasks.lightning.configure_optimizers"


def write_lightning(source: Source, path: Path) -> list[tuple[str, str]]:
    """Write the file; return what to print about it, names and texts. Raises ConfigError for another model."""
    if not isinstance(source.task, LightningTask):
        raise ConfigError(
            f"export.format=lightning is for a LightningModule with task=lightning, and {source.name} isn't one.\n"
            "Use export.format=state_dict or safetensors."
        )
    module: Any = source.model
    training = read_training(source.directory)
    progress = training["progress"]
    own_state = training["task"]["ranks"][0]
    package = source.task.package

    checkpoint: dict[str, Any] = {
        "epoch": progress["epoch"],
        "global_step": own_state.get("global_step", progress["step"]),
        "pytorch-lightning_version": import_module(package).__version__,
        "state_dict": module.state_dict(),
        "hyper_parameters": dict(module.hparams),
        "loops": _loops(package, training, accumulated=source.config.trainer.accumulate_grad_batches),
    }
    if hasattr(module, "_hparams_name"):
        checkpoint["hparams_name"] = module._hparams_name
    if training["scaler"]:
        checkpoint["MixedPrecision"] = training["scaler"]
    checkpoint |= _averages(training)
    kept = own_state.get("kept", {})
    # What on_save_checkpoint has added, which on_load_checkpoint expects.
    checkpoint |= kept.get("added", {})
    checkpoint |= kept.get("datamodule", {})
    checkpoint["callbacks"] = kept.get("callbacks", {})

    has_optimizers = source.config.optimizer.get("_target_") == _OPTIMIZER and NOTE not in training
    if has_optimizers:
        checkpoint["optimizer_states"] = split_state(training["optimizer"], own_state["optimizer_groups"])
        checkpoint["lr_schedulers"] = scheduler_states(training["schedule"])
    torch.save(checkpoint, path)

    tensors = [value for value in checkpoint["state_dict"].values() if isinstance(value, torch.Tensor)]
    numbers = sum(tensor.numel() for tensor in tensors)
    facts = [("tensors", f"{len(tensors)}, of {numbers:,} numbers")]
    if has_optimizers:
        facts.append(("training", f"the state of epoch {progress['epoch']}, step {progress['step']:,}"))
    else:
        facts.append(("training", "weights only: the optimizer isn't the module's, or its state is sharded"))
    return facts


def _averages(training: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of Lightning's WeightAveraging: the weights to train on, if `state_dict` has an average."""
    for state in training["callbacks"].values():
        if "num_averaged" in state and "model" in training:
            number = torch.tensor(state["num_averaged"])
            return {"current_model_state": training["model"], "averaging_state": {"n_averaged": number}}
    return {}


def _loops(package: str, training: Mapping[str, Any], *, accumulated: int) -> dict[str, Any]:
    """Return the progress of Lightning's loops, in the form of the installed version, as after `Trainer.fit`.

    After the last step of an epoch that epoch is done. Lightning itself doesn't go back to a place within one.
    """
    progress = training["progress"]
    own_state = training["task"]["ranks"][0]
    epochs = progress["epoch"]
    is_epoch_end = progress["samples"] == 0
    steps = own_state.get("global_step", progress["step"])
    batches = own_state["batches"]

    # Otherwise it logs the devices and advice on its arguments.
    logging.getLogger(package).setLevel(logging.ERROR)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = import_module(package).Trainer(accelerator="cpu", devices=1, **quiet)
    loops = {name: getattr(trainer, name).state_dict() for name in ("fit_loop", "validate_loop", "test_loop")}
    loops["predict_loop"] = trainer.predict_loop.state_dict()

    fit = loops["fit_loop"]
    fit["epoch_loop.state_dict"]["_batches_that_stepped"] = progress["step"]
    _set(fit["epoch_loop.batch_progress"], current=batches, total=progress["step"] * accumulated)
    fit["epoch_loop.batch_progress"]["is_last_batch"] = is_epoch_end
    fit["epoch_loop.val_loop.batch_progress"]["is_last_batch"] = is_epoch_end
    optimizer = fit["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    if "global_step" in own_state:
        _set(fit["epoch_loop.manual_optimization.optim_step_progress"], current=steps, total=steps)
    else:
        _set(optimizer["step"], current=batches // accumulated, total=steps)
        _set(optimizer["zero_grad"], current=batches // accumulated, total=steps)
    _set(fit["epoch_progress"], current=epochs, total=epochs)
    if not is_epoch_end:
        for counts in (fit["epoch_progress"]["current"], fit["epoch_progress"]["total"]):
            counts["ready"] = epochs + 1
            counts["started"] = epochs + 1
    return loops


def _set(progress: dict[str, Any], *, current: int, total: int) -> None:
    """Set all counts of a progress."""
    progress["current"] = dict.fromkeys(progress["current"], current)
    progress["total"] = dict.fromkeys(progress["total"], total)

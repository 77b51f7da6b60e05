"""Whether the disk has room for a run's checkpoints, asked before its first step instead of hours later."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from framework import build
from framework.checkpoint.lookup import complete_steps
from framework.checkpoint.room import free_bytes, in_megabytes
from framework.config.schema import CheckpointConfig
from framework.distributed.collectives import gather_to_all
from framework.distributed.stages import num_parameters
from framework.errors import RunError
from framework.footprint import rough_checkpoint_bytes
from framework.progress import hooks
from framework.rank_log import logger
from framework.session import Rank
from framework.trainer import Trainer
from framework.types import gradients_kept, replicas_differ, weight_copies


def check_room(rank: Rank, trainer: Trainer) -> None:
    """Warn where the disk hasn't room for as many checkpoints as are kept at the same time.

    Every rank must call it, rank 0 looks. Raises RunError, the same on every rank, where not even one fits.
    """
    if not rank.config.checkpoint.enabled:
        return
    error = gather_to_all(_look(rank, trainer) if rank.context.is_main else None, rank.context)[0]
    if error is not None:
        raise RunError(error)


def _look(rank: Rank, trainer: Trainer) -> str | None:
    """What to raise; warns on its own."""
    folder = rank.run_dir.checkpoints
    free = free_bytes(folder)
    if free is None:
        return None
    existing = [manifest for _, manifest in complete_steps(folder).values()]
    if existing:  # of the same training: about as large as those to come
        one = sum(facts.size_bytes for facts in existing[-1].files.values())
    else:
        one = _estimated_bytes(rank, trainer)
    if free < one:
        return (
            f"There is no room for a checkpoint: one takes about {in_megabytes(one)}, and {in_megabytes(free)} are "
            f"free in {folder}.\nMake room, choose another disk with path.outputs=FOLDER, or train without "
            "checkpoints: checkpoint=none"
        )
    kept = _kept_at_once(rank.config.checkpoint)
    if free < one * (kept - len(existing)):
        text = (
            f"{in_megabytes(free)} are free in {folder}, and {kept} checkpoints of about {in_megabytes(one)} are there "
            "at the same time: the newest, the best ones and the one that is being written. Make room, or lower "
            "checkpoint.save_last_k or save_top_k: what doesn't fit isn't saved"
        )
        logger.warning(text)
        print(text, flush=True)
    return None


def _kept_at_once(settings: CheckpointConfig) -> int:
    """How many checkpoints there may be at a time; where all are kept, the fewest it can be."""
    best = max(settings.save_top_k, 0) if settings.monitor is not None else 0
    return best + settings.save_last_k + 1


def _estimated_bytes(rank: Rank, trainer: Trainer) -> int:
    model = trainer.parts.bare_model
    weights = {name: _whole(value) for name, value in model.state_dict().items()}
    estimate = partial(
        rough_checkpoint_bytes,
        weights,
        lambda parameters: build.build_optimizer(rank.config.optimizer, parameters),
        world_size=rank.context.world_size,
        averages=len(hooks(trainer.parts.callbacks.values(), "evaluation_weights")),
        replicas=rank.context.world_size if replicas_differ(rank.strategy) else 1,
        anchors=weight_copies(rank.strategy),
        gradients=gradients_kept(rank.strategy),
    )
    with torch.random.fork_rng(devices=[]):  # whatever the optimizer draws, training draws the same
        try:
            here = sum(each.numel() for each in model.parameters())
            return estimate(list(model.parameters())) * num_parameters(model) // max(here, 1)
        except Exception as error:  # the user's own may raise anything; training decides whether it works
            logger.info("the size of the optimizer's state isn't known before the first step: %r", error)
            return estimate([])


def _whole(value: Any) -> Any:
    """A tensor that is spread over ranks as one of its whole shape, which is what is saved."""
    if not isinstance(value, Tensor) or type(value) in (Tensor, nn.Parameter):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")

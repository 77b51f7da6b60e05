"""Resuming: which checkpoint, and what is restored from it."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from framework.checkpoint import LocalStorage, find, find_damage, load, manifest_or_none
from framework.checkpoint.layout import LAST, step_of
from framework.checkpoint.lookup import LastUndamaged, describe_others, last_undamaged
from framework.checkpoint.reader import load_weights
from framework.checkpoint.replicas import own_training
from framework.checkpoint.writer import point
from framework.config.renamed import with_present_names, without_removed
from framework.config.saved import load_written_config, load_yaml
from framework.distributed.collectives import barrier, broadcast_object, gather_to_all
from framework.distributed.seed import mix, restore_generator_states, seed_everything
from framework.distributed.sharded import is_model_sharded
from framework.engine.changed_settings import change_optimizers, check_optimizer_and_schedule
from framework.engine.setup import RankSetup
from framework.engine.weights import load_initial_weights
from framework.errors import CheckpointError, RunError
from framework.media import Text
from framework.system.rank_log import logger, warn
from framework.training.trainer import Trainer


def restore(setup: RankSetup, trainer: Trainer, own: LastUndamaged) -> None:
    """Load the run's own checkpoint (`resume`, or a restart), else the weights of `init_from`.

    own: what `own_checkpoint` has returned.
    """
    if own.directory is not None:
        _resume(setup, trainer, own.directory)
    elif setup.config.init_from is not None:
        loaded = load_initial_weights(trainer.state.bare_model, setup.config, context=setup.context)
        if loaded is not None:
            trainer.logbook.log_values({"init_from": Text(loaded)})
    if setup.config.resume is not None or own.damaged:
        barrier(setup.context)  # no rank has refused it
        if trainer.checkpoints is not None:
            steps = (step_of(directory.name) for directory, _ in own.damaged)
            damaged = [step for step in steps if step is not None]
            trainer.checkpoints.resume_from(trainer.progress.step, damaged=damaged)
        # A restart before the next checkpoint resumes here.
        if setup.context.is_main and own.directory is not None and step_of(own.directory.name) is not None:
            point(LocalStorage(setup.run_dir.checkpoints), LAST, step=trainer.progress.step)


def own_checkpoint(setup: RankSetup) -> LastUndamaged:
    """Return the checkpoint to resume from; none for a new run, or one that was stopped before its first checkpoint.

    It is the one that `resume` names; if that is the run directory, and in a restart, the last undamaged one. Its files
    are verified first. Every rank must call it. Raises RunError if this node doesn't have it, CheckpointError, the same
    on every rank, if it can't be used.
    """
    if setup.config.resume is None and not setup.attempt:
        return LastUndamaged(None)
    is_last = bool(setup.attempt) or Path(str(setup.config.resume)).resolve() == setup.run_dir.path.resolve()
    source = setup.run_dir.checkpoints if is_last else Path(str(setup.config.resume))
    context = setup.context
    # What is wrong with each checkpoint whose files were read; None for nothing.
    faults: dict[Path, str | None] = {}
    while True:
        # Rank 0 proposes a checkpoint, and every rank reads its share of the files. If it is damaged, rank 0 proposes
        # an earlier one or gives an error. If it is whole, rank 0 proposes it again, which ends the loop.
        proposed = _propose(source, faults, is_last=is_last) if context.is_main else None
        proposed = broadcast_object(proposed, context)
        if isinstance(proposed, str):
            raise CheckpointError(proposed)
        chosen: Path | None = proposed.directory
        if chosen is None or chosen in faults:
            break
        fault = None
        # A node with a disk of its own may not have it, which is refused below.
        if manifest_or_none(chosen) is not None:
            fault = find_damage(chosen, rank=context.rank, world_size=context.world_size)
        faults[chosen] = "; ".join(filter(None, gather_to_all(fault, context))) or None
    if chosen is not None and is_last:
        # Symlinks may lead elsewhere than on rank 0's node.
        chosen = (source / chosen.name).resolve()
    if chosen is not None and manifest_or_none(chosen) is None:
        raise RunError(
            f"Node {context.node_rank} ({socket.gethostname()}) doesn't have the checkpoint to resume from, "
            f"{chosen}.\nPut the run directory on a disk that all nodes share: path.outputs=FOLDER"
        )
    if context.is_main:
        for directory, text in proposed.damaged:
            warn(f"The checkpoint {directory} can't be used: {text}. An earlier one is used; nothing is deleted")
        if chosen is None:
            warn("There is no checkpoint yet: the run starts from scratch")
    return LastUndamaged(chosen, proposed.damaged)


def _propose(source: Path, faults: Mapping[Path, str | None], *, is_last: bool) -> LastUndamaged | str:
    """Return the checkpoint that `source` means, or an error's text.

    One that isn't in `faults` yet has only its sizes checked.
    """

    def damage(directory: Path) -> str | None:
        return faults[directory] if directory in faults else find_damage(directory, thorough=False)

    try:
        if is_last:
            return last_undamaged(source, find_damage=damage)
        directory = find(source)
        fault = damage(directory)
    except CheckpointError as error:
        return str(error)
    if fault is not None:
        return f"The checkpoint {directory} is damaged: {fault}.\n{describe_others(directory)}"
    return LastUndamaged(directory)


def _resume(setup: RankSetup, trainer: Trainer, source: Path) -> None:
    saved = without_removed(with_present_names(load_yaml(source / "config.yaml")))
    now = load_written_config(setup.run_dir)
    check_optimizer_and_schedule(setup.config, saved)
    model = trainer.state.bare_model
    if is_model_sharded(model):
        # Takes most of a second to import.
        from framework.checkpoint.sharded_state import load_sharded

        checkpoint = load_sharded(source, model, trainer.state.optimizer)
        training = checkpoint["training"]
    else:
        checkpoint = load(source, map_location=setup.context.device)
        differ = setup.strategy.replicas_differ
        training = own_training(checkpoint["training"], setup.context, replicas_differ=differ)
        # `training` has the weights to train on if a callback averages those in `model`.
        load_weights(model, training.get("model", checkpoint["model"]), source=source)
    # An earlier stop of a callback doesn't count if settings that may end training have changed.
    is_changed = any(now.get(key) != saved.get(key) for key in ("trainer", "callbacks"))
    if is_changed and training.get("stop", {}).get("reason"):
        training = {**training, "stop": {"reason": None, "wishes": []}}
    trainer.load_state_dict(training)
    change_optimizers(setup.config, saved, trainer.state)
    logger.info("resuming from %s", source)
    batch = setup.plan.global_batch_size
    before = training.get("global_batch_size", batch)
    if batch != before and setup.context.is_main:
        warn(f"A global batch has {batch} samples now, and had {before}: keep it with data.global_batch_size={before}")
    trainer.restore_generators = partial(
        _restore_generators, setup, checkpoint["generators"], step=trainer.progress.step
    )


def _restore_generators(setup: RankSetup, saved: Sequence[dict[str, Any]], *, step: int) -> None:
    """Restore every generator; with other ranks or devices than saved, seed them by seed, rank and step."""
    context = setup.context
    seed_everything(mix(setup.config.seed, "resumed on", context.world_size, step), rank=setup.seed_rank)
    if len(saved) != context.world_size:
        logger.warning(
            "the checkpoint is of %d ranks, this run has %d: random generators are seeded again",
            len(saved),
            context.world_size,
        )
    elif not restore_generator_states(saved[context.rank], devices=context.devices):
        logger.warning("the checkpoint is of other devices: their random generators are seeded again")

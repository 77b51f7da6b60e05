"""What is restored from the checkpoint that a run resumes from, and what a new run loads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from framework.checkpoint import LocalStorage, load
from framework.checkpoint.layout import LAST, step_of
from framework.checkpoint.lookup import LastUndamaged
from framework.checkpoint.reader import load_weights
from framework.checkpoint.replicas import own_training
from framework.checkpoint.writer import point
from framework.config.renamed import with_present_names, without_removed
from framework.config.written import load_written_config
from framework.config.yaml_files import load_yaml
from framework.distributed.collectives import barrier
from framework.distributed.seed import mix, restore_generator_states, seed_everything
from framework.distributed.sharded import is_model_sharded
from framework.engine.branch_point import is_branch_point, with_changes
from framework.engine.changed_settings import (
    change_optimizers,
    check_fold,
    check_optimizer,
    check_optimizer_and_schedule,
)
from framework.engine.initial_training import load_initial_training
from framework.engine.setup import RankSetup
from framework.engine.weights import complete_weights, load_initial_weights, loads_before_adapters
from framework.media import Text
from framework.system.rank_log import logger, warn
from framework.training.trainer import Trainer


def restore(setup: RankSetup, trainer: Trainer, checkpoint: LastUndamaged) -> None:
    """Load the run's own checkpoint (`resume`, or a restart), else the weights of `init_from`.

    checkpoint: what `own_checkpoint` has returned.
    """
    if checkpoint.directory is not None:
        _resume(setup, trainer, checkpoint.directory)
    elif setup.config.init_from is not None and not loads_before_adapters(setup.config, None):
        loaded = load_initial_weights(trainer.state.bare_model, setup.config, context=setup.context)
        if loaded is not None:
            trainer.logbook.log_values({"init_from": Text(loaded)})
    if checkpoint.directory is None and setup.config.init.training:
        load_initial_training(trainer, setup.config)
    if setup.config.resume is not None or checkpoint.damaged:
        # Past this barrier, every rank has accepted the checkpoint.
        barrier(setup.context)
        _continue_checkpoints(setup, trainer, checkpoint)


def _continue_checkpoints(setup: RankSetup, trainer: Trainer, checkpoint: LastUndamaged) -> None:
    """Have the run's next checkpoints follow the one that was restored."""
    if trainer.checkpoints is not None:
        damaged_steps = []
        for damaged, _ in checkpoint.damaged:
            step = step_of(damaged.name)
            if step is not None:
                damaged_steps.append(step)
        trainer.checkpoints.resume_from(trainer.progress.step, damaged=damaged_steps)
    # A restart before the next checkpoint resumes here, unless it is another run's.
    own_folder = setup.run_dir.checkpoints.resolve()
    directory = checkpoint.directory
    is_own = directory is not None and directory.parent == own_folder and step_of(directory.name) is not None
    if setup.context.is_main and is_own:
        point(LocalStorage(own_folder), LAST, step=trainer.progress.step)


def _resume(setup: RankSetup, trainer: Trainer, source: Path) -> None:
    """Load the whole state from the checkpoint `source`, but for the generators, which `Trainer.fit` restores."""
    saved_config = without_removed(with_present_names(load_yaml(source / "config.yaml")))
    may_change = is_branch_point(setup, source)
    if not may_change:
        check_fold(setup.config, saved_config)
        check_optimizer_and_schedule(setup.config, saved_config)
    model = trainer.state.bare_model
    if is_model_sharded(model):
        # Its shards are those of the optimizer's parameters.
        check_optimizer(setup.config.optimizer, saved_config["optimizer"])
        # Takes most of a second to import.
        from framework.checkpoint.sharded_state import load_sharded

        checkpoint = load_sharded(source, model, trainer.state.optimizer)
        training = checkpoint["training"]
    else:
        checkpoint = load(source, map_location=setup.context.device)
        differ = setup.strategy.replicas_differ
        training = own_training(checkpoint["training"], setup.context, replicas_differ=differ)
        # `training` has the weights to train on if a callback averages those in `model`.
        weights = training.get("model", checkpoint["model"])
        load_weights(model, complete_weights(model, weights, source), source=source)

    # An earlier stop of a callback doesn't count if settings that may end training have changed.
    config = load_written_config(setup.run_dir)
    is_changed = any(config.get(key) != saved_config.get(key) for key in ("trainer", "callbacks"))
    if is_changed and training.get("stop", {}).get("reason"):
        training = {**training, "stop": {"reason": None, "wishes": []}}
    if may_change:
        now = without_removed(with_present_names(config))
        training = with_changes(trainer, training, now=now, before=saved_config)
    trainer.load_state_dict(training)
    if not may_change:
        change_optimizers(setup.config, saved_config, trainer.state)
    trainer.restore_generators = partial(
        _restore_generators, setup, checkpoint["generators"], step=trainer.progress.step
    )

    logger.info("resuming from %s", source)
    batch = setup.plan.global_batch_size
    before = training.get("global_batch_size", batch)
    if batch != before and setup.context.is_main:
        warn(f"A global batch has {batch} samples now, and had {before}: keep it with data.global_batch_size={before}")


def _restore_generators(setup: RankSetup, saved: Sequence[dict[str, Any]], *, step: int) -> None:
    """Restore every generator. If the ranks or devices are others than saved, seed them by seed, rank and step."""
    context = setup.context
    # Seed first; restoring then replaces these states.
    seed_everything(mix(setup.config.seed, "resumed on", context.world_size, step), rank=setup.seed_rank)
    if len(saved) != context.world_size:
        logger.warning(
            "the checkpoint is of %d ranks, this run has %d: random generators are seeded again",
            len(saved),
            context.world_size,
        )
    elif not restore_generator_states(saved[context.rank], devices=context.devices):
        logger.warning("the checkpoint is of other devices: their random generators are seeded again")

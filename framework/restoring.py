"""Going on from a checkpoint: what of it is taken up, and what can't have changed since."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from framework.checkpoint import find, load, load_weights
from framework.checkpoint.format import LAST, step_of
from framework.checkpoint.lookup import LastWhole, describe_others, last_whole, manifest_if_complete
from framework.checkpoint.replicas import mean_training, own_training, replicas_saved
from framework.checkpoint.store import point
from framework.checkpoint.whole import damage
from framework.config.saved import confirm
from framework.config.schema import Config
from framework.distributed.collectives import barrier, gather_to_all
from framework.distributed.context import Context
from framework.distributed.tensors import is_model_spread
from framework.errors import CheckpointError, ConfigError, RunError
from framework.parts import Parts
from framework.rank_log import logger
from framework.seed import mix, restore_generator_states, seed_everything
from framework.session import Rank, load_model
from framework.trainer import Trainer
from framework.types import replicas_differ

_SHOWN = 8


def restore(rank: Rank, trainer: Trainer) -> None:
    """Take up the run's own checkpoint (`resume`, or a restart), else the weights of `init_from`."""
    own = _own_checkpoint(rank)
    if own.directory is not None:
        _resume(rank, trainer, own.directory)
    elif rank.config.init_from is not None:
        load_model(rank, trainer.parts.bare_model, Path(rank.config.init_from))
    if rank.config.resume is not None or own.damaged:
        barrier(rank.context)  # no rank has refused it
        if trainer.checkpoints is not None:
            steps = (step_of(directory.name) for directory, _ in own.damaged)
            damaged = [step for step in steps if step is not None]
            trainer.checkpoints.go_on_from(trainer.progress.step, damaged=damaged)
        if rank.context.is_main:
            confirm(rank.run_dir)
            # Where a restart goes on, if nothing is saved before.
            if own.directory is not None and step_of(own.directory.name) is not None:
                point(rank.run_dir.checkpoints, LAST, step=trainer.progress.step)


def _own_checkpoint(rank: Rank) -> LastWhole:
    """The checkpoint to go on from; none for a new run, and for one that was stopped before its first.

    It is the one that `resume` names, and no other; where that is the run directory, and in a restart, the last one, or
    the newest whole one before it where that is damaged, which is told. All of its files are read first. Every rank
    must call; raises RunError where they don't all find the same, CheckpointError where what is there can't be used.
    """
    if rank.config.resume is None and not rank.attempt:
        return LastWhole(None)
    is_last = bool(rank.attempt) or Path(str(rank.config.resume)).resolve() == rank.run_dir.path.resolve()
    source = rank.run_dir.checkpoints if is_last else Path(str(rank.config.resume))
    looked = _look_together(source, is_last=is_last, context=rank.context)
    if isinstance(looked, str):
        raise CheckpointError(looked)
    chosen = _as_seen_here(looked.directory, source, is_last=is_last)
    _check_all_find_it(rank, source, chosen)
    if rank.context.is_main:
        for directory, fault in looked.damaged:
            _warn(f"The checkpoint {directory} can't be used: {fault}. An earlier one is; nothing is deleted")
        if looked.directory is None:
            _warn("There is no checkpoint yet: the run begins anew")
    return LastWhole(chosen, looked.damaged)


def _look_together(source: Path, *, is_last: bool, context: Context) -> LastWhole | str:
    """What rank 0 finds, with every rank reading some of the files; a text where it can't be used."""
    looked: LastWhole | str | None = None
    if context.is_main:
        try:
            looked = _look(source, is_last=is_last, look=partial(_damage_seen_together, context=context))
        finally:
            gather_to_all(None, context)  # there is nothing more to read
    else:
        while (directory := gather_to_all(None, context)[0]) is not None:
            gather_to_all(_damage_seen_here(directory, context), context)
    found: LastWhole | str = gather_to_all(looked, context)[0]
    return found


def _damage_seen_together(directory: Path, *, context: Context) -> str | None:
    """On rank 0."""
    fault = damage(directory, thorough=False)
    if fault is not None:
        return fault
    gather_to_all(directory, context)
    faults = gather_to_all(_damage_seen_here(directory, context), context)
    return "; ".join(fault for fault in faults if fault is not None) or None


def _damage_seen_here(directory: Path, context: Context) -> str | None:
    """Of this rank's share of the files; nothing where it doesn't see the checkpoint, which is another matter."""
    if manifest_if_complete(directory) is None:
        return None
    return damage(directory, number=context.rank, of=context.world_size)


def _look(source: Path, *, is_last: bool, look: Callable[[Path], str | None]) -> LastWhole | str:
    try:
        if is_last:
            return last_whole(source, look=look)
        directory = find(source)
        fault = look(directory)
    except CheckpointError as error:
        return str(error)
    if fault is not None:
        return f"The checkpoint {directory} is damaged: {fault}.\n{describe_others(directory)}"
    return LastWhole(directory)


def _as_seen_here(chosen: Path | None, source: Path, *, is_last: bool) -> Path | None:
    """The directory that rank 0 has chosen, on this rank's disk; what is found there instead where it isn't there."""
    if chosen is not None:
        own = (source / chosen.name if is_last else source).resolve()
        if own.name == chosen.name and manifest_if_complete(own) is not None:
            return own
    try:
        return last_whole(source, look=partial(damage, thorough=False)).directory if is_last else find(source)
    except CheckpointError:
        return None


def _warn(text: str) -> None:
    """In the log and on the terminal."""
    logger.warning(text)
    print(text, flush=True)


def _check_all_find_it(rank: Rank, source: Path, found: Path | None) -> None:
    """Raise RunError, the same on every rank, where a node finds another checkpoint than rank 0, or none."""
    mine = (rank.context.node_rank, socket.gethostname(), None if found is None else found.name)
    first, *others = gather_to_all(mine, rank.context)
    different = dict.fromkeys(each for each in others if each[2] != first[2])
    if different:
        raise RunError(
            "The nodes don't find the same checkpoint to go on from:\n"
            + "".join(f"  {_findings(each, source)}\n" for each in [first, *different][:_SHOWN])
            + "Put the run directory on a disk that all nodes share: path.outputs=FOLDER"
        )


def _findings(of_rank: tuple[int, str, str | None], source: Path) -> str:
    node, host, name = of_rank
    return f"node {node} ({host}) finds {'none' if name is None else name} in {source}"


def _resume(rank: Rank, trainer: Trainer, source: Path) -> None:
    saved = yaml.safe_load((source / "config.yaml").read_text())
    now = yaml.safe_load(rank.run_dir.config_file.read_text())
    _check_optimizer(rank.config, saved)
    _check_schedule(rank.config, saved)
    training, generators = _take_weights(rank, trainer.parts, source)
    if training.get("stop", {}).get("reason") and _is_prolonged(now, saved):
        training = {**training, "stop": {"reason": None, "wishes": []}}
    trainer.load_state_dict(training)
    _change_optimizer(rank.config, saved, trainer.parts)
    logger.info("going on from %s", source)
    _warn_of_another_batch(rank, training)
    trainer.restore_generators = partial(_restore_generators, rank, generators, step=trainer.progress.step)


def _take_weights(rank: Rank, parts: Parts, source: Path) -> tuple[dict[str, Any], Sequence[dict[str, Any]]]:
    """The weights to train on into the model; gives the rest, `training` and `generators`."""
    if is_model_spread(parts.bare_model):
        from framework.checkpoint.resharding import load_spread  # takes most of a second to import

        state = load_spread(source, parts.bare_model, parts.optimizer)
    else:
        state = load(source, map_location=rank.context.device)
        state["training"] = _of_this_rank(rank, state["training"])
        load_weights(parts.bare_model, state["training"].get("model", state["model"]), source=source)
    return state["training"], state["generators"]


def _of_this_rank(rank: Rank, training: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a checkpoint as this rank had it; the mean where that can't be, which is told."""
    if replicas_differ(rank.strategy) and replicas_saved(training) == rank.context.world_size:
        return own_training(training, rank.context)
    return mean_training(training)


def _restore_generators(rank: Rank, saved: Sequence[dict[str, Any]], *, step: int) -> None:
    """Every generator as it was; on other ranks or devices than saved, as seed, rank and step say."""
    context = rank.context
    seed_everything(mix(rank.config.seed, "resumed on", context.world_size, step), rank=context.rank)
    if len(saved) != context.world_size:
        counts = (len(saved), context.world_size)
        logger.warning("the checkpoint is of %d ranks, this run has %d: random generators are seeded anew", *counts)
    elif not restore_generator_states(saved[context.rank], devices=context.devices):
        logger.warning("the checkpoint is of other devices: their random generators are seeded anew")


def _is_prolonged(now: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether what may end training was changed since: then the end that a callback asked for no longer counts."""
    return any(now.get(key) != saved.get(key) for key in ("trainer", "callbacks"))


def _warn_of_another_batch(rank: Rank, training: Mapping[str, Any]) -> None:
    now, then = rank.plan.global_batch_size, training.get("global_batch_size", rank.plan.global_batch_size)
    if now != then:
        logger.warning(
            "a global batch has %d samples now, and had %d: keep it with data.global_batch_size=%d", now, then, then
        )


def _check_optimizer(config: Config, saved: dict[str, Any]) -> None:
    now, then = config.optimizer["_target_"], saved["optimizer"]["_target_"]
    if now != then:
        raise ConfigError(
            f"resume can't go on with optimizer {now}: the checkpoint has the state of {then}.\n"
            "Keep that one, or start a new run from these weights with init_from."
        )


def _check_schedule(config: Config, saved: dict[str, Any]) -> None:
    """Raise ConfigError for another schedule than the checkpoint's: its state holds its settings and would win."""
    now, then = config.scheduler.schedule or {}, saved["scheduler"]["schedule"] or {}
    if now.get("_target_") != then.get("_target_"):
        raise ConfigError(
            f"resume can't go on with {_schedule_name(now)}: the checkpoint is of a run with {_schedule_name(then)}.\n"
            "Keep that, or start a new run from these weights with init_from."
        )
    changed = [name for name in {**then, **now} if now.get(name) != then.get(name)]
    if changed:
        one_by_one = ", ".join(f"{name}={now.get(name)} (it was {then.get(name)})" for name in changed)
        raise ConfigError(
            f"resume can't change a schedule that has begun: scheduler.schedule.{one_by_one}.\n"
            "Keep it as it was, or start a new run from these weights with init_from."
        )


def _schedule_name(node: Mapping[str, Any]) -> str:
    return f"the schedule {node['_target_']}" if node else "no schedule"


def _change_optimizer(config: Config, saved: dict[str, Any], parts: Parts) -> None:
    """Give the restored optimizer what was typed for it since; its state, as saved, has the old values."""
    changed = {name: value for name, value in config.optimizer.items() if saved["optimizer"].get(name) != value}
    for name, value in changed.items():
        if name == "lr":
            parts.schedule.set_learning_rate(parts.optimizer, value, before=saved["optimizer"].get(name))
        else:
            for group in parts.optimizer.param_groups:
                group[name] = value
    if changed:
        logger.info("changed since the checkpoint: %s", ", ".join(f"optimizer.{n}={v}" for n, v in changed.items()))

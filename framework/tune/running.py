"""`job=tune` on one rank: the largest batch first, then the learning rate for it; leaves tune.json and a picture.

Nothing is kept of what is trained: no checkpoint is written, and callbacks, schedules and evaluations are left out.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import IterableDataset

from framework import build
from framework.causes import said
from framework.config.schema import Config
from framework.data.batching import BatchPlan
from framework.data.loader import TrainLoader, dataset_size
from framework.distributed.collectives import barrier
from framework.distributed.group import process_group, side_group
from framework.engine import build_train_loader, build_trainer
from framework.errors import ConfigError, RunError
from framework.launch.link import Link
from framework.launch.plan import RankArguments
from framework.preflight.wording import amount
from framework.pulse import Phase
from framework.session import Rank, entered, load_model, loading
from framework.strategies.single import AsItIs
from framework.targets import import_target, takes
from framework.trainer import Trainer
from framework.tune.dealing import Dealing
from framework.tune.findings import Findings
from framework.tune.memory import is_out_of_memory, memory_of
from framework.tune.ranging import range_test
from framework.tune.searching import grain, largest_fitting
from framework.tune.suggesting import Curve
from framework.tune.trying import Trials, Tried, all_tried, endless, held_for_strategy
from framework.types import Callback, MapDataset, exchanges_on_cpu, forward_communicates, weight_copies

_SHOWN_CHARS = 90  # of what an allocator says
_TOO_LARGE = (
    "Use a smaller model, trainer.precision=bf16-mixed, trainer.activation_checkpointing=auto, or a strategy that "
    "spreads the model: strategy=fsdp"
)


def tune_rank(arguments: RankArguments, link: Link) -> None:
    """Leaves tune.json in the run directory, as soon as something is found. Raises FrameworkError, and passes what the
    user's code raises.
    """
    with entered(arguments, link) as entered_rank:
        rank = replace(entered_rank, config=stripped(entered_rank))
        datasets = build.build_datasets(rank.config.data.datasets)
        train = dealt_anew(datasets.train)
        samples = dataset_size(train, part="train")
        loader = build_train_loader(rank, train)
        link.pulse.at(Phase.MEETING)
        backend, with_cpu = rank.config.backend, exchanges_on_cpu(rank.strategy)
        with ExitStack() as stack:
            stack.callback(loader.close)
            stack.enter_context(
                process_group(rank.context, backend, rendezvous=arguments.rendezvous, with_cpu=with_cpu)
            )
            link.pulse.at(Phase.BUILDING)
            findings = Findings(entered_rank)
            stack.callback(findings.close)
            _tune(rank, loader, findings, samples=samples, averages=_averages(entered_rank))
            link.pulse.at(Phase.CLOSING)
            barrier(rank.context)


def stripped(rank: Rank) -> Config:
    """The configuration without what only watches, keeps or ends a run. Raises ConfigError for what can't be tuned."""
    config = rank.config
    if config.tune.find_batch_size and forward_communicates(rank.strategy):
        raise ConfigError(
            f"tune.find_batch_size=true tries batches on each process by itself, and strategy="
            f"{type(rank.strategy).__name__.lower()} leaves none with a whole model: in every forward all have to take "
            "part, and one that ran out of memory would leave the others waiting.\n"
            "Use tune.find_batch_size=false for the learning rate alone, or another strategy."
        )
    if config.tune.find_lr and "lr" not in config.optimizer and not takes(config.optimizer, "lr"):
        raise ConfigError(
            f"tune.find_lr=true looks for optimizer.lr, and {config.optimizer['_target_']} takes no keyword lr.\n"
            "Use tune.find_lr=false for the batch alone."
        )
    return replace(
        config,
        callbacks={},
        logger={},
        scheduler=replace(config.scheduler, schedule=None, monitor=None),
        checkpoint=replace(config.checkpoint, enabled=False),
        trainer=replace(config.trainer, limit_train_batches=None, profiler=None),
    )


def dealt_anew(dataset: MapDataset | IterableDataset[Any]) -> MapDataset:
    """The dataset, which each size of batch needs dealt in another way. Raises ConfigError for a stream."""
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"job=tune deals the train samples anew for every size of batch, and a stream, here a "
            f"{type(dataset).__name__}, comes in one order only.\n"
            "Tune with a data set that has a length: some of the stream's samples in a list will do."
        )
    return dataset


def _averages(rank: Rank) -> int:
    """How many callbacks keep a whole copy of the model to evaluate."""
    targets = [import_target(node["_target_"]) for node in rank.config.callbacks.values()]
    hooks = [getattr(target, "evaluation_weights", None) for target in targets]
    return sum(hook is not None and hook is not Callback.evaluation_weights for hook in hooks)


def _tune(rank: Rank, loader: TrainLoader, findings: Findings, *, samples: int, averages: int) -> None:
    settings, config = rank.config.tune, rank.config
    dealing = Dealing(
        rank.data_share.world_size, config.trainer.accumulate_grad_batches, config.data.global_batch_size, samples
    )
    found, plan = None, rank.plan
    if settings.find_batch_size:
        batch = _largest_batch(rank, loader, dealing, averages=averages)
        found = batch["batch_size"]
        plan = dealing.plan(found)
        made, passes = dealing.made(plan)
        batch |= {"global_batch_size": made, "accumulate_grad_batches": passes}
        findings.keep_batch(batch, dealing.overrides(found))
    loader = loader.replanned(plan, limit=dealing.whole_steps(plan))
    trainer, curve = _together(rank, loader, plan, findings, found=found)
    if curve is not None:
        # A key that nothing has set yet has to be added.
        findings.keep_rates(curve, plan, key="optimizer.lr" if "lr" in config.optimizer else "+optimizer.lr")
        findings.show(curve, plan, trainer)


# The batch


@dataclass(frozen=True)
class _Search:
    """Tries sizes on all ranks, each by itself, and notes how that went."""

    rank: Rank
    trials: Trials
    dealing: Dealing
    group: dist.ProcessGroup | None
    noted: list[dict[str, Any]]

    def fits(self, size: int) -> bool:
        """Whether it does on every rank; the same on all of them, which must call it.

        Sizes that a global batch is dealt alike for are one, tried once. Raises RunError for what is raised that isn't
        about memory, where nothing has fitted and larger sizes were too large; else passes it.
        """
        size = self.dealing.pass_size(size)
        for note in self.noted:
            if note["batch_size"] == size:
                return bool(note["fits"])
        everyone = all_tried(self._tried(size), self.group, world_size=self.rank.context.world_size)
        refusing = next((number for number, each in enumerate(everyone) if each.refusal is not None), None)
        note = self._note(size, everyone, refusing)
        self.noted.append(note)
        _say(self.rank, _trial_line(note))
        return refusing is None

    def _tried(self, size: int) -> Tried:
        try:
            return self.trials.try_size(size)
        except Exception as error:  # of the user's code
            if not self.noted or any(note["fits"] for note in self.noted):
                raise
            last = self.noted[-1]
            raise RunError(
                f"Not even a batch of {last['batch_size']} fits: rank {last['refused_by']}: {last['refusal']}\n"
                f"And with {size} the model or its data raise {said(error)}\n{_TOO_LARGE}"
            ) from error

    def _note(self, size: int, everyone: list[Tried], refusing: int | None) -> dict[str, Any]:
        times = [each.step_s for each in everyone if each.step_s is not None]
        peaks = [each.peak_bytes for each in everyone if each.peak_bytes is not None]
        rate = None
        if refusing is None and times:
            samples, _ = self.dealing.made(self.dealing.trial(size))
            rate = samples / max(*times, 1e-9)
        return {
            "batch_size": size,
            "fits": refusing is None,
            "refused_by": refusing,
            "refusal": None if refusing is None else everyone[refusing].refusal,
            "peak_bytes": max(peaks, default=None),
            "samples_per_s": rate,
        }


def _largest_batch(rank: Rank, loader: TrainLoader, dealing: Dealing, *, averages: int) -> dict[str, Any]:
    """Raises RunError where not even one sample fits."""
    settings, context, backend = rank.config.tune, rank.context, rank.config.backend
    alone = build_trainer(replace(rank, strategy=AsItIs()), loader, None)
    group = None
    if context.world_size > 1:  # counted: who hangs in a trial is the one that the others wait for
        group = side_group(max(backend.init_timeout, backend.timeout), is_counted=True)
    # For the exchange of gradients, and what a strategy keeps of weights.
    copies = int(context.world_size > 1) + weight_copies(rank.strategy)
    held = held_for_strategy(alone.parts.bare_model, copies=copies, averages=averages)
    procs, sharing = context.topology.procs_per_node, loading(rank).sharing
    most, limited_by = dealing.most(settings.max_batch_size)
    barrier(context)  # all of a node measure what is free, and none has begun to take it
    with memory_of(context.devices, procs=procs, sharing=sharing, margin=settings.margin) as memory:
        there = "an unknown amount" if memory.room_bytes is None else amount(memory.room_bytes)
        _say(rank, f"Batches of 1 to {most:,}: {there} of memory for a process's steps")
        trials = Trials(alone, dealing, memory, steps=settings.steps_per_trial, held=held)
        barrier(context)
        search = _Search(rank, trials, dealing, group, noted=[])
        # Where a batch that is too large gets a process killed, it isn't begun before smaller ones told what it takes.
        start, from_below = rank.config.data.batch_size, not memory.is_held
        found = largest_fitting(search.fits, start=start, most=most, from_below=from_below)
        room = memory.room_bytes
    if found is None:
        last = search.noted[-1]
        raise RunError(f"Not even a batch of 1 fits: rank {last['refused_by']}: {last['refusal']}\n{_TOO_LARGE}")
    return {
        "batch_size": dealing.pass_size(found),
        "limited_by": limited_by if found == most else "memory",
        "grain": 1 if found == most else grain(found),
        "margin": settings.margin,
        "room_bytes": room,
        "trials": search.noted,
    }


def _trial_line(note: dict[str, Any]) -> str:
    peak = "" if note["peak_bytes"] is None else amount(note["peak_bytes"])
    if note["fits"]:
        rate = "" if note["samples_per_s"] is None else f"{note['samples_per_s']:,.0f} samples/s"
        return f"  batch {note['batch_size']:<8,} fits         {peak:>10}  {rate}".rstrip()
    text = note["refusal"]
    shown = text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 1]}…"
    return f"  batch {note['batch_size']:<8,} doesn't fit  rank {note['refused_by']}: {shown}"


# All ranks together


def _together(
    rank: Rank, loader: TrainLoader, plan: BatchPlan, findings: Findings, *, found: int | None
) -> tuple[Trainer, Curve | None]:
    """Steps of the whole run with the batches that were found: the range test, or a few where none is asked for.

    Raises RunError where what fitted each rank by itself doesn't fit now: what the strategy takes has come on top.
    """
    gc.collect()  # of the trials' model
    config, enough = rank.config, rank.config.tune.steps_per_trial

    def note(step: int) -> None:
        rank.link.pulse.stepped(step)
        if step == enough:
            findings.keep_together()

    try:
        trainer = build_trainer(rank, loader, None)
        if config.init_from is not None:
            load_model(rank, trainer.parts.bare_model, Path(config.init_from))
        if not config.tune.find_lr:
            _make_steps(trainer, enough, note=note)
            return trainer, None
        _say(
            rank,
            f"Learning rates from {config.tune.min_lr:g} to {config.tune.max_lr:g}, one for each of "
            f"{config.tune.num_training} steps of {plan.global_batch_size:,} samples",
        )
        return trainer, range_test(trainer, config.tune, note=note)
    except Exception as error:
        if found is None or not is_out_of_memory(error):
            raise
        raise RunError(
            f"Batches of {found} fit each process by itself, and not with the exchange of all: {said(error)}\n"
            f"Leave more room than tune.margin={config.tune.margin:g}, or set tune.max_batch_size below {found}."
        ) from error


def _make_steps(trainer: Trainer, number: int, *, note: Callable[[int], None]) -> None:
    windows = endless(trainer.train_loader)
    for step in range(1, number + 1):
        trainer.train_step(next(windows))
        trainer.context.wait_for_devices()
        note(step)
    windows.close()


def _say(rank: Rank, text: str) -> None:
    if rank.context.is_main:
        print(text, flush=True)

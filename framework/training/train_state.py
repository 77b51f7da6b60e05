"""What a run is made of, and its whole state: what a checkpoint holds, and how it is restored.

Only this module knows that a model may be replicated, averaged by callbacks, sharded or cut into stages.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from framework.checkpoint.replicas import REPLICAS, gather_replicas
from framework.config.schema import CUDA_GRAPH_MODES
from framework.data.identity import DataIdentity, common_identity
from framework.data.loader import MapLoader
from framework.data.stream import StreamLoader
from framework.distributed.collectives import gather_to_all
from framework.distributed.context import Context
from framework.distributed.seed import generator_states, restore_generator_states
from framework.distributed.sharded import has_output, is_model_sharded, local_tensor
from framework.errors import ConfigError, RunError
from framework.media import Table, Text
from framework.optim.param_groups import Optimizers
from framework.optim.phases import Phases
from framework.optim.precision import PrecisionPlugin
from framework.optim.schedule import Schedule, Schedules, restore_optimizer
from framework.strategies.base import Strategy
from framework.strategies.parameters import Trainable, described_change
from framework.system.rank_log import logger
from framework.training.evaluation import Evaluation, evaluate, isolated
from framework.training.meter import Meter, ReportedPairs
from framework.training.rank_states import RANK_STATES, Fingerprints, fingerprints, own_state, states_of_ranks
from framework.training.stop_control import StopControl
from framework.types import Callback, Logger, MicroBatch, Phase, Task, hooks


@final
@dataclass
class Progress:
    """How far training is. step: optimizer steps done. epoch: the current one, from 0. samples: consumed of it."""

    epoch: int = 0
    step: int = 0
    samples: int = 0

    @property
    def last_epoch(self) -> int:
        """The epoch of the last step done."""
        return max(self.epoch - int(self.samples == 0), 0)

    def advance(self, *, global_count: int, epoch_end: bool) -> None:
        """Count one optimizer step; the last one of an epoch moves on to the next."""
        self.step += 1
        self.samples = 0 if epoch_end else self.samples + global_count
        self.epoch += int(epoch_end)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.step, self.samples = state["epoch"], state["step"], state["samples"]


@final
@dataclass(eq=False, kw_only=True)
class TrainState:
    """What a run is made of, with its progress."""

    model: nn.Module  # wrapped by the strategy, which may replace it
    task: Task
    strategy: Strategy
    precision: PrecisionPlugin
    optimizer: Optimizer
    schedule: Schedule | Schedules
    callbacks: Mapping[str, Callback]
    loggers: Mapping[str, Logger]  # empty except on rank 0
    train_loader: MapLoader | StreamLoader
    stop: StopControl
    context: Context
    phases: Phases | None = None  # of the task
    recomputes: bool = False  # activation checkpointing is on
    compile_mode: str | None = None  # of `torch.compile`, for when the model is wrapped again; None: not compiled
    progress: Progress = field(default_factory=Progress)
    val_metrics: dict[str, float] = field(default_factory=dict)  # of the last validation, after step `val_step`
    val_step: int | None = None
    val_texts: dict[str, Table | Text] = field(default_factory=dict)  # tables of that validation

    def __post_init__(self) -> None:
        self.meter = Meter(varies=self.phases is not None)
        self.reported = ReportedPairs()
        self.trainable = Trainable(self.bare_model)
        self._saved_trainable: Sequence[str] | None = None  # names of those trained, in the checkpoint resumed from

    @property
    def bare_model(self) -> nn.Module:
        return self.strategy.unwrap(self.model)

    @cached_property
    def speaks_for_share(self) -> bool:
        """True on exactly one of the ranks that get the same samples: only its results are counted.

        The first access is a collective, which every rank must make at the same point.
        """
        context = self.context
        share = self.strategy.data_share(context)
        if share.world_size == context.world_size:
            return True
        of_ranks = gather_to_all((share.rank, has_output(self.bare_model)), context)
        return of_ranks.index((share.rank, True)) == context.rank

    @property
    def observers(self) -> list[Any]:
        """The task, which may have a callback's hooks, and the callbacks."""
        return [self.task, *self.callbacks.values()]

    @property
    def optimizers(self) -> list[Optimizer]:
        """One, or several in the order of the configuration."""
        return list(self.optimizer.named.values()) if isinstance(self.optimizer, Optimizers) else [self.optimizer]

    def of(self, phase: Phase) -> tuple[Optimizer, Schedule]:
        """Return the optimizer that a phase steps, and its schedule."""
        assert isinstance(self.optimizer, Optimizers), "phases name one of several"
        assert isinstance(self.schedule, Schedules)
        return self.optimizer.named[phase.optimizer], self.schedule.named[phase.optimizer]

    def update_trainable(self) -> None:
        """Have the strategy rebuild what depends on which parameters are trained, after a change of `requires_grad`.

        Raises ConfigError if no parameter is left to train.
        """
        changed, before = self.trainable.update(), self.model
        self.model = self.strategy.rewrap(self.model, changed=changed)
        if not self.trainable.parameters:
            raise ConfigError(
                f"No parameter is left to train ({described_change(changed)}).\n"
                "Keep one trained, or end training: return framework.Stop(reason) from the callback."
            )
        if self.compile_mode is not None and self.model is not before:
            self.model.compile(mode=self.compile_mode)
        logger.info("trained parameters after step %d: %s", self.progress.step, described_change(changed))

    def restore_trainable(self) -> None:
        """Train the parameters that were trained when the checkpoint was saved, whatever model and callbacks say."""
        if self._saved_trainable is not None:
            self.trainable.restore(self._saved_trainable)
            if self.trainable.has_changed():
                self.update_trainable()

    @contextmanager
    def without_side_effects(self) -> Iterator[None]:
        """Restore buffers (BatchNorm's statistics) and generators after the forward and backward of a stand-in.

        Only gradients remain, to which a stand-in adds zeros.
        """
        generators = generator_states(self.context.devices)
        kept = {name: buffer.clone() for name, buffer in self.bare_model.named_buffers()}
        with isolated(self.task):
            yield
        restore_generator_states(generators, devices=self.context.devices)
        with torch.no_grad():
            for name, buffer in self.bare_model.named_buffers():
                if name in kept:
                    buffer.copy_(kept[name])

    @contextmanager
    def restored_afterwards(self) -> Iterator[None]:
        """Restore weights, optimizers and the states of the task and the callbacks; the rest of the objects may change.

        Generators and which parameters are trained aren't restored here. Needs the memory of a copy of all this.
        """
        model = self.bare_model
        weights = copy.deepcopy(model.state_dict())
        optimizer = copy.deepcopy(self.optimizer.state_dict())
        states = [
            (load, copy.deepcopy(save()))
            for each in self.observers
            for save, load in zip(hooks([each], "state_dict"), hooks([each], "load_state_dict"), strict=True)
        ]
        yield
        model.load_state_dict(weights)
        restore_optimizer(self.optimizer, optimizer)
        for load, state in states:
            load(state)

    def evaluation_weights(self) -> ExitStack:
        """While entered, the bare model holds the weights to evaluate, equal on all ranks. Every rank must call it."""
        stack = ExitStack()
        for swap in self._weight_swaps():
            stack.enter_context(swap(self.bare_model))
        self.strategy.before_evaluation(self.model)
        return stack

    def evaluate(self, loaders: Mapping[str, Iterable[MicroBatch]], *, with_media: bool = False) -> Evaluation:
        """Return the metrics of the weights that the bare model holds, on each set by its prefix."""
        return evaluate(
            self.bare_model,
            loaders,
            task=self.task,
            precision=self.precision,
            context=self.context,
            with_media=with_media,
            counts=self.speaks_for_share,
            captures_graphs=self.compile_mode in CUDA_GRAPH_MODES,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a later run needs to continue exactly. Every rank must call it; the same on every rank.

        `model` holds the weights to evaluate; if a callback averages them, `training` has those to train on. `shards`
        replaces it for a model that is spread over ranks: each rank has its part, with the optimizer's state.
        Raises RunError on every rank if ranks that should have the same weights, or the same state of the task or a
        callback, don't.
        """
        context, task = self.context, hooks([self.task], "state_dict")
        training: dict[str, Any] = {
            "strategy": self.strategy.state_dict(self.model),
            "task": task[0]() if task else {},
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.precision.scaler.state_dict(),
            "callbacks": {name: hook() for name, hook in self._callback_hooks("state_dict")},
        }
        if self.strategy.replicas_differ:
            own = {name: training[name] for name in ("optimizer", "callbacks", "task")}
            training[REPLICAS] = gather_replicas({"model": self.bare_model.state_dict(), **own}, context)
        if is_model_sharded(self.bare_model):
            from framework.checkpoint.sharded_state import split_state  # takes most of a second to import

            shards, entries = split_state(self.bare_model, self.optimizer)
            training |= entries
            weights: dict[str, Any] = {"shards": shards}
        else:
            weights = {"model": self.bare_model.state_dict()}
            if self._weight_swaps():
                training["model"] = weights["model"]
                with self.evaluation_weights():
                    # Copied, keeping tied weights tied: these tensors hold the average only while it is swapped in.
                    weights = {"model": copy.deepcopy(self.bare_model.state_dict())}
        part = None if context.world_size == 1 or self.strategy.replicas_differ else self.strategy.shard_index
        compared = part, {} if part is None else _weight_hashes(self.bare_model)
        objects = self._named_observers()
        states = {f"callbacks.{name}": state for name, state in training["callbacks"].items()}
        states["task"] = training["task"]
        prints: Fingerprints = {}
        if context.world_size > 1:
            prints = fingerprints(objects, states, replicas_differ=self.strategy.replicas_differ)
        # Rank 0 has all of them, unless each rank has its own stages.
        trained = self.trainable.names if context.is_main or self.strategy.num_stages is not None else []
        mine = (generator_states(context.devices), self.meter.state_dict(), self.stop.own_reason)
        data = (self.train_loader.state_dict(), self.train_loader.identity)
        of_ranks = gather_to_all((*mine, self.reported.state_dict(), *data, compared, trained, prints), context)
        generators, meters, reasons, reported, streams, identities, parts, names, prints_of = map(
            list, zip(*of_ranks, strict=True)
        )
        check_equal(parts, step=self.progress.step)
        others = states_of_ranks(objects, states, prints_of, step=self.progress.step, context=context)
        if others:
            training[RANK_STATES] = others
        training |= {
            "progress": asdict(self.progress),
            "val_metrics": dict(self.val_metrics),
            "val_step": self.val_step,
            "meters": meters,
            "reported": reported,
            "trainable": sorted({name for each in names for name in each}),
            "streams": [each for each in streams if each is not None],
            "data": common_identity(identities).state_dict(),
            "global_batch_size": self.train_loader.global_batch_size,
            "stop": {"reason": self.stop.reason, "wishes": reasons},
        }
        return {**weights, "training": training, "generators": generators}

    def load_state_dict(self, training: Mapping[str, Any]) -> None:
        """Load the `training` part of a `state_dict`, once the weights are there. Every rank must call it.

        New callbacks start from scratch. With another number of ranks, rank 0 gets all that wasn't logged yet.
        """
        self._saved_trainable = training.get("trainable")  # None in older checkpoints
        self.restore_trainable()
        self.strategy.load_state_dict(self.model, training.get("strategy", {}))
        for load in hooks([self.task], "load_state_dict"):
            if "task" in training:
                load(own_state("task", training["task"], training, self.context))
        restore_optimizer(self.optimizer, training["optimizer"])
        self.schedule.load_state_dict(training["schedule"])
        self.precision.scaler.load_state_dict(training["scaler"])
        for name, load in self._callback_hooks("load_state_dict"):
            if name in training["callbacks"]:
                load(own_state(f"callbacks.{name}", training["callbacks"][name], training, self.context))
        self.progress.load_state_dict(training["progress"])
        if "data" in training:  # not in older checkpoints
            self.train_loader.load_identity(DataIdentity.load(training["data"]), samples=self.progress.samples)
        self.train_loader.load_state_dict(training.get("streams", []), samples=self.progress.samples)
        self.val_metrics, self.val_step = dict(training.get("val_metrics", {})), training.get("val_step")
        meters, reported, rank = training.get("meters", []), training.get("reported", []), self.context.rank
        if len(meters) == self.context.world_size:
            meters, reported = [meters[rank]], reported[rank : rank + 1]
        elif rank > 0:
            meters, reported = [], []
        self.meter.load_state_dicts(meters, device=self.context.device)
        self.reported.load_state_dicts(reported)
        self.stop.load_state_dict(training.get("stop", {"reason": None, "wishes": []}))

    def _weight_swaps(self) -> list[Callable[..., Any]]:
        """Return the `evaluation_weights` hooks; the strategy's is last, to average what callbacks swap in."""
        swaps = hooks(self.callbacks.values(), "evaluation_weights")
        return [*swaps, self.strategy.evaluation_weights] if self.strategy.replicas_differ else swaps

    def _named_observers(self) -> dict[str, Any]:
        """Return the task and the callbacks by their names in messages."""
        return {"task": self.task, **{f"callbacks.{name}": callback for name, callback in self.callbacks.items()}}

    def _callback_hooks(self, name: str) -> list[tuple[str, Callable[..., Any]]]:
        return [(key, hook) for key, callback in self.callbacks.items() for hook in hooks([callback], name)]


def check_equal(parts: Sequence[tuple[int | None, Mapping[str, int]]], *, step: int) -> None:
    """Raise RunError if ranks with the same part of the model have different weights.

    parts: of each rank, which part of the model it has (None: it is compared with no other rank), and the hashes of its
        parameters by their names.
    """
    for part in {part for part, _ in parts} - {None}:
        hashes = {rank: own for rank, (its, own) in enumerate(parts) if its == part}
        names = list(next(iter(hashes.values())))
        unequal = [name for name in names if len({each[name] for each in hashes.values()}) > 1]
        if not unequal:
            continue
        groups = defaultdict(list)  # hash → the ranks that have it
        for rank, own in hashes.items():
            groups[own[unequal[0]]].append(str(rank))
        in_groups = " | ".join(", ".join(group) for group in groups.values())
        more = f" and of {len(unequal) - 1} of the other {len(names) - 1} parameters" if len(unequal) > 1 else ""
        raise RunError(
            f"Replicas have drifted apart: after step {step} the ranks have different values of {unequal[0]} "
            f"(ranks {in_groups}){more}. This checkpoint isn't saved.\n"
            "Something changes weights on some ranks only: a callback, hook or forward that writes to them (as "
            "nn.Embedding(max_norm=...) does), an optimizer that draws random numbers, processors of different kinds, "
            "or defective hardware. Fix the cause, then resume from an earlier checkpoint."
        )


def _weight_hashes(model: nn.Module) -> dict[str, int]:
    """Return for each parameter the sum of its bytes read as 64-bit integers; waits for the device once.

    A single changed number always changes the sum. Several changes cancel out with a probability of 2**-64.
    """
    sums = {name: _sum_of_bits(local_tensor(parameter)) for name, parameter in model.named_parameters()}
    if not sums:
        return {}
    device = next(iter(sums.values())).device
    return dict(zip(sums, torch.stack([each.to(device) for each in sums.values()]).tolist(), strict=True))


def _sum_of_bits(tensor: Tensor) -> Tensor:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    words = raw.numel() // 8 * 8
    return raw[:words].view(torch.int64).sum() + raw[words:].sum(dtype=torch.int64)

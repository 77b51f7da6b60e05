"""What a run is made of, and its whole state: what a checkpoint holds, and how it is restored.

Only this module knows that a model may be replicated, averaged by callbacks, sharded or cut into stages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.optim import Optimizer

from framework.checkpoint.replicas import REPLICAS, gather_replicas
from framework.checkpoint.writer import with_python_numbers
from framework.config.schema import CUDA_GRAPH_MODES
from framework.data.identity import DataIdentity, common_identity
from framework.data.loader import TrainLoader
from framework.data.source import SourceLoader
from framework.distributed.collectives import gather_to_all
from framework.distributed.context import Context
from framework.distributed.seed import generator_states, restore_generator_states
from framework.distributed.sharded import has_output, is_model_sharded
from framework.errors import ConfigError
from framework.media import Table, Text
from framework.optim.objectives import Objectives
from framework.optim.optimizer import Closure, has_evaluation_mode, restore_optimizer, weights_to_evaluate
from framework.optim.precision import PrecisionPlugin
from framework.optim.schedule import Schedule, Schedules
from framework.optim.several import Optimizers
from framework.strategies.base import Strategy
from framework.strategies.parameters import Trainable, described_change
from framework.system.rank_log import logger
from framework.training.content_hash import hash_of, weight_hashes
from framework.training.evaluation import Evaluation, Evaluator, isolated
from framework.training.length import nominal_samples
from framework.training.meter import Meter, ReportedPairs
from framework.training.rank_states import (
    RANK_STATES,
    Fingerprints,
    WeightHashes,
    check_weights_are_equal,
    fingerprints,
    own_state,
    states_of_ranks,
)
from framework.training.slot_state import SLOTS, SOURCE_SLOTS, SlotState
from framework.training.stop_control import StopControl
from framework.training.task_state import with_model_state, without_model_state
from framework.types import Callback, Logger, MicroBatch, Objective, Passed, Source, Span, Task, Window, hooks

LEFT_OUT = "left_out"
"""The entry of `training` with the hashes of the parameters that a checkpoint leaves out, by name."""


@final
@dataclass
class Progress:
    """How far training is."""

    # The current one, counted from 0.
    epoch: int = 0
    # Optimizer steps done.
    step: int = 0
    # Samples of the epoch that were trained on, over all ranks.
    samples: int = 0
    # As many, if each global batch had been complete: those of a stream read in shards may be short at any time.
    nominal_samples: int = 0
    # Steps that were passed over, and not trained later.
    skipped: int = 0
    # Samples of the epoch that are trained at its end.
    deferred: list[Span] = field(default_factory=list)

    @property
    def last_epoch(self) -> int:
        """The epoch of the last step done."""
        if self.samples > 0 or self.epoch == 0:
            return self.epoch
        return self.epoch - 1

    @property
    def next_number(self) -> int:
        """The number of the next step; see `framework.data.skipping`."""
        return self.step + self.skipped + 1

    def number_of(self, window: Window) -> int:
        """Return the number of the step that a window is, before `advance`; 0 for samples that were deferred."""
        passed = window.passed
        if passed is None:
            return self.next_number
        if passed.is_late:
            return 0
        return self.next_number + len(passed.dropped) + len(passed.deferred)

    def advance(self, window: Window, *, global_batch_size: int) -> None:
        """Count one optimizer step and what was passed over before it; the last one of an epoch moves on to the next.

        A window without a sample counts as no step.
        """
        passed = window.passed
        if passed is not None:
            self._pass(passed, window.global_count, global_batch_size=global_batch_size)
        if window.global_count > 0:
            self.step += 1
            self.nominal_samples += global_batch_size
            if passed is None or not passed.is_late:
                self.samples += window.global_count
        if window.epoch_end:
            self.epoch += 1
            self.samples = 0
            self.nominal_samples = 0

    def _pass(self, passed: Passed, global_count: int, *, global_batch_size: int) -> None:
        for span in (*passed.dropped, *passed.deferred):
            self.samples += span.end - span.begin
        self.nominal_samples += len(passed.dropped) * global_batch_size
        self.skipped += len(passed.dropped) + len(passed.deferred) + len(passed.after)
        self.deferred += passed.deferred
        if passed.is_late:
            # These are trained now.
            first = self.deferred[0]
            left = Span(first.begin + global_count, first.end)
            self.deferred[:1] = [left] if left.begin < left.end else []
            self.skipped -= 1

    def state_dict(self) -> dict[str, Any]:
        """Return the progress in plain types."""
        state = asdict(self)
        state["deferred"] = [list(span) for span in self.deferred]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`. Those of earlier versions have nothing skipped."""
        self.epoch = state["epoch"]
        self.step = state["step"]
        self.samples = state["samples"]
        self.nominal_samples = nominal_samples(state)
        self.skipped = state.get("skipped", 0)
        self.deferred = [Span(*span) for span in state.get("deferred", [])]


class RankState(NamedTuple):
    """What one rank adds to a checkpoint, beside weights and optimizer."""

    generators: dict[str, Any]
    # What the rank has not logged yet: its meter, and pairs (sum, count) of callbacks.
    meter: dict[str, Any]
    reported: dict[str, tuple[float, float]]
    # Why a callback of this rank asks to stop.
    stop_reason: str | None
    # The position in a stream; None for map-style data.
    stream: Any
    data: DataIdentity
    # Names of the parameters that are trained.
    trainable: Sequence[str]
    # By which the ranks' weights, and the states of task and callbacks, are compared.
    weights: WeightHashes
    fingerprints: Fingerprints


@final
@dataclass(eq=False, kw_only=True)
class TrainState:
    """What a run is made of, with its progress."""

    # Wrapped by the strategy, which may replace it.
    model: nn.Module
    task: Task
    strategy: Strategy
    precision: PrecisionPlugin
    optimizer: Optimizer
    schedule: Schedule | Schedules
    callbacks: Mapping[str, Callback]
    # Empty except on rank 0.
    loggers: Mapping[str, Logger]
    train_loader: TrainLoader
    stop: StopControl
    context: Context
    # Of the task; None if it has a single loss.
    objectives: Objectives | None = None
    # If the optimizer computes the loss itself.
    closure: Closure = Closure.NONE
    # Activation checkpointing is on.
    recomputes: bool = False
    # Of `torch.compile`, for when the model is wrapped again; None: not compiled.
    compile_mode: str | None = None
    # Of the parameters as the model was built: checkpoints leave out those that are frozen and haven't changed since.
    # None: checkpoints hold all.
    initial_hashes: Mapping[str, str] | None = None
    progress: Progress = field(default_factory=Progress)
    # Metrics and tables of the last validation, after step `val_step`.
    val_metrics: dict[str, float] = field(default_factory=dict)
    val_step: int | None = None
    val_texts: dict[str, Table | Text] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.meter = Meter(varies=self.objectives is not None)
        self.reported = ReportedPairs()
        self.trainable = Trainable(self.bare_model)
        self.slots = SlotState(self.task, loader=self.train_loader, strategy=self.strategy, context=self.context)
        self.source_slots = SlotState(
            self.source, loader=self.train_loader, strategy=self.strategy, context=self.context
        )
        # Names of the parameters that are trained, in the checkpoint that was loaded.
        self._saved_trainable: Sequence[str] | None = None

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
        first_with_output = of_ranks.index((share.rank, True))
        return first_with_output == context.rank

    @property
    def source(self) -> Source | None:
        """What makes the batches, if the train part is a Source."""
        if isinstance(self.train_loader, SourceLoader):
            return self.train_loader.source
        return None

    @property
    def observers(self) -> list[Any]:
        """The task, which may have a callback's hooks, and the callbacks."""
        return [self.task, *self.callbacks.values()]

    @property
    def optimizers(self) -> list[Optimizer]:
        """One, or several in the order of the configuration."""
        if isinstance(self.optimizer, Optimizers):
            return list(self.optimizer.named.values())
        return [self.optimizer]

    def of(self, objective: Objective) -> tuple[Optimizer, Schedule | Schedules]:
        """Return the optimizer that an objective steps, and its schedule; one without a name steps all."""
        if not objective.name:
            return self.optimizer, self.schedule
        assert isinstance(self.optimizer, Optimizers), "objectives name one of several"
        assert isinstance(self.schedule, Schedules)
        return self.optimizer.named[objective.optimizer], self.schedule.named[objective.optimizer]

    def trained_in(self, objective: Objective) -> Sequence[nn.Parameter]:
        """Return the parameters that an objective trains."""
        if not objective.name:
            return self.trainable.parameters
        optimizer, _ = self.of(objective)
        parameters = []
        for group in optimizer.param_groups:
            parameters += [parameter for parameter in group["params"] if parameter.requires_grad]
        return parameters

    def update_trainable(self) -> None:
        """Have the strategy rebuild what depends on which parameters are trained, after a change of `requires_grad`.

        Raises ConfigError if no parameter is left to train.
        """
        changed = self.trainable.update()
        before = self.model
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
        buffers = {name: buffer.clone() for name, buffer in self.bare_model.named_buffers()}
        try:
            with isolated(self.task):
                yield
        finally:
            restore_generator_states(generators, devices=self.context.devices)
            with torch.no_grad():
                for name, buffer in self.bare_model.named_buffers():
                    if name in buffers:
                        buffer.copy_(buffers[name])

    @contextmanager
    def restored_afterwards(self) -> Iterator[None]:
        """Restore weights, optimizers, slots and the states of task and callbacks; the rest of the objects may change.

        Generators and which parameters are trained aren't restored here. Needs the memory of a copy of all this.
        """
        model = self.bare_model
        weights = copy.deepcopy(model.state_dict())
        optimizer = copy.deepcopy(self.optimizer.state_dict())
        states = []
        for observer in self.observers:
            save_hooks = hooks([observer], "state_dict")
            load_hooks = hooks([observer], "load_state_dict")
            # A class may have one of the two only.
            for save, load in zip(save_hooks, load_hooks, strict=False):
                states.append((load, copy.deepcopy(save())))
        try:
            with self.slots.restored_afterwards():
                yield
        finally:
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

    def evaluate(
        self,
        loaders: Mapping[str, Iterable[MicroBatch]],
        *,
        with_media: bool = False,
        inference_mode: bool = False,
    ) -> Evaluation:
        """Return the metrics of the weights that the bare model holds, on each set by its prefix.

        inference_mode: see `Evaluator`; only if no training follows.
        """
        evaluator = Evaluator(
            model=self.bare_model,
            task=self.task,
            precision=self.precision,
            context=self.context,
            with_media=with_media,
            counts=self.speaks_for_share,
            captures_graphs=self.compile_mode in CUDA_GRAPH_MODES,
            inference_mode=inference_mode,
        )
        with self.slots.set_aside():
            return evaluator.evaluate(loaders)

    def state_dict(self) -> dict[str, Any]:
        """Return what a later run needs to continue exactly. Every rank must call it; the same on every rank.

        `model` holds the weights to evaluate; if a callback averages them, `training` has those to train on. `shards`
        replaces it for a model that is spread over ranks: each rank has its part, with the optimizer's state.
        Raises RunError on every rank if ranks that should have the same weights, or the same state of the task or a
        callback, don't.
        """
        training: dict[str, Any] = {
            "strategy": self.strategy.state_dict(self.model),
            "task": {},
            "optimizer": with_python_numbers(self.optimizer.state_dict()),
            "schedule": with_python_numbers(self.schedule.state_dict()),
            "scaler": self.precision.scaler.state_dict(),
            "callbacks": {name: hook() for name, hook in self._callback_hooks("state_dict")},
        }
        for task_state in hooks([self.task], "state_dict"):
            training["task"] = without_model_state(task_state(), self.task, self.bare_model)
        left_out = self._left_out()
        if left_out:
            training[LEFT_OUT] = left_out
        if self.strategy.replicas_differ:
            own = {"model": _without(self.bare_model.state_dict(), left_out)}
            for name in ("optimizer", "callbacks", "task"):
                own[name] = training[name]
            training[REPLICAS] = gather_replicas(own, self.context)
        weights = self._weights_to_save(training, left_out)

        objects = self._named_observers()
        states = {f"callbacks.{name}": state for name, state in training["callbacks"].items()}
        states["task"] = training["task"]
        for source_state in hooks([self.source], "state_dict"):
            training["source"] = source_state()
            states["source"] = training["source"]
        of_ranks = gather_to_all(self._rank_state(objects, states), self.context)
        step = self.progress.step
        check_weights_are_equal([rank.weights for rank in of_ranks], step=step)
        prints = [rank.fingerprints for rank in of_ranks]
        others = states_of_ranks(objects, states, prints, step=step, context=self.context)
        if others:
            training[RANK_STATES] = others
        if self.slots:
            training[SLOTS] = self.slots.state_dict()
        if self.source_slots:
            training[SOURCE_SLOTS] = self.source_slots.state_dict()

        trainable: set[str] = set()
        for rank in of_ranks:
            trainable.update(rank.trainable)
        training |= {
            "progress": self.progress.state_dict(),
            "val_metrics": dict(self.val_metrics),
            "val_step": self.val_step,
            "meters": [rank.meter for rank in of_ranks],
            "reported": [rank.reported for rank in of_ranks],
            "trainable": sorted(trainable),
            "streams": [rank.stream for rank in of_ranks if rank.stream is not None],
            "data": common_identity([rank.data for rank in of_ranks]).state_dict(),
            "global_batch_size": self.train_loader.global_batch_size,
            "stop": {"reason": self.stop.reason, "wishes": [rank.stop_reason for rank in of_ranks]},
        }
        return {**weights, "training": training, "generators": [rank.generators for rank in of_ranks]}

    def _left_out(self) -> dict[str, str]:
        """Return the hashes of the parameters that a checkpoint leaves out: frozen, and as the model was built.

        A frozen parameter that something else has changed, such as a momentum encoder's, is saved.
        """
        if self.initial_hashes is None:
            return {}
        left_out = {}
        for name, parameter in self.bare_model.named_parameters(remove_duplicate=False):
            initial = self.initial_hashes.get(name)
            if not parameter.requires_grad and hash_of(parameter.detach()) == initial:
                left_out[name] = initial
        return left_out

    def _weights_to_save(self, training: dict[str, Any], left_out: Collection[str]) -> dict[str, Any]:
        """Return the entry `model`, or `shards` of a model that is spread over ranks.

        Adds to `training` what belongs to it: the optimizer's part in shards, or the weights to train on.
        """
        if is_model_sharded(self.bare_model):
            from framework.checkpoint.sharded_state import split_state  # takes most of a second to import

            shards, entries = split_state(self.bare_model, self.optimizer)
            training |= entries
            return {"shards": shards}
        if not self._weight_swaps():
            return {"model": _without(self.bare_model.state_dict(), left_out)}
        training["model"] = _without(self.bare_model.state_dict(), left_out)
        with self.evaluation_weights():
            # Copied, keeping tied weights tied: these tensors hold the average only while it is swapped in.
            return {"model": copy.deepcopy(_without(self.bare_model.state_dict(), left_out))}

    def _rank_state(self, objects: Mapping[str, Any], states: Mapping[str, Any]) -> RankState:
        """Return this rank's part of a checkpoint. objects, states: of task and callbacks, by name."""
        context = self.context
        replicas_differ = self.strategy.replicas_differ
        weights = WeightHashes(None, {})
        prints: Fingerprints = {}
        if context.world_size > 1:
            prints = fingerprints(objects, states, replicas_differ=replicas_differ)
            if not replicas_differ and self.strategy.shard_index is not None:
                weights = WeightHashes(self.strategy.shard_index, weight_hashes(self.bare_model))
        trainable: Sequence[str] = []
        # Rank 0 has all of them, unless each rank has its own stages.
        if context.is_main or self.strategy.num_stages is not None:
            trainable = self.trainable.names
        return RankState(
            generators=generator_states(context.devices),
            meter=self.meter.state_dict(),
            reported=self.reported.state_dict(),
            stop_reason=self.stop.own_reason,
            stream=self.train_loader.state_dict(),
            data=self.train_loader.identity,
            trainable=trainable,
            weights=weights,
            fingerprints=prints,
        )

    def load_state_dict(self, training: Mapping[str, Any]) -> None:
        """Load the `training` part of a `state_dict`, once the weights are there. Every rank must call it.

        New callbacks start from scratch. With another number of ranks, rank 0 gets all that wasn't logged yet.
        Checkpoints of earlier versions lack some of the entries.
        """
        self._saved_trainable = training.get("trainable")
        self.restore_trainable()
        self.strategy.load_state_dict(self.model, training.get("strategy", {}))
        if "task" in training:
            for load in hooks([self.task], "load_state_dict"):
                task_state = own_state("task", training["task"], training, self.context)
                load(with_model_state(task_state, self.task, self.bare_model))
        restore_optimizer(self.optimizer, training["optimizer"])
        self.schedule.load_state_dict(training["schedule"])
        self.precision.scaler.load_state_dict(training["scaler"])
        for name, load in self._callback_hooks("load_state_dict"):
            if name in training["callbacks"]:
                load(own_state(f"callbacks.{name}", training["callbacks"][name], training, self.context))

        self.slots.load_state_dict(training.get(SLOTS, {}))
        if "source" in training:
            for load in hooks([self.source], "load_state_dict"):
                load(own_state("source", training["source"], training, self.context))
        self.source_slots.load_state_dict(training.get(SOURCE_SLOTS, {}))

        self.progress.load_state_dict(training["progress"])
        samples = self.progress.samples
        if "data" in training:
            self.train_loader.load_identity(DataIdentity.load(training["data"]), samples=samples)
        self.train_loader.load_state_dict(training.get("streams", []), samples=self.progress.nominal_samples)
        self.val_metrics = dict(training.get("val_metrics", {}))
        self.val_step = training.get("val_step")
        self._load_unlogged(training.get("meters", []), training.get("reported", []))
        self.stop.load_state_dict(training.get("stop", {"reason": None, "wishes": []}))

    def _load_unlogged(self, meters: Sequence[Any], reported: Sequence[Any]) -> None:
        """Load what each rank had not logged yet. With another number of ranks, rank 0 gets all."""
        rank = self.context.rank
        if len(meters) == self.context.world_size:
            meters = meters[rank : rank + 1]
            reported = reported[rank : rank + 1]
        elif rank > 0:
            return
        self.meter.load_state_dicts(meters, device=self.context.device)
        self.reported.load_state_dicts(reported)

    def _weight_swaps(self) -> list[Callable[..., Any]]:
        """Return what swaps in the weights to evaluate: the optimizers, the callbacks, and last the strategy.

        The strategy averages what the others swap in.
        """
        swaps: list[Callable[..., Any]] = []
        for optimizer in self.optimizers:
            if has_evaluation_mode(optimizer):
                swaps.append(partial(weights_to_evaluate, optimizer))
        swaps += hooks(self.callbacks.values(), "evaluation_weights")
        if self.strategy.replicas_differ:
            swaps.append(self.strategy.evaluation_weights)
        return swaps

    def _named_observers(self) -> dict[str, Any]:
        """Return the task, the source and the callbacks by their names in messages."""
        observers: dict[str, Any] = {"task": self.task, "source": self.source}
        for name, callback in self.callbacks.items():
            observers[f"callbacks.{name}"] = callback
        return observers

    def _callback_hooks(self, name: str) -> list[tuple[str, Callable[..., Any]]]:
        """Return the callbacks' names, each with its hook `name`, if it has one."""
        named = []
        for key, callback in self.callbacks.items():
            named += [(key, hook) for hook in hooks([callback], name)]
        return named


def _without(state: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the state dict of a module without some of its entries."""
    if not names:
        return state
    # A copy has the versions that a module's state has as an attribute.
    kept = copy.copy(state)
    for name in names:
        kept.pop(name, None)
    return kept

"""What users implement (Task, Callback, Logger) and the values that are passed around.

Imports no torch at run time, so every layer may import this module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from framework import media
from framework.media import Media

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Generator, Tensor, nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

Batch = Any
"""What a dataset's samples collate to: a tensor, or a tuple or dict of tensors whose first dimension is the sample."""

Interval = Literal["step", "epoch", "evaluation"]
"""When `TaskHooks.logged` is called: after what its values are reduced."""

SumCount = tuple["Tensor | float", "Tensor | int"]
"""A metric as a sum over samples and their number, so that batches add up exactly."""


# Data

Collate = Callable[[list[Any]], Batch]
"""Makes a batch of samples."""


class MapDataset(Protocol):
    """A map-style dataset, as `torch.utils.data.Dataset` has it."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


AnyDataset = Any
"""A MapDataset, an IterableDataset, a DataLoader; to train on also a Source."""


class Order(Protocol):
    """The samples of an epoch in their order: an int64 tensor, or an object that computes what is read of it."""

    def __len__(self) -> int: ...
    def __getitem__(self, positions: slice, /) -> Tensor:
        """Return the int64 indices at positions [start, stop), where 0 <= start < stop <= len."""
        ...


class Sampler(Protocol):
    """The order of the train part's samples; see `framework.samplers`.

    It also has `__len__()`, the samples of an epoch; or `length(epoch)`, if epochs differ. Every process asks for
    itself, also for epochs to come, so the answer must depend on the epoch alone.
    """

    def order(self, generator: Generator, *args: Any, **kwargs: Any) -> Order:
        """Return the indices of an epoch in their order: as many as its length, drawn from `generator` alone.

        Called with the keyword `batch_size`: that many consecutive samples make a global batch. If the method has a
        parameter `epoch`, it gets the epoch, counted from 0.
        """
        ...


@dataclass(frozen=True)
class Datasets:
    """What `data.datasets` builds. Validation chooses the best checkpoint; test is looked at once, at the end.

    Each part is map-style, or a stream: torch's IterableDataset, which yields one sample after another. Or it is a
    DataLoader, of which dataset, collate function, batch size and sampler are taken. Several validation or test sets
    are a dict by name. The train part may be a Source, whose samples depend on the model.
    """

    train: AnyDataset
    val: AnyDataset | Mapping[str, AnyDataset] | None = None
    test: AnyDataset | Mapping[str, AnyDataset] | None = None
    _: KW_ONLY
    # Makes a batch of a list of samples, in place of torch's `default_collate`; a dict for each part.
    collate_fn: Collate | Mapping[str, Collate] | None = None
    # The order of the train part.
    sampler: Sampler | None = None
    # Used if `data.batch_size` is `auto`.
    batch_size: int | None = None
    # Used if `data.eval_batch_size` is `auto`.
    eval_batch_size: int | None = None
    # Used if `data.drop_last` is `null`.
    drop_last: bool | None = None

    def __iter__(self) -> Iterator[Any]:
        """Return train, val and test."""
        return iter((self.train, self.val, self.test))

    @property
    def parts(self) -> dict[str, AnyDataset]:
        """The datasets that are there: `train`, `val`, `test`; `val/NAME` for one of several."""
        return {"train": self.train, **self.sets("val"), **self.sets("test")}

    def sets(self, part: str) -> dict[str, AnyDataset]:
        """Return the datasets of `val` or `test` by the prefix of their metrics."""
        datasets = getattr(self, part)
        if datasets is None:
            return {}
        if isinstance(datasets, Mapping):
            return {f"{part}/{name}": dataset for name, dataset in datasets.items()}
        return {part: datasets}

    def collate_fn_of(self, part: str) -> Collate | None:
        """Return the collate function of one of the `parts`; None for torch's own."""
        if not isinstance(self.collate_fn, Mapping):
            return self.collate_fn
        # A function for `val` is that of all its sets.
        return self.collate_fn.get(part) or self.collate_fn.get(part.partition("/")[0])


# Steps


# Read-only: entries that a task added to a dict would be in all its later outputs, those of training too.
_NONE: Mapping[str, Any] = MappingProxyType({})


class StepOutput(NamedTuple):
    """What a task computes from one batch."""

    # Scalar, the *mean* over the batch's samples, with its graph in training.
    loss: Tensor
    # How many samples the mean is over: the weight of this loss in gradients and in logged and evaluated means.
    # 0: it has no samples, as when a collate function has dropped all, and the loss doesn't count.
    num_samples: int
    # Name → (sum over samples, count), the same names for every batch; tensors may stay on the device.
    metrics: Mapping[str, SumCount] = _NONE
    # What the mean is over, if not samples: the number of tokens that count, or the sum of sample weights; one element,
    # for every batch or for none. Gradients and logged losses are then of the mean over the global batch. It replaces
    # `num_samples` as the weight. `num_samples` may be 0 only if it is 0, too.
    weight: Tensor | float | None = None
    # In evaluations: name → arguments of `update` of that object in the task's attribute `metrics`, a StatefulMetric or
    # one of torchmetrics.
    updates: Mapping[str, tuple[Any, ...]] = _NONE
    # A function that returns name → Media, logged as `train/NAME` and `val/NAME`. Called on rank 0 only, for the first
    # micro-batch of a logged training step (after the optimizer's step) and for the first batch of an evaluation. It
    # must not use collectives. Not called under `strategy=pipeline`, where rank 0 has no output.
    media: Callable[[], Mapping[str, Media]] | None = None


class StatefulMetric(Protocol):
    """A metric that is no mean over samples, in a task's attribute `metrics`, a dict by name.

    It is reset, updated with each batch of this rank, merged with the states of all ranks, and computed. It may have
    two further methods, called after `compute`: `text()` returns a Table, or a string in Markdown, which is also kept
    in `run.json` and printed by `job=eval`; `media()` returns Media, or Media by name (the empty name is the metric's
    own). `media` is called on rank 0 only, and only if there is a logger.
    """

    def reset(self) -> None: ...
    def update(self, *arguments: Any) -> None: ...
    def state(self) -> Any:
        """Return what `merge` takes: tensors and plain types, in dicts, lists and tuples."""
        ...

    def merge(self, state: Any) -> None:
        """Add the state of a rank, which may have had no batch."""
        ...

    def compute(self) -> float | Tensor | Mapping[str, Any]:
        """Return one number, or a mapping of names to numbers and vectors; vectors are logged as tables."""
        ...


class Objective(NamedTuple):
    """One of several losses of a task, each with a backward and an optimizer step of its own.

    In each training step the objectives that are due run one after another on the same global batch. A task with the
    attribute `objectives`, a sequence of these, needs no `training_step`.
    """

    # Of its metrics in the logs: `train/NAME/loss`.
    name: str
    # A method of the task with the arguments of `training_step`, `info` included; it calls the model once.
    step: Callable[..., StepOutput]
    # The name of the optimizer to step, in the section `optimizer`; gradients of other parameters are dropped.
    optimizer: str
    # Due in steps `every`, 2 * `every`, …
    every: int = 1
    # Due that many steps earlier.
    offset: int = 0


class LRSchedulerConfig(NamedTuple):
    """A scheduler with its own interval, which `scheduler.schedule` may return. The names are Lightning's."""

    scheduler: LRScheduler
    # When to step; ReduceLROnPlateau steps after validations. never: the task steps it.
    interval: Literal["step", "epoch", "never"] = "epoch"
    # Step at every n-th of these.
    frequency: int = 1
    # The metric of ReduceLROnPlateau.
    monitor: str | None = None
    # Raise if a validation doesn't compute that metric.
    strict: bool = True
    # How to step it, if not by its own method: called with it and the value of the metric, or None.
    step: Callable[[Any, Any], None] | None = None


class MicroBatch(NamedTuple):
    """The input of one forward and backward of one rank."""

    batch: Batch
    # 0: a stand-in, whose loss has weight 0.
    num_samples: int


class MicroIndices(NamedTuple):
    """The dataset indices of one micro-batch."""

    # int64; of a stream, the positions. As many as the batch has samples.
    indices: Tensor
    # Their number; 0 for a stand-in.
    num_samples: int


class Span(NamedTuple):
    """Samples at the positions [begin, end) of the epoch's order."""

    begin: int
    end: int


class Passed(NamedTuple):
    """The global batches that a loader has passed over around a window, since their steps are skipped."""

    # Right before the window.
    dropped: tuple[Span, ...] = ()
    # Right before it, too: these are trained at the end of the epoch.
    deferred: tuple[Span, ...] = ()
    # The window itself was deferred.
    is_late: bool = False
    # Between the epoch's last window and the end.
    after: tuple[Span, ...] = ()


class Window(NamedTuple):
    """What one rank contributes to one optimizer step: its micro-batches of one global batch."""

    micro_batches: Iterator[MicroBatch]
    num_micro_batches: int
    # Samples of the global batch over all ranks and micro-batches; the same on every rank.
    global_count: int
    # This is the epoch's last window.
    epoch_end: bool
    # Of each micro-batch.
    indices: tuple[MicroIndices, ...] = ()
    # The first rank that has a sample of the window; None if that is always rank 0.
    first_rank: int | None = None
    # Samples that each rank has; None: `framework.data.batching.share` splits them.
    sizes: Sequence[int] | None = None
    # What is passed over around it; None: nothing.
    passed: Passed | None = None


class DataShare(NamedTuple):
    """The samples a rank gets: part `rank` of `world_size`, the same for all ranks that share a copy of the model."""

    rank: int
    world_size: int
    # The number of pieces each batch is cut into.
    micro_batches: int = 1


# What tasks, sources, callbacks and loggers receive


def _same(rows: Tensor) -> Tensor:
    return rows


@dataclass(frozen=True)
class BatchInfo:
    """What a task's `training_step(model, batch, info)` gets about its micro-batch, if it has a parameter `info`.

    `Source.batch` gets it, too.

    Later versions may add attributes.
    """

    # Optimizer steps done before this one.
    step: int
    # Counted from 0.
    epoch: int
    # Samples of the global batch, over all ranks and micro-batches.
    global_count: int
    # This rank has no samples for the micro-batch and got another batch in their place, whose loss has weight 0. A task
    # that exchanges samples between ranks must still take part, but send none of these; `gather` does so.
    is_stand_in: bool
    # The position of each sample of the micro-batch in the global batch, from 0: int64, on the batch's device. It
    # doesn't depend on the number of processes. Of a stand-in: zeros. Under `strategy=pipeline`, of all samples of this
    # copy of the model, not of one micro-batch.
    positions: Tensor = field(compare=False)
    # Takes a tensor with a row for each sample of the micro-batch; returns the rows of the whole global batch, in its
    # order, so that row `positions[i]` is row i of what was given. Rows of stand-ins are left out. Every process must
    # call it, and gradients flow back through it: the loss must depend on the result on every process, stand-ins
    # included, or on none. The gradient is that of the mean over the global batch if each loss is the mean over this
    # micro-batch's samples, or over the whole global batch. Refused with gradient accumulation.
    gather: Callable[[Tensor], Tensor] = field(default=_same, compare=False)


class Source:
    """A train part whose samples depend on the model, such as the episodes of a policy. Inherit from it.

    Each batch is made after the last optimizer step; nothing is loaded ahead. If a source has `state_dict` and
    `load_state_dict`, checkpoints keep its state, which must be the same on all ranks. What belongs to the samples by
    their places in the global batch, such as environments that go on, is named by `slot_state`, as in a task.
    """

    def __len__(self) -> int:
        """Return the samples of an epoch, the same in every epoch."""
        raise NotImplementedError

    def batch(self, model: nn.Module, info: BatchInfo) -> Batch:
        """Return this rank's micro-batch of the next global batch, with a sample for each of `info.positions`.

        What is drawn for a sample should depend on (seed, `info.step`, position) alone, so that it is the same on any
        number of processes. Called on every rank, without gradients.

        model: the unwrapped module, in evaluation mode.
        """
        raise NotImplementedError


class StepInfo(NamedTuple):
    """What callbacks learn after an optimizer step. Tensors stay on the device: reading one waits for it."""

    # Optimizer steps done, this one included.
    step: int
    # Of this step, counted from 0.
    epoch: int
    # Of this rank's last micro-batch, detached.
    loss: Tensor
    # Samples of the step over all ranks.
    global_count: int
    # Which samples this rank's micro-batches took.
    indices: tuple[MicroIndices, ...] = ()
    # This was the epoch's last step.
    epoch_end: bool = False
    # What names the step in `data.skip_steps`; 0 for one that was deferred.
    number: int = 0


class MicroBatchInfo(NamedTuple):
    """What callbacks learn before the forward of a micro-batch."""

    # As the task gets it.
    batch: Batch
    # Counted from 0, in this rank's part of the global batch.
    number: int
    # 0: a stand-in, whose loss has weight 0.
    num_samples: int
    # The dataset's index of each sample, int64; of a stream, its position. None if that is unknown.
    indices: Tensor | None
    # The name of the task's objective; empty if it has a single loss.
    objective: str = ""


class EpochInfo(NamedTuple):
    """Where training is between two steps."""

    # Counted from 0.
    epoch: int
    # Optimizer steps done.
    step: int
    # A resumed run continues in the middle of this epoch, which began in an earlier process.
    resumed: bool = False


class EvalInfo(NamedTuple):
    """The result of an evaluation, the same on every rank."""

    # `val` or `test`.
    part: str
    # Optimizer steps done.
    step: int
    # Counted from 0.
    epoch: int
    # Of the whole part. Names begin with the part: `val/loss`.
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class FitInfo:
    """What callbacks and loggers learn before the first step.

    Model and optimizer may be read, kept and given hooks; changing them changes the training.
    """

    # The unwrapped module.
    model: nn.Module
    # Optimizer steps done before this start.
    start_step: int
    # These steps, plus those left; None if that is unknown, as with a stream.
    total_steps: int | None
    # None if that is unknown, or if epochs differ.
    steps_per_epoch: int | None
    max_epochs: int | None
    optimizer: Optimizer
    # Of the epoch that a resumed run continues; None if training starts at an epoch's beginning.
    steps_left_in_epoch: int | None = None
    # A GradScaler scales the losses, and skips updates whose gradients overflow.
    scales_losses: bool = False
    # Returns the buffers of the model's BatchNorm layers, by name, for the weights to evaluate: means over the batches
    # of the last epoch, as `torch.optim.swa_utils.update_bn` computes them. Takes a forward pass over the training
    # data. Every rank must call it, after the last step of an epoch and before the next.
    batchnorm_statistics: Callable[[], Mapping[str, Tensor]] = field(default=dict, compare=False)
    # Returns the steps of an epoch by its number; None if that is unknown. Epochs differ if the sampler says so.
    steps_of_epoch: Callable[[int], int | None] = field(default=lambda _: None, compare=False)
    # Calls the function that it is given with the name of each part of a step when that begins, until it is given None:
    # data, forward, backward, optimizer, logging (callbacks, too), waiting (for other ranks, where that is known), and
    # outside (of steps: logs, validations, checkpoints).
    observe_phases: Callable[[Callable[[str], None] | None], None] = field(default=lambda _: None, compare=False)


_LOGGED_BY_TRAINING = re.compile(r"loss|mfu|(samples|steps|tflop)_per_s|(lr|grad_norm)(/.+)?")


def is_logged_by_training(name: str) -> bool:
    """Return True if training itself logs `train/NAME`."""
    return _LOGGED_BY_TRAINING.fullmatch(name) is not None


class Stop(NamedTuple):
    """Returned by a callback to end training on all ranks."""

    reason: str


@dataclass(frozen=True)
class Log:
    """Values to log, returned by a callback's hook."""

    # Name → a number or Media, of which rank 0's is logged at once; or a pair (sum, count), logged as the mean over the
    # ranks that return it: after the validation for validation hooks, else at the next log, accumulated since the last
    # one. Ranks may return different names, or nothing. Names are prefixed with `val/` in validation hooks, else with
    # `train/`.
    values: Mapping[str, float | Tensor | SumCount | Media]
    # Ends training, too.
    stop: Stop | None = None


class InitialTraining(NamedTuple):
    """The progress of a training that another program began, and the states of its optimizers and schedules."""

    # Epochs and optimizer steps done.
    epoch: int
    step: int
    # State dicts, one for each optimizer and schedule.
    optimizers: list[dict[str, Any]]
    schedules: list[dict[str, Any]]


# What users implement


@runtime_checkable
class Task(Protocol):
    """Defines what a step computes. Both methods get the model as wrapped by the strategy and a batch on its device.

    `validation_step` may be left out if there is no data to evaluate. A constructor that takes `model` gets it with the
    weights of `init_from`, and may copy it.

    `training_step`, or the step of an Objective, may have a third parameter `info`: it gets a BatchInfo.

    A task may be an `nn.Module`, or have modules as attributes, such as a loss with weights: they are moved to the
    device (the replica's first one) and converted to the type of `trainer.precision=bf16-true` or `64-true`. Those of
    their parameters that require gradients are trained: they become parameters of the model, as `task.ATTRIBUTE`.
    Tensors that aren't in a module or an `nn.Parameter` stay where they are. If the task has
    `state_dict` and `load_state_dict`, as every `nn.Module`, checkpoints keep its state, which must be the same on all
    ranks. With `state_is_per_rank = True`, each rank has its own, and the run resumes on as many ranks. `Supervised`
    has no state: its loss is as configured.

    `slot_state = {"hidden": 1}` names attributes that belong to samples, by their places in the global batch, and the
    dimension of their tensors for that place; see docs/own_code.md.
    """

    def training_step(self, model: nn.Module, batch: Batch) -> StepOutput: ...
    def validation_step(self, model: nn.Module, batch: Batch) -> StepOutput: ...


class TaskHooks(Protocol):
    """Hooks that a task may have, besides all `on_` hooks of a Callback. One that is left out costs nothing."""

    def on_sanity_check_start(self) -> None:
        """Called before the first validation batches are tried, which is before `on_fit_start`, if they are."""

    def observe_samples(self, batch: Batch) -> None:
        """Called before training with all samples as one batch, if they are kept in memory.

        A tensor that a `framework.transforms.Each` changes stands in the batch as None; with any other transform the
        hook isn't called. The batch may have rows that aren't trained on.
        """

    def on_evaluations_start(self, model: nn.Module, prefixes: Sequence[str]) -> None:
        """Called before the sets of a part are evaluated, one after another; see `on_evaluation_start`."""

    def on_evaluations_end(self) -> None:
        """Called after the last of these sets, still in evaluation mode."""

    def logged_evaluations(self) -> Mapping[str, float]:
        """Return metrics of these sets that the task reduces itself over ranks, such as `NAME/acc` and `mean_acc`."""
        return {}

    def on_evaluation_start(self, model: nn.Module, prefix: str) -> None:
        """Called before the first batch of an evaluated set. prefix: of its metrics: val, val/NAME, test or train."""

    def on_evaluation_end(self) -> None:
        """Called after the last batch of the set, still in evaluation mode."""

    def logged(self, interval: Interval) -> Mapping[str, float]:
        """Return metrics since the last call for this interval, reduced over ranks by the task itself.

        Called on every rank at the same point: when a step is logged, at the end of an epoch or of an evaluation.
        """
        return {}

    def without_side_effects(self) -> AbstractContextManager[None]:
        """Return a context that restores the task's state, for a batch whose results are dropped."""
        return nullcontext()

    def repeating(self, num_batches: int) -> AbstractContextManager[None]:
        """Return a context in which `training_step` gets the step's batches again, and what it logs is dropped.

        It is for optimizers that need loss and gradients several times in a step, such as LBFGS.
        """
        return nullcontext()

    def initial_training(self, content: Mapping[str, Any], *, source: Path) -> InitialTraining:
        """Return how to continue the training of the checkpoint `source`, which is `init_from`: init.training=true.

        content: what the file holds. Raise CheckpointError if that isn't possible.
        """
        raise NotImplementedError

    def own_callbacks(self) -> Mapping[str, Callback]:
        """Return callbacks, by name, that observe training besides those of the configuration."""
        return {}

    def checkpoint_keys(self) -> Mapping[str, Any]:
        """Return keys of the section `checkpoint` that the task decides, such as `monitor`."""
        return {}

    def observe_run(self, loggers: Mapping[str, Logger], callbacks: Mapping[str, Callback], folder: Path) -> None:
        """Called before `on_fit_start`, once all is built. loggers: by name, empty except on rank 0. folder: the run's.

        The state of a resumed run isn't loaded yet.
        """

    def run_step(self, window: Window, tools: StepTools) -> Tensor:
        """Make a whole training step in place of the trainer; return the detached loss of the last micro-batch.

        Looked up before the first step, on the object. Strategies that make the passes themselves are refused.
        """
        raise NotImplementedError


class Callback:
    """Observes training on every rank. Override the hooks you need: one that isn't overridden costs nothing.

    Hooks are bound once before the first step. A hook that returns `Stop` ends training: at once with one rank, else
    after the next log, validation or epoch, when the ranks agree (doing so in every step would cost a collective). One
    that returns `Log` has its values logged, by whichever loggers there are.

    A subclass may have methods of its own, but none whose name begins with `on_` or is nearly that of a hook: a
    misspelt hook would never be called, so it is refused when the callback is built. Names that begin with an
    underscore are free. A class that doesn't inherit from this one is a callback if it has one of the hooks.
    """

    # Each rank has a state of its own: all are saved, and the run resumes on as many ranks.
    state_is_per_rank: ClassVar[bool] = False
    # The ranks' states may differ: rank 0's is saved, and all ranks get it.
    state_is_rank_zero: ClassVar[bool] = False

    def on_fit_start(self, info: FitInfo) -> None:
        """Called before the first step, after the state was loaded."""

    def on_train_epoch_start(self, info: EpochInfo) -> Stop | Log | None:
        """Called before the first step of an epoch.

        If a run resumes in the middle of one, it is called again, with `info.resumed`, since what it had set up was
        lost with the earlier process. What a checkpoint holds (weights, optimizer, the state of task and callbacks) is
        restored afterwards, so that no change is made twice; the return value is then ignored.
        """
        return None

    def on_micro_batch_start(self, info: MicroBatchInfo) -> None:
        """Called before the forward of each micro-batch, again for each loss of a task. Not under strategy=pipeline."""

    def on_micro_batch_output(self, output: StepOutput) -> None:
        """Called with what the task has computed from that micro-batch: usually before its backward."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called with the gradients averaged over ranks and unscaled, before they are clipped."""

    def on_gradient_norm(self, norm: Tensor, objective: str) -> bool:
        """Called before each update with the 2-norm of the gradients, unscaled and before they are clipped.

        Return True, the same on every rank, to leave out the update: the step counts, but neither the optimizer nor its
        schedule makes one. `objective` is empty if the task has a single loss. Refused for a task or an optimizer that
        runs its steps itself.
        """
        return False

    def on_train_step_end(self, info: StepInfo) -> Stop | Log | None:
        """Called after each optimizer step."""
        return None

    def on_train_epoch_end(self, info: EpochInfo) -> Stop | Log | None:
        """Called after the last step of epoch `info.epoch` and its validation, before its checkpoint."""
        return None

    def on_validation_start(self, info: EpochInfo) -> Stop | Log | None:
        """Called before a validation, with the weights that are trained."""
        return None

    def on_validation_end(self, info: EvalInfo) -> Stop | Log | None:
        """Called after a validation, with its metrics over all ranks."""
        return None

    def on_nonfinite(self) -> str:
        """Called before training fails because a loss or weight isn't finite. What it returns is added to the error.

        Called on every rank, whichever has the loss or weight.
        """
        return ""

    def on_fit_end(self) -> None:
        """Called after the last step, once its checkpoint is written."""

    def close(self) -> None:
        """Called at the end of the run, also after an error."""

    def evaluation_weights(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which `model` holds the weights to evaluate and save as the best, such as an average."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: plain types and tensors only, by default the same on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned. Called before `on_fit_start`."""


class Logger:
    """Writes what a run logs, on rank 0 only. Override `log`, and of the others what you need.

    A subclass may have methods of its own, but none whose name begins with `on_` or is nearly that of a method of this
    class: it would never be called, so it is refused when the logger is built. Names that begin with an underscore are
    free. A class that doesn't inherit from this one is a logger if it has `log`.
    """

    def start(self, info: FitInfo) -> None:
        """Called before the first step. Remove what an earlier process logged after step `info.start_step`."""

    def log(self, values: Mapping[str, float | Media], *, step: int, epoch: int) -> None:
        """Write numbers (float) and media (see `framework.media`) by their names; ignore media that you can't show.

        Called before `start`, too, with texts about the run. Afterwards figures are closed, and tensors may change.

        step: optimizer steps done. epoch: that of the last of these steps, counted from 0.
        """

    def flush(self) -> None:
        """Make what was logged survive a kill. Called before each checkpoint: a resumed run doesn't log it again."""

    def close(self) -> None:
        """Called at the end of the run, also after an error."""

    def on_train_step_end(self, info: StepInfo) -> None:
        """Called after each optimizer step, to show progress. It must cost next to nothing."""

    def on_results(self, metrics: Mapping[str, float]) -> None:
        """Called once, when training and test are done; not in a run that fails or is stopped on request.

        metrics: of the last validation and the test under their own names, and `best/NAME`, the monitored one of the
        best checkpoint.
        """


def hooks(observers: Iterable[Any], name: str) -> list[Callable[..., Any]]:
    """Return the bound method `name` of each observer that has its own: an inherited no-op costs nothing."""
    no_ops = [vars(base)[name] for base in (Callback, Logger, TaskHooks) if name in vars(base)]
    methods = []
    for observer in observers:
        method = getattr(observer, name, None)
        if method is not None and getattr(method, "__func__", method) not in no_ops:
            methods.append(method)
    return methods


def described_hook(hook: Callable[..., Any]) -> str:
    """Return the name of what `hooks` returned, after the class of its object: `EarlyStopping.on_validation_end`."""
    name = getattr(hook, "__name__", repr(hook))
    if not hasattr(hook, "__self__"):
        return name
    return f"{type(hook.__self__).__name__}.{name}"


# What the engine passes to lower layers


class StepTools(Protocol):
    """The parts of the trainer's own step, for a task that runs its steps itself: see `TaskHooks.run_step`.

    Such a task takes the micro-batches of a window one after another. Around each is `isolated`, and in it, around
    forward and backward, `passes`, unless the task averages gradients itself.
    """

    # As wrapped by the strategy.
    @property
    def model(self) -> nn.Module: ...

    @property
    def formats(self) -> NumberFormats: ...

    @property
    def scaler(self) -> GradScaler: ...

    # A log follows this step.
    @property
    def logs(self) -> bool: ...

    def mark(self, phase: int) -> None:
        """Note the phase of this rank, a `RankPhase`, for the monitor."""

    def isolated(self, micro: MicroBatch) -> AbstractContextManager[Any]:
        """Return the context in which a stand-in changes nothing but gradients; for other micro-batches it is empty."""
        ...

    def passes(self, *, synchronise: bool) -> AbstractContextManager[Any]:
        """Return what surrounds forward and backward; gradients are averaged over ranks if `synchronise`."""
        ...

    def forward(self, micro: MicroBatch, *, window: Window, index: int) -> StepOutput:
        """Return what the task's `training_step` computes from a micro-batch. index: in its window, from 0."""
        ...

    def before_micro_batch(self, batch: Batch, micro: MicroBatch, *, window: Window, index: int) -> None:
        """Call the hooks of callbacks that `forward` calls first, for a task that doesn't use it."""

    def after_output(self, output: StepOutput) -> None:
        """Call the hooks of callbacks that `forward` calls last."""

    def weighted(self, output: StepOutput, micro: MicroBatch, *, window: Window) -> Tensor:
        """Return the loss, multiplied by what makes a mean over ranks that of the global batch."""
        ...

    def share(self, micro: MicroBatch, *, window: Window) -> float:
        """Return that factor, for a loss that is the mean over the samples of the micro-batch."""
        ...

    def begin_sum(self) -> None:
        """Begin to sum over ranks what losses are weighted by. To be called before the last backward."""

    def divide(self, window: Window) -> None:
        """Turn averaged gradients into those of the weighted mean."""

    def note(self, output: StepOutput, micro: MicroBatch) -> None:
        """Have the loss of a micro-batch logged."""

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Call the hooks of that name, of the task, too."""

    def note_rates(self) -> None:
        """Have the learning rates of this step logged. To be called before a schedule moves on."""

    def note_norm(self, name: str, norm: Tensor) -> None:
        """Have the norm of gradients logged."""

    def clip(self, parameters: Sequence[Tensor], value: float | None, algorithm: str) -> Tensor | None:
        """Clip gradients by `norm` or `value`; with None only compute their norm. Return the norm before, if known."""
        ...

    def step_schedule(self) -> None:
        """Step the schedule, if it steps after optimizer steps."""

    def finish(self, window: Window) -> None:
        """End the step: to be called once, after the last optimizer step."""


class NumberFormats(Protocol):
    """Computes in the formats of `trainer.precision`: `framework.optim.precision.PrecisionPlugin`."""

    def autocast(self) -> AbstractContextManager[Any]: ...
    def convert_batch(self, batch: Batch) -> Batch: ...


class Waiting(Protocol):
    """Records when this rank waits for others within a step, so that it isn't blamed for being slow."""

    def begin_waiting(self) -> None:
        """Waiting ends with `end_waiting`, or when the next phase begins."""

    def end_waiting(self) -> None: ...

    def waiting_unknown(self) -> None:
        """Report that the time this rank has waited is unknown."""


# Names of earlier versions, which pickled objects of runs and users' imports refer to.
EpochReport = EpochInfo
EvalReport = EvalInfo
Phase = Objective
Report = Log
StepReport = StepInfo
Artifact = media.Artifact
Figure = media.Figure
Histogram = media.Histogram
Image = media.Image
Table = media.Table
Text = media.Text

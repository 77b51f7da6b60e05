"""What users implement (Task, Callback, Logger) and the values that are passed around.

Imports no torch at run time, so every layer may import this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from framework.media import Image, Media, Table

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

Batch = Any
"""What a dataset's samples collate to: a tensor, or a tuple or dict of tensors whose first dimension is the sample."""

Interval = Literal["step", "epoch", "evaluation"]
"""When `TaskHooks.logged` is called: after what its values are reduced."""

SumCount = tuple["Tensor | float", "Tensor | int"]
"""A metric as a sum over samples and their number, so that batches add up exactly."""


Collate = Callable[[list[Any]], Batch]
"""Makes a batch of samples."""


class MapDataset(Protocol):
    """A map-style dataset, as `torch.utils.data.Dataset` has it."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


AnyDataset = Any
"""A MapDataset, an IterableDataset, or a DataLoader."""


class Sampler(Protocol):
    """The order of the train part's samples; see `framework.samplers`."""

    def __len__(self) -> int:
        """Return the samples of an epoch, the same in every epoch."""
        ...

    def order(self, generator: Generator, *, batch_size: int) -> Tensor:
        """Return the indices of an epoch in their order: shape (len,), int64, drawn from `generator` alone.

        Consecutive `batch_size` samples make a global batch.
        """
        ...


@dataclass(frozen=True)
class Datasets:
    """What `data.datasets` builds. Validation chooses the best checkpoint; test is looked at once, at the end.

    Each part is map-style, or a stream: torch's IterableDataset, which yields one sample after another. Or it is a
    DataLoader, of which dataset, collate function, batch size and sampler are taken. Several validation or test sets
    are a dict by name.

    collate_fn: makes a batch of a list of samples, in place of torch's `default_collate`; a dict for each part.
    sampler: the order of the train part. batch_size, eval_batch_size: if `data` says `auto`. drop_last: if `data` says
        `null`.
    """

    train: AnyDataset
    val: AnyDataset | Mapping[str, AnyDataset] | None = None
    test: AnyDataset | Mapping[str, AnyDataset] | None = None
    _: KW_ONLY
    collate_fn: Collate | Mapping[str, Collate] | None = None
    sampler: Sampler | None = None
    batch_size: int | None = None
    eval_batch_size: int | None = None
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
        given = getattr(self, part)
        if isinstance(given, Mapping):
            return {f"{part}/{name}": each for name, each in given.items()}
        return {} if given is None else {part: given}

    def collate_fn_of(self, part: str) -> Collate | None:
        """Return the collate function of one of the `parts`; None for torch's own."""
        given = self.collate_fn
        return (given.get(part) or given.get(part.partition("/")[0])) if isinstance(given, Mapping) else given


class StepOutput(NamedTuple):
    """What a task computes from one batch.

    loss: scalar, the *mean* over the batch's samples, with its graph in training.
    num_samples: how many samples the mean is over: the weight of this loss in gradients and in logged and evaluated
        means. 0: it has no samples, as when a collate function has dropped all, and the loss doesn't count.
    metrics: name → (sum over samples, count), the same names for every batch; tensors may stay on the device.
    weight: what the mean is over, if not samples: the number of tokens that count, or the sum of sample weights; one
        element, for every batch or for none. Gradients and logged losses are then of the mean over the global batch.
        It replaces `num_samples` as the weight. `num_samples` may be 0 only if it is 0, too.
    updates: in evaluations: name → arguments of `update` of that object in the task's attribute `metrics`, a
        StatefulMetric or one of torchmetrics.
    media: a function that returns name → Media, logged as `train/NAME` and `val/NAME`. Called on rank 0 only, for the
        first micro-batch of a logged training step (after the optimizer's step) and for the first batch of an
        evaluation. It must not use collectives. Not called under `strategy=pipeline`, where rank 0 has no output.
    """

    loss: Tensor
    num_samples: int
    metrics: Mapping[str, SumCount] = {}
    weight: Tensor | float | None = None
    updates: Mapping[str, tuple[Any, ...]] = {}
    media: Callable[[], Mapping[str, Media]] | None = None


class StatefulMetric(Protocol):
    """A metric that is no mean over samples, in a task's attribute `metrics`, a dict by name.

    It is reset, updated with each batch of this rank, merged with the states of all ranks, and computed. It may have
    `text()`, which returns a table to log as text, and `media()`, which returns Media, or Media by name (the empty name
    is the metric's own). Both are called after `compute`; `media` on rank 0 only, and only if there is a logger.
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


class Phase(NamedTuple):
    """One of several losses of a task, each with a backward and an optimizer step of its own.

    In each training step the phases that are due run one after another on the same global batch. A task with the
    attribute `phases`, a sequence of these, needs no `training_step`.

    name: of its metrics in the logs, `train/NAME/loss`. step: a method of the task with the arguments of
    `training_step`, `info` included; it calls the model once. optimizer: the name of the one to step, in the section
    `optimizer`; gradients of other parameters are dropped. every: due in steps `every`, 2 * `every`, …; offset: that
    many steps earlier.
    """

    name: str
    step: Callable[..., StepOutput]
    optimizer: str
    every: int = 1
    offset: int = 0


class LRSchedulerConfig(NamedTuple):
    """A scheduler with its own interval, which `scheduler.schedule` may return. The names are Lightning's.

    interval: `step` or `epoch`; ReduceLROnPlateau steps after validations. frequency: step at every n-th of these.
    monitor: the metric of ReduceLROnPlateau. strict: raise if a validation doesn't compute it.
    """

    scheduler: LRScheduler
    interval: Literal["step", "epoch"] = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True


class MicroBatch(NamedTuple):
    """The input of one forward and backward of one rank. `num_samples` 0: a stand-in, whose loss has weight 0."""

    batch: Batch
    num_samples: int


class MicroIndices(NamedTuple):
    """The dataset indices of one micro-batch, int64. `num_samples`: their number; 0 for a stand-in, which has one."""

    indices: Tensor
    num_samples: int


class Window(NamedTuple):
    """What one rank contributes to one optimizer step: its micro-batches of one global batch.

    global_count: samples of the global batch over all ranks and micro-batches; the same on every rank.
    epoch_end: this is the epoch's last window. indices: of each micro-batch; positions if it is a stream.
    first_rank: the first rank that has a sample of the window; None if that is always rank 0.
    """

    micro_batches: Iterator[MicroBatch]
    num_micro_batches: int
    global_count: int
    epoch_end: bool
    indices: tuple[MicroIndices, ...] = ()
    first_rank: int | None = None


class DataShare(NamedTuple):
    """The samples a rank gets: part `rank` of `world_size`, the same for all ranks that share a copy of the model.

    micro_batches: the number of pieces each batch is cut into.
    """

    rank: int
    world_size: int
    micro_batches: int = 1


@dataclass(frozen=True)
class BatchInfo:
    """What a task's `training_step(model, batch, info)` gets about its micro-batch, if it has a parameter `info`.

    Later versions may add attributes.
    """

    # Optimizer steps done before this one.
    step: int
    # Counted from 0.
    epoch: int
    # Samples of the global batch, over all ranks and micro-batches.
    global_count: int
    # This rank has no samples for the micro-batch and got another batch in their place, whose loss has weight 0. A task
    # that exchanges samples between ranks must still take part, but send none of these.
    is_stand_in: bool


class StepInfo(NamedTuple):
    """What observers learn after an optimizer step. Tensors stay on the device: reading one waits for it.

    step: optimizer steps done, this one included. epoch: of this step, from 0.
    loss: of this rank's last micro-batch, detached. global_count: samples of the step over all ranks.
    indices: which samples this rank's micro-batches took. epoch_end: this was the epoch's last step.
    """

    step: int
    epoch: int
    loss: Tensor
    global_count: int
    indices: tuple[MicroIndices, ...] = ()
    epoch_end: bool = False


class EpochInfo(NamedTuple):
    """Where training is between two steps. epoch: from 0. step: optimizer steps done.

    resumed: a resumed run continues in the middle of this epoch, which began in an earlier process.
    """

    epoch: int
    step: int
    resumed: bool = False


class EvalInfo(NamedTuple):
    """Metrics of a whole part (`val` or `test`), the same on every rank. Names begin with the part: `val/loss`."""

    part: str
    step: int
    epoch: int
    metrics: Mapping[str, float]


class Stop(NamedTuple):
    """Returned by a callback to end training on all ranks."""

    reason: str


@dataclass(frozen=True)
class Log:
    """Values to log, returned by a callback's hook. `stop` ends training, too.

    values: name → a number or Media, of which rank 0's is logged at once; or a pair (sum, count), logged as the mean
        over the ranks that return it: after the validation for validation hooks, else at the next log, accumulated
        since the last one. Ranks may return different names, or nothing. Names are prefixed with `val/` in validation
        hooks, else with `train/`.
    """

    values: Mapping[str, float | Tensor | SumCount | Media]
    stop: Stop | None = None


@dataclass(frozen=True)
class FitInfo:
    """What observers learn before the first step. `model` is the unwrapped module.

    Model and optimizer may be read, kept and given hooks; changing them changes the training. With a stream the number
    of steps may be unknown.

    total_steps: steps done before this start, plus those left. steps_left_in_epoch: of the epoch that a resumed run
        continues; None if training starts at an epoch's beginning.
    batchnorm_statistics: returns the buffers of the model's BatchNorm layers, by name, for the weights to evaluate:
        means over the batches of the last epoch, as `torch.optim.swa_utils.update_bn` computes them. Takes a forward
        pass over the training data. Every rank must call it, after the last step of an epoch and before the next.
    """

    model: nn.Module
    start_step: int
    total_steps: int | None
    steps_per_epoch: int | None
    max_epochs: int | None
    optimizer: Optimizer
    steps_left_in_epoch: int | None = None
    batchnorm_statistics: Callable[[], Mapping[str, Tensor]] = field(default=dict, compare=False)


@runtime_checkable
class Task(Protocol):
    """Defines what a step computes. Both methods get the model as wrapped by the strategy and a batch on its device.

    `training_step`, or the step of a Phase, may have a third parameter `info`: it gets a BatchInfo.

    A task may be an `nn.Module`, or have modules as attributes, such as a loss with weights: they are moved to the
    device (the replica's first one) and converted to the type of `trainer.precision=bf16-true` or `64-true`, and none
    of their parameters may require gradients. Tensors that aren't in a module stay where they are. If the task has
    `state_dict` and `load_state_dict`, as every `nn.Module`, checkpoints keep its state, which must be the same on all
    ranks. With `state_is_per_rank = True`, each rank has its own, and the run resumes on as many ranks. `Supervised`
    has no state: its loss is as configured.
    """

    def training_step(self, model: nn.Module, batch: Batch) -> StepOutput: ...
    def validation_step(self, model: nn.Module, batch: Batch) -> StepOutput: ...


class TaskHooks(Protocol):
    """Hooks that a task may have, besides all `on_` hooks of a Callback. One that is left out costs nothing."""

    def on_sanity_check_start(self) -> None:
        """Called before the first validation batches are tried, which is before `on_fit_start`, if they are."""

    def observe_samples(self, batch: Batch) -> None:
        """Called before training with all samples as one batch, if they are kept in memory and have no transform.

        The batch may have rows that aren't trained on.
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


class NumberFormats(Protocol):
    """Computes in the formats of `trainer.precision`: `framework.optim.precision.PrecisionPlugin`."""

    def autocast(self) -> AbstractContextManager[Any]: ...
    def convert_batch(self, batch: Batch) -> Batch: ...


class Waiting(Protocol):
    """Gets reports that this rank waits for others within a step, so that it isn't blamed for being slow."""

    def begin_waiting(self) -> None:
        """Waiting ends with `end_waiting`, or when the next phase begins."""

    def end_waiting(self) -> None: ...

    def waiting_unknown(self) -> None:
        """Report that the time this rank has waited is unknown."""


class Callback(Protocol):
    """Observes training on every rank. Write only the hooks you need: one that is left out costs nothing.

    Hooks are bound once before the first step. A hook that returns `Stop` ends training: at once with one rank, else
    after the next log, validation or epoch, when the ranks agree (doing so in every step would cost a collective). One
    that returns `Log` has its values logged, by whichever loggers there are.
    State that a resumed run needs goes through `state_dict` and `load_state_dict` (plain types and tensors only). It
    must be the same on all ranks, unless the class has `state_is_per_rank = True` (each rank's state is saved, and the
    run resumes on as many ranks) or `state_is_rank_zero = True` (all ranks get rank 0's).
    """

    def on_fit_start(self, info: FitInfo) -> None:
        return None

    def on_train_epoch_start(self, report: EpochInfo) -> Stop | Log | None:
        """Called before the first step of an epoch.

        If a run resumes in the middle of one, it is called again, with `report.resumed`, since what it had set up was
        lost with the earlier process. What a checkpoint holds (weights, optimizer, the state of task and callbacks) is
        restored afterwards, so that no change is made twice; the return value is then ignored.
        """
        return None

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called with the gradients averaged over ranks and unscaled, before they are clipped."""
        return

    def on_train_step_end(self, report: StepInfo) -> Stop | Log | None:
        return None

    def on_train_epoch_end(self, report: EpochInfo) -> Stop | Log | None:
        """Called after the last step of epoch `report.epoch` and its validation, before its checkpoint."""
        return None

    def on_validation_start(self, report: EpochInfo) -> Stop | Log | None:
        """Called before a validation, with the weights that are trained."""
        return None

    def on_validation_end(self, report: EvalInfo) -> Stop | Log | None:
        return None

    def on_fit_end(self) -> None:
        return None

    def close(self) -> None:
        """Called at the end of the run, also after an error."""
        return

    def evaluation_weights(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which `model` holds the weights to evaluate and save as the best, such as an average."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return None


class Logger(Protocol):
    """Writes what a run reports, on rank 0 only. Only `metrics`, `text` and `close` must be there.

    `step` is optimizer steps done, everywhere. The method `step` is called after every one of them and must cost next
    to nothing; `metrics` gets plain numbers. `flush` is called before each checkpoint: what was logged must survive a
    kill then, since a resumed run doesn't log it again. Media that a logger has no method for is left out; a logger
    with `images` but no `figure` gets figures as images.
    """

    def fit_start(self, info: FitInfo) -> None: ...
    def step(self, report: StepInfo) -> None: ...
    def metrics(self, values: Mapping[str, float], *, step: int, epoch: int) -> None: ...
    def text(self, tag: str, text: str, *, step: int) -> None: ...
    def images(self, tag: str, images: Sequence[Image], *, step: int) -> None: ...
    def figure(self, tag: str, figure: Any, *, step: int) -> None:
        """Log a `matplotlib.figure.Figure`, which is closed after this call."""

    def histogram(self, tag: str, values: Any, *, step: int) -> None:
        """Log a tensor or array of any shape, which may change after this call."""

    def table(self, tag: str, table: Table, *, step: int) -> None: ...
    def artifact(self, tag: str, path: Path, *, step: int) -> None: ...
    def hparams(self, config: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Log the run's whole configuration, nested, and its final metrics. Called once, when training has ended.

        metrics: of the last validation and the test under their own names, and `best/NAME`, the monitored one of the
        best checkpoint. A run that fails, or is stopped on request, doesn't get here.
        """

    def flush(self) -> None: ...
    def close(self) -> None: ...


def hooks(observers: Iterable[Any], name: str) -> list[Callable[..., Any]]:
    """Return the bound method `name` of each observer that has its own: an inherited empty hook costs nothing."""
    empty = [getattr(protocol, name) for protocol in (Callback, Logger, TaskHooks) if hasattr(protocol, name)]
    return [
        hook
        for each in observers
        if (hook := getattr(each, name, None)) is not None and getattr(type(each), name, None) not in empty
    ]

"""What the parts hand each other: small values and the Protocols that make a part replaceable.

Torch is imported by nothing here at run time, so every layer may import this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, dtype, nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer
    from torch.utils.data import IterableDataset

Batch = Any
"""What a dataset's samples collate to: a tensor, or a tuple or dict of tensors whose first dimension is the sample."""

SumCount = tuple["Tensor | float", "Tensor | int"]
"""A metric as a sum over samples and how many samples are in it, so that adding parts gives the exact whole."""


class MapDataset(Protocol):
    """A map-style dataset, as `torch.utils.data.Dataset` has it."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Datasets(NamedTuple):
    """What `data.datasets` builds. Validation chooses the best checkpoint; test is looked at once, at the end.

    Each is map-style, or a stream: torch's IterableDataset, which gives one sample after another.
    """

    train: MapDataset | IterableDataset[Any]
    val: MapDataset | IterableDataset[Any] | None = None
    test: MapDataset | IterableDataset[Any] | None = None


class StepOutput(NamedTuple):
    """What a task computes from one batch.

    loss: scalar, the *mean* over the batch's samples, with its graph in training.
    num_samples: what the mean is over; the logged and evaluated loss weighs it. Gradients weigh the batch's samples.
    metrics: name → (sum over samples, count), the same names for every batch; tensors may stay on the device.
    """

    loss: Tensor
    num_samples: int
    metrics: Mapping[str, SumCount] = {}


class MicroBatch(NamedTuple):
    """One forward and backward of one rank. `num_samples` 0 means a stand-in whose loss weighs nothing."""

    batch: Batch
    num_samples: int


class MicroIndices(NamedTuple):
    """`indices`: int64, of the dataset; `num_samples`: how many they are, or 0 for a stand-in of one index."""

    indices: Tensor
    num_samples: int


class Window(NamedTuple):
    """What one rank contributes to one optimizer step: its micro-batches of one global batch.

    global_count: samples of the global batch over all ranks and micro-batches; the same on every rank.
    epoch_end: this is the epoch's last window. indices: of each micro-batch; places in a stream. first_rank: the first
    one that has a sample of it; None where that is always rank 0.
    """

    micro_batches: Iterator[MicroBatch]
    num_micro_batches: int
    global_count: int
    epoch_end: bool
    indices: tuple[MicroIndices, ...] = ()
    first_rank: int | None = None


class DataShare(NamedTuple):
    """Which samples a rank sees: part `rank` of `world_size`, the same for all ranks that hold one copy of the model.

    micro_batches: into how many parts what a rank takes at once is cut.
    """

    rank: int
    world_size: int
    micro_batches: int = 1


class StepReport(NamedTuple):
    """What observers learn after an optimizer step. Tensors stay on the device: reading one waits for it.

    step: optimizer steps done, this one included. epoch: of this step, from 0.
    loss: of this rank's last micro-batch, detached. global_count: samples of the step over all ranks.
    indices: which samples this rank's micro-batches took.
    """

    step: int
    epoch: int
    loss: Tensor
    global_count: int
    indices: tuple[MicroIndices, ...] = ()


class EvalReport(NamedTuple):
    """Metrics over a whole part (`val` or `test`), the same on every rank. Names bear the part: `val/loss`."""

    part: str
    step: int
    epoch: int
    metrics: Mapping[str, float]


class Stop(NamedTuple):
    """What a callback answers to end training; the ranks agree before they act on it."""

    reason: str


@dataclass(frozen=True)
class FitInfo:
    """What observers learn before the first step. `model` is the unwrapped module.

    Model and optimizer may be read and kept, and hooks put on them: whoever changes them changes the training. Of a
    stream nobody may know how many steps an epoch has, nor then how many there are in all.
    """

    model: nn.Module
    start_step: int
    total_steps: int | None
    steps_per_epoch: int | None
    max_epochs: int | None
    optimizer: Optimizer


@dataclass(frozen=True)
class Sharding:
    """How a strategy spreads the model. ranks: over how many each copy is, neighbours; every rank has to do with one.

    param_dtype, reduce_dtype: what weights are gathered and gradients reduced in; None: in their own type. is_on_cpu:
    what a rank keeps of weights, gradients and optimizer state lies in the CPU's memory, wherever it computes.
    """

    ranks: int
    param_dtype: dtype | None = None
    reduce_dtype: dtype | None = None
    is_on_cpu: bool = False


@runtime_checkable
class Task(Protocol):
    """What a step computes. Both methods get the model as the strategy wrapped it and a batch on its device.

    A task may be an `nn.Module`, or have modules as attributes, such as a loss with weights: they are moved to the
    device (the replica's first one) and converted to the type of `trainer.precision=bf16-true` or `64-true`, and none
    of their parameters may require gradients. Tensors that aren't in a module stay where they are. If the task has
    `state_dict` and `load_state_dict`, as every `nn.Module`, checkpoints keep rank 0's state of it: what changes while
    training must be the same on all ranks. `Supervised` has none: its loss is as configured.
    """

    def training_step(self, model: nn.Module, batch: Batch) -> StepOutput: ...
    def validation_step(self, model: nn.Module, batch: Batch) -> StepOutput: ...


class NumberFormats(Protocol):
    """What computes in the formats of `trainer.precision`: `framework.precision.PrecisionPlugin`."""

    def autocast(self) -> AbstractContextManager[Any]: ...
    def convert_batch(self, batch: Batch) -> Batch: ...


class Strategy(Protocol):
    """How replicas stay equal: after a synchronising backward, gradients are the *mean* over ranks.

    One with state that decides the numbers may also have `state_dict(model)` and, once weights are restored,
    `load_state_dict(model, state)`; both get the wrapped model, and every rank calls them.
    One that spreads the weights, so that ranks talk in every forward, says so with `forward_communicates = True`: then
    each rank makes as many forwards as any other, in evaluation too. How may be told in `sharding`, else one copy is
    over all ranks.
    One that has memory of its own for a second copy of all gradients says so with `copies_gradients = True`. Copies
    that each rank keeps from step to step, and in checkpoints, are counted in `gradients_kept`.
    One that lets `requires_grad` of parameters change during training has `rewrap(model, *, changed)`, called before
    the next step on every rank where it has changed. It gets the wrapped model and name → whether it is trained now,
    rebuilds what it made for the parameters trained before, and returns the module to call in training from here on.
    One that leaves each rank buffers of its own after the start says so with `buffers_differ = True`. One that gives
    rank 0's to all has `take_buffers(model, *, source)`, called by every rank after the last backward of a step of
    which ranks before `source` had no sample (0: also with any other): then all get that rank's, in which the step's
    statistics are. It gives whether it does so.
    One that knows when its rank waits for others may have `tell_waiting(model, waiting)`, which gets the wrapped model
    and a `Waiting`, and gives whether it will tell; else only times of data and callbacks are compared over ranks.
    One that makes process groups of its own in `wrap` names them in `groups`: they get the run's time-outs. One that
    has tensors on the CPU exchanged beside those on GPUs says so with `exchanges_on_cpu = True`.
    One whose forward takes in the samples of other ranks (their statistics, say) says so with `mixes_samples = True`.
    One that can't go with every number format has `check_precision(precision)`, which raises ConfigError.

    One may also have `after_update(model)`, called after every optimizer step with no gradient left. Where ranks don't
    exchange something in each step, so that replicas differ between steps, it says so with `replicas_differ = True`;
    then it has `evaluation_weights(model)`, as a callback: while it is entered, the unwrapped model holds what is to be
    evaluated and kept, the same on all ranks; the exchange is one every `exchanges_every` steps, the next one in
    `steps_to_exchange`. Copies of the trained weights that it keeps are counted in `weight_copies`.

    One that cuts the model into parts, of which each rank holds some, has `num_stages`, how many; `data_share`, a
    DataShare; `run_window(model, window, *, task, precision, add, mark)`, which does forward and backward of all
    micro-batches, calls `add` with what the task gave for each and gives the last loss, detached; and
    `total_norm(norm)`, which makes of the norm of this rank's part that of all. Its `wrap` gets the model on the CPU.

    One that spreads the weights may have `part`, the index of the part of the model that this rank holds: ranks with
    the same part are compared with each checkpoint.
    """

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module to call in training. Every rank must call it; `model` is on its device already."""
        ...

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's module inside what `wrap` gave: for `state_dict` and evaluation."""
        ...

    def accumulate(self, model: nn.Module, *, synchronise: bool) -> AbstractContextManager[Any]:
        """Surrounds forward and backward of a micro-batch; gradients are exchanged only where `synchronise`."""
        ...

    def before_evaluation(self, model: nn.Module) -> None:
        """Make replicas wholly equal, buffers too: what is evaluated is what rank 0 saves. Every rank must call it."""
        ...


class Waiting(Protocol):
    """What a strategy tells of its rank's waiting for others in the midst of a step, so that it isn't blamed for it."""

    def begin_waiting(self) -> None:
        """From here on until `end_waiting`, or until something else is begun."""
        ...

    def end_waiting(self) -> None: ...

    def lose_count(self) -> None:
        """It can't be told how long this rank has waited."""
        ...


def forward_communicates(strategy: Strategy) -> bool:
    """Whether it spreads the weights over ranks."""
    return bool(getattr(strategy, "forward_communicates", False))


def sharding_of(strategy: Strategy, *, world_size: int) -> Sharding:
    """How it spreads the weights; where it doesn't, each rank has a copy."""
    if not forward_communicates(strategy):
        return Sharding(1)
    told: Sharding = getattr(strategy, "sharding", Sharding(world_size))
    return told


def own_groups(strategy: Strategy) -> Sequence[ProcessGroup]:
    """The process groups that it made in `wrap`."""
    made: Sequence[ProcessGroup] = getattr(strategy, "groups", ())
    return made


def exchanges_on_cpu(strategy: Strategy) -> bool:
    """Whether it has tensors on the CPU exchanged, wherever the ranks compute."""
    return bool(getattr(strategy, "exchanges_on_cpu", False))


def copies_gradients(strategy: Strategy) -> bool:
    """Whether it keeps memory for a second copy of all gradients, which are exchanged in it."""
    return bool(getattr(strategy, "copies_gradients", False))


def gradients_kept(strategy: Strategy) -> int:
    """How many copies of all gradients each rank keeps of its own from step to step."""
    return int(getattr(strategy, "gradients_kept", 0))


def buffers_differ(strategy: Strategy) -> bool:
    """Whether each rank has buffers of its own, in evaluation too, while weights are the same on all."""
    return bool(getattr(strategy, "buffers_differ", False))


def part_of(strategy: Strategy) -> int | None:
    """Return which part of the model this rank holds, 0 if all of it; None if that isn't known."""
    part: int | None = getattr(strategy, "part", None if forward_communicates(strategy) else 0)
    return part


def replicas_differ(strategy: Strategy) -> bool:
    """Whether each rank trains weights of its own for some steps."""
    return bool(getattr(strategy, "replicas_differ", False))


def exchanges_every(strategy: Strategy) -> int:
    """After how many optimizer steps ranks exchange something."""
    return int(getattr(strategy, "exchanges_every", 1))


def steps_to_exchange(strategy: Strategy) -> int | None:
    """In how many steps ranks exchange something next; None for one that does so in every step."""
    steps: int | None = getattr(strategy, "steps_to_exchange", None)
    return steps


def mixes_samples(strategy: Strategy) -> bool:
    """Whether what a rank computes of its samples depends on those of others in the same forward."""
    return bool(getattr(strategy, "mixes_samples", False))


def weight_copies(strategy: Strategy) -> int:
    """How many copies of the trained weights it keeps on each rank."""
    return int(getattr(strategy, "weight_copies", 0))


def num_stages(strategy: Strategy) -> int | None:
    """Into how many parts it cuts the model; None where each rank builds all of it on its device."""
    number: int | None = getattr(strategy, "num_stages", None)
    return number


def data_share(strategy: Strategy, *, rank: int, world_size: int) -> DataShare:
    """Which samples a rank sees; each rank its own, but where the strategy says otherwise."""
    share: DataShare | None = getattr(strategy, "data_share", None)
    return DataShare(rank, world_size) if share is None else share


class Callback(Protocol):
    """Observes training on every rank. Write only the hooks you need: one that is left out costs nothing.

    Hooks are bound once before the first step. A hook that answers `Stop` ends training once the ranks have agreed: at
    once with one rank, else after the next log, validation or epoch, since agreeing at every step would cost as much.
    State that a resumed run needs goes through `state_dict` and `load_state_dict` (plain types and tensors only).
    """

    def on_fit_start(self, info: FitInfo) -> None:
        return None

    def on_train_step_end(self, report: StepReport) -> Stop | None:
        return None

    def on_validation_end(self, report: EvalReport) -> Stop | None:
        return None

    def on_fit_end(self) -> None:
        return None

    def close(self) -> None:
        """When the run is over, however it ended; a signal that stops nothing orderly leaves no time for it."""
        return

    def evaluation_weights(self, model: nn.Module) -> AbstractContextManager[None]:
        """While this is entered, `model` holds the weights to evaluate and to keep as the best (an average, say)."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return None


class Logger(Protocol):
    """Writes what a run reports, on rank 0 only. `fit_start`, `step` and `flush` may be left out.

    `step` is called after every optimizer step and must cost next to nothing; `metrics` gets plain numbers. `flush` is
    called before each checkpoint: what was logged by then must outlive a kill, for a resumed run doesn't log it again.
    """

    def fit_start(self, info: FitInfo) -> None: ...
    def step(self, report: StepReport) -> None: ...
    def metrics(self, values: Mapping[str, float], *, step: int, epoch: int) -> None: ...
    def text(self, tag: str, text: str) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...

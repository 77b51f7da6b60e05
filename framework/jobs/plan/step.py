"""Trace one optimizer step of a training as configured: with fake tensors, which take no memory and compute nothing.

with prepared_step(config, topology) as prepared:
    trace = trace_step(prepared)
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.optim import Optimizer

from framework.config.schema import Config
from framework.config.topology import Topology
from framework.data.batch_tree import map_tensors
from framework.data.loader import TrainLoader
from framework.data.source import SourceLoader
from framework.distributed.context import Context
from framework.distributed.stand_in_group import STAND_IN, stand_in_process_group
from framework.engine.build_trainer import build_trainer
from framework.engine.limits import apply_fast_dev_run, apply_overfit_batches
from framework.engine.loaders import make_train_loader, prepare_data
from framework.engine.setup import RankSetup, plan_training
from framework.errors import ConfigError
from framework.jobs.plan.cuda_rules import CudaFunctions
from framework.jobs.plan.trace import BACKWARD, BATCHES, BUCKETS, FORWARD, UPDATE, Trace, Tracer, UnknownMemoryError
from framework.launch.plan import MonitorLink
from framework.monitoring.rank_status import RankPhase, RankStatus
from framework.strategies.base import Strategy
from framework.strategies.ddp import DDP
from framework.system.run_dir import RunDir
from framework.training.trainer import Trainer
from framework.types import MicroBatch, Window

_PHASES = {RankPhase.BACKWARD: BACKWARD, RankPhase.OPTIMIZER: UPDATE}
_NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
# Larger samples, of a batch that is only considered, are fake ones.
_LARGEST_REAL_BYTES = 1 << 30
_Item = TypeVar("_Item")


class NeedsValuesError(Exception):
    """A step can't be made with fake tensors."""


class PreparedStep(NamedTuple):
    """What rank 0 of a training has before its first step."""

    setup: RankSetup
    loader: TrainLoader
    # The window of the first step, without its micro-batches.
    window: Window
    # Its first and its last micro-batch; empty if the model makes them, as those of a framework.Source.
    micro_batches: Sequence[MicroBatch]
    # Where `setup` puts the rank's phase.
    rank_status: RankStatus


@contextmanager
def prepared_step(config: Config, topology: Topology) -> Iterator[PreparedStep]:
    """Set up rank 0 on the CPU, without what has no part in a step, and load its first batch.

    Raises FrameworkError for what training would refuse, for data that can't be loaded here, and for a pipeline.
    """
    config = replace(
        config,
        checkpoint=replace(config.checkpoint, enabled=False, monitor=None),
        logger={},
        # Samples are loaded in this process.
        data=replace(config.data, num_workers=0),
        trainer=replace(config.trainer, progress="off", compile=None, profiler=None),
    )
    context = Context(topology, 0, 0, 0, devices=(torch.device("cpu"),) * topology.span, backend=STAND_IN)
    strategy, plan = plan_training(config, context)
    if strategy.num_stages is not None:
        raise ConfigError(
            "A stage of a pipeline takes what other ranks compute, so a step of one rank can't be traced.\n"
            "Leave strategy=pipeline out for a forecast of the whole model; its stages share the weights."
        )
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        rank_status = stack.enter_context(closing(RankStatus()))
        setup = RankSetup(
            config,
            apply_fast_dev_run(config),
            context,
            RunDir(Path(folder)),
            plan,
            strategy,
            MonitorLink(rank_status),
            attempt=0,
        )
        datasets, setup = prepare_data(setup)
        datasets = apply_overfit_batches(datasets, setup.config.trainer, setup.plan)
        loader = make_train_loader(setup, datasets)
        stack.callback(loader.close)
        window = next(iter(loader.epoch(0)))
        micro_batches: list[MicroBatch] = []
        if not isinstance(loader, SourceLoader):
            micro_batches = _ends(list(window.micro_batches))
        yield PreparedStep(setup, loader, window._replace(micro_batches=iter(())), micro_batches, rank_status)


def trace_step(
    prepared: PreparedStep,
    *,
    is_fake: bool = True,
    samples: int | None = None,
    for_cuda: bool = False,
    limit_s: float | None = None,
) -> Trace:
    """Return what an optimizer step does, once the first step has made the optimizer's state.

    Nothing is exchanged: ranks other than this one don't exist.

    Args:
        is_fake: False computes the step, with the memory and the time that it takes.
        samples: of each micro-batch, in place of those that the configuration asks for; needs `is_fake`.
        for_cuda: Functions compute as they would on a CUDA device, as far as that decides memory.
        limit_s: the most CPU seconds that both steps may take.

    Raises:
        NeedsValuesError: the step depends on the values of tensors, or its memory does, and `is_fake`.
        TimeoutError: it takes longer than `limit_s`.
    """
    if is_fake and not prepared.micro_batches:
        raise NeedsValuesError("the train part is a framework.Source, whose batches depend on the model")
    try:
        return _traced(prepared, is_fake=is_fake, samples=samples, for_cuda=for_cuda, limit_s=limit_s)
    except _NEEDS_VALUES as error:
        raise NeedsValuesError("it reads the values of tensors, as .item() does") from error
    except UnknownMemoryError as error:
        raise NeedsValuesError(str(error)) from error


def _traced(
    prepared: PreparedStep, *, is_fake: bool, samples: int | None, for_cuda: bool, limit_s: float | None
) -> Trace:
    with ExitStack() as stack:
        stack.enter_context(stand_in_process_group(prepared.setup.context))
        if is_fake:
            stack.enter_context(_convertible_modules())
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        status = prepared.rank_status
        tracer = Tracer(lambda: _PHASES.get(RankPhase(status.read().phase), FORWARD), limit_s=limit_s)
        stack.enter_context(tracer)
        if for_cuda:
            stack.enter_context(CudaFunctions())
        setup = prepared.setup
        if is_fake and isinstance(setup.strategy, DDP):
            setup = replace(setup, strategy=_StandInDDP(setup.strategy, tracer))
        trainer = build_trainer(setup, prepared.loader, {})
        if is_fake:
            _step_always(trainer.state.precision.scaler)
        tracer.name_modules(trainer.state.bare_model)

        micro_batches = prepared.micro_batches
        num_samples = 0
        if samples is not None:
            micro_batches = [_resized(micro, samples) for micro in micro_batches]
        if micro_batches:
            num_samples = micro_batches[0].num_samples
        # One micro-batch is enough to make the optimizer's state.
        _step(trainer, tracer, prepared, micro_batches[-1:])
        for optimizer in trainer.state.optimizers:
            tracer.name_optimizer_state(optimizer)
        tracer.start_step()
        _step(trainer, tracer, prepared, micro_batches)
        # Those between the first and the last micro-batch do what these two do.
        repetitions = 1.0
        if len(micro_batches) > 1:
            repetitions = prepared.window.num_micro_batches / len(micro_batches)
        return replace(tracer.trace(), samples=num_samples, repetitions=repetitions)


def _step(trainer: Trainer, tracer: Tracer, prepared: PreparedStep, micro_batches: Sequence[MicroBatch]) -> None:
    """Make a training step of these micro-batches; if there are none, of those that the model makes."""
    window = prepared.window
    batches = iter(micro_batches)
    if micro_batches:
        number = len(micro_batches)
        window = window._replace(num_micro_batches=number, indices=tuple(_ends(window.indices)[-number:]))
    else:
        batches = next(iter(prepared.loader.epoch(0))).micro_batches

    def own_batches() -> Iterator[MicroBatch]:
        for micro in batches:
            # Not a tensor of the same storage, which may hold all samples.
            batch = map_tensors(micro.batch, partial(_own_tensor, is_fake=tracer.is_fake))
            tracer.categorize(batch, BATCHES)
            yield micro._replace(batch=batch)

    trainer.train_step(window._replace(micro_batches=own_batches()))


def _own_tensor(tensor: Tensor, *, is_fake: bool) -> Tensor:
    if is_fake and tensor.nbytes > _LARGEST_REAL_BYTES:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    # With its values, which a task may read to weight its loss.
    return tensor.clone()


def _ends(items: Sequence[_Item]) -> list[_Item]:
    """Return the first and the last of several items."""
    if len(items) < 2:
        return list(items)
    return [items[0], items[-1]]


def _resized(micro: MicroBatch, samples: int) -> MicroBatch:
    """Return a micro-batch of as many samples, without their values. Raises ConfigError if no tensor has a row each."""
    has_rows = False

    def resize(tensor: Tensor) -> Tensor:
        nonlocal has_rows
        if tensor.dim() == 0 or len(tensor) != micro.num_samples:
            return tensor
        has_rows = True
        # All rows are the first one, which takes no memory.
        return tensor[:1].expand(samples, *tensor.shape[1:])

    batch = map_tensors(micro.batch, resize)
    if not has_rows:
        raise ConfigError("No tensor of the batch has a row for each sample.")
    return MicroBatch(batch, samples)


@contextmanager
def _convertible_modules() -> Iterator[None]:
    """Let modules with fake parameters be converted by `Module.to`.

    Torch swaps such a parameter with its conversion, and refuses to, since the fake mode has a weak reference to it.
    """
    original = torch.utils.swap_tensors

    def replace_data(parameter: Tensor, converted: Tensor) -> None:
        parameter.data = converted.data

    torch.utils.swap_tensors = replace_data
    try:
        yield
    finally:
        torch.utils.swap_tensors = original


def _step_always(scaler: torch.amp.GradScaler) -> None:
    """Have a loss scaler step without looking for gradients that overflow: fake ones have no values."""

    def step(optimizer: Optimizer, _: Any, *arguments: Any, **keywords: Any) -> Any:
        return optimizer.step(*arguments, **keywords)

    scaler._maybe_opt_step = step  # type: ignore[assignment]


@final
class _StandInDDP(Strategy):
    """Keeps gradients as DDP does, whose C++ part needs the values of tensors: each in a place of a bucket.

    Without `gradient_as_bucket_view`, and while gradients accumulate, each one is a tensor of its own, too.
    """

    def __init__(self, ddp: DDP, tracer: Tracer) -> None:
        self._copies_gradients = ddp.costs().copies_gradients
        self._tracer = tracer
        self._synchronises = True

    def wrap(self, model: nn.Module) -> nn.Module:
        for parameter in model.parameters():
            if parameter.requires_grad:
                place = torch.empty_like(parameter)
                self._tracer.categorize(place, BUCKETS)
                parameter.register_post_accumulate_grad_hook(partial(self._copy, place))
        return model

    def _copy(self, place: Tensor, parameter: Tensor) -> None:
        if not self._synchronises or parameter.grad is None:
            return
        with torch.no_grad():
            place.copy_(parameter.grad)
        if not self._copies_gradients:
            parameter.grad = place

    @contextmanager
    def accumulate(self, model: nn.Module, *, synchronise: bool) -> Iterator[None]:
        self._synchronises = synchronise
        yield

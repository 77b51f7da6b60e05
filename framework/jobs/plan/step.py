"""Trace one optimizer step of a training as configured: with fake tensors, which take no memory and compute nothing.

trace = trace_step(config, topology, backend="gloo")
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
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
from framework.data.source import SourceLoader
from framework.distributed.context import Context
from framework.engine.build_trainer import build_trainer
from framework.engine.limits import apply_fast_dev_run, apply_overfit_batches
from framework.engine.loaders import make_train_loader, prepare_data
from framework.engine.setup import RankSetup, plan_training
from framework.errors import ConfigError
from framework.jobs.plan.cuda_rules import CudaFunctions
from framework.jobs.plan.trace import BACKWARD, BATCHES, BUCKETS, FORWARD, UPDATE, Trace, Tracer
from framework.launch.plan import MonitorLink
from framework.monitoring.rank_status import RankPhase, RankStatus
from framework.strategies.base import Strategy
from framework.strategies.ddp import DDP
from framework.system.run_dir import RunDir
from framework.training.trainer import Trainer
from framework.types import MicroBatch, Window

NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
_PHASES = {RankPhase.BACKWARD: BACKWARD, RankPhase.OPTIMIZER: UPDATE}


def trace_step(
    config: Config,
    topology: Topology,
    *,
    backend: str,
    is_fake: bool = True,
    samples: int | None = None,
    for_cuda: bool = False,
) -> Trace:
    """Return what an optimizer step of rank 0 does, once the first step has made the optimizer's state.

    Nothing is exchanged: ranks other than this one don't exist.

    Args:
        config: as requested.
        is_fake: False computes the step, with the memory and the time that it takes.
        samples: of each micro-batch, in place of those that the configuration asks for; needs `is_fake`.
        for_cuda: Functions compute as they would on a CUDA device, as far as that decides memory.

    Raises:
        FrameworkError: for what training would refuse, and for data that can't be loaded here.
        One of NEEDS_VALUES: the step depends on the values of tensors, and `is_fake`.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        rank_status = stack.enter_context(closing(RankStatus()))
        setup = rank_setup(config, topology, backend=backend, run_dir=RunDir(Path(folder)), rank_status=rank_status)
        datasets, setup = prepare_data(setup)
        datasets = apply_overfit_batches(datasets, setup.config.trainer, setup.plan)
        train_loader = make_train_loader(setup, datasets)
        stack.callback(train_loader.close)
        if isinstance(train_loader, SourceLoader):
            raise ConfigError("The train part is a framework.Source, whose batches depend on the model.")
        window = next(iter(train_loader.epoch(0)))
        micro_batches = list(window.micro_batches)
        if samples is not None:
            micro_batches = [_resized(micro, samples) for micro in micro_batches]

        stack.enter_context(_stand_in_group(setup.context))
        if is_fake:
            stack.enter_context(_convertible_modules())
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        tracer = Tracer(lambda: _PHASES.get(RankPhase(rank_status.read().phase), FORWARD))
        stack.enter_context(tracer)
        if for_cuda:
            stack.enter_context(CudaFunctions())
        if is_fake and isinstance(setup.strategy, DDP):
            setup = replace(setup, strategy=_StandInDDP(setup.strategy, tracer))
        trainer = build_trainer(setup, train_loader, {})
        if is_fake:
            _step_always(trainer.state.precision.scaler)
        tracer.name_modules(trainer.state.bare_model)

        _step(trainer, tracer, window, micro_batches)
        for optimizer in trainer.state.optimizers:
            tracer.name_optimizer_state(optimizer)
        tracer.start_step()
        _step(trainer, tracer, window, micro_batches)
        return replace(tracer.trace(), samples=micro_batches[0].num_samples)


def rank_setup(
    config: Config, topology: Topology, *, backend: str, run_dir: RunDir, rank_status: RankStatus
) -> RankSetup:
    """Return the set-up of rank 0 on the CPU, without what has no part in a step."""
    config = replace(
        config,
        checkpoint=replace(config.checkpoint, enabled=False, monitor=None),
        logger={},
        # Samples are loaded in this process.
        data=replace(config.data, num_workers=0),
        trainer=replace(config.trainer, progress="off", compile=None, profiler=None),
    )
    context = Context(topology, 0, 0, 0, devices=(torch.device("cpu"),) * topology.span, backend=backend)
    strategy, plan = plan_training(config, context)
    return RankSetup(
        config, apply_fast_dev_run(config), context, run_dir, plan, strategy, MonitorLink(rank_status), attempt=0
    )


def _step(trainer: Trainer, tracer: Tracer, window: Window, micro_batches: Sequence[MicroBatch]) -> None:
    """Make a training step. micro_batches: of the window, as they were loaded."""

    def own_batches() -> Iterator[MicroBatch]:
        for micro in micro_batches:
            batch = micro.batch
            if tracer.is_fake:
                # Not a fake tensor of the same storage, which may hold all samples.
                batch = map_tensors(batch, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
            tracer.categorize(batch, BATCHES)
            yield micro._replace(batch=batch)

    trainer.train_step(window._replace(micro_batches=own_batches()))


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
def _stand_in_group(context: Context) -> Iterator[None]:
    """Make a process group of which only this rank exists: its collectives do nothing."""
    # It registers the backend.
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    dist.init_process_group("fake", store=dist.HashStore(), rank=context.rank, world_size=context.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


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

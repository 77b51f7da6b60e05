"""Models, losses, tasks and callbacks that the tests name by `_target_`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from framework import StepOutput
from framework.strategies.ddp import DDP
from framework.types import FitInfo, StepReport
from recipes.toy import ToyModel
from recipes.toy_model_parallel import ToyModelParallel


def task(name: str) -> tuple[str, ...]:
    """Return the overrides that replace the recipe's task by a class of this module."""
    return (f"task._target_={__name__}.{name}", "~task.loss", "~task.metrics")


class Quiet:
    """Makes every synchronization with the GPU an error, except in the first steps and around a log."""

    def __init__(self, every: int, first: int = 20) -> None:
        self.every, self.first = every, first
        self.guarded = 0

    def on_train_step_end(self, report: StepReport) -> None:
        may_wait = report.step < self.first or report.step % self.every == 0  # then it is logged
        self.guarded += not may_wait
        if report.loss.is_cuda:
            torch.cuda.set_sync_debug_mode("default" if may_wait else "error")

    def on_fit_end(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
        Path("guarded.json").write_text(json.dumps(self.guarded))


class NotedDDP(DDP):
    """DDP that writes down its `device_ids`."""

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = super().wrap(model)
        assert isinstance(wrapped, DistributedDataParallel)
        Path("device_ids.json").write_text(json.dumps(wrapped.device_ids))
        return wrapped


class HalfOnCpu(ToyModelParallel):
    """The toy with its first layer on the first device given and its second one on the CPU."""

    def __init__(self, devices: Sequence[torch.device | str]) -> None:
        super().__init__([devices[0], "cpu"])


def weighted_loss() -> nn.Module:
    """A loss with a tensor of its own, which has to be on the device."""
    return nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1.5, 10))


class WithLoss(nn.Module):
    """A model whose forward returns the loss, so that the loss comes out of compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ToyModel()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (self.inner(x) - target).square().mean()


class TakesItsLoss:
    """The task of a model that returns its loss."""

    def training_step(self, model: nn.Module, batch: Sequence[Tensor]) -> StepOutput:
        x, target = batch
        return StepOutput(model(x, target), len(target))

    validation_step = training_step


class Overflowing:
    """The toy's task with a small loss, which grows beyond what fp16 can hold in the backward of one step."""

    def __init__(self, step: int, factor: float = 1e6) -> None:
        self.step, self.factor, self.steps = step, factor, 0

    def training_step(self, model: nn.Module, batch: Sequence[Tensor]) -> StepOutput:
        self.steps += 1
        output = self.validation_step(model, batch)
        if self.steps != self.step:
            return output
        large = output.loss * self.factor
        return output._replace(loss=large - large.detach() + output.loss.detach())

    def validation_step(self, model: nn.Module, batch: Sequence[Tensor]) -> StepOutput:
        x, target = batch
        return StepOutput((model(x).float() - target).square().mean() * 1e-3, len(target))


class Faulty:
    """The toy's task until one step, which runs out of memory or has an index out of range."""

    def __init__(self, what: str, step: int = 5) -> None:
        self.what, self.step, self.steps = what, step, 0

    def training_step(self, model: nn.Module, batch: Sequence[Tensor]) -> StepOutput:
        self.steps += 1
        x, target = batch
        if self.steps == self.step:
            x = x + (self._too_much(x) if self.what == "memory" else self._out_of_range(x))
        return StepOutput((model(x) - target).square().mean(), len(target))

    validation_step = training_step

    def _too_much(self, x: Tensor) -> Tensor:
        """Take all memory of a GPU, piece by piece; on the host, ask at once for more than any has."""
        size_bytes = 1 << 32 if x.is_cuda else 1 << 50
        taken = []
        while True:
            taken.append(torch.empty(size_bytes, dtype=torch.uint8, device=x.device))

    def _out_of_range(self, x: Tensor) -> Tensor:
        return x.flatten()[torch.full((4,), x.numel() + 7, device=x.device)].sum()


class Hungry(nn.Module):
    """A model of which `samples` samples need a tenth of a GPU's memory."""

    def __init__(self, samples: int = 40) -> None:
        super().__init__()
        self.inner = ToyModel()
        self.samples = samples
        self.floats_per_sample: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            if self.floats_per_sample is None:
                _, total = torch.cuda.mem_get_info(x.device)
                self.floats_per_sample = total // 10 // 4 // self.samples
            x = x + x.new_zeros(len(x), self.floats_per_sample).amax(dim=1, keepdim=True)
        output: Tensor = self.inner(x)
        return output


class Busy:
    """Keeps the GPU busy, so that its utilization can be seen."""

    def on_fit_start(self, info: FitInfo) -> None:
        self.device = next(info.model.parameters()).device

    def on_train_step_end(self, report: StepReport) -> None:
        side = 4096 if self.device.type == "cuda" else 64
        square = torch.ones(side, side, device=self.device)
        for _ in range(20):
            square = torch.mm(square, square) / side

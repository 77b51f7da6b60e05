"""Models, losses, tasks and callbacks that the tests name by `_target_`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import IterableDataset, TensorDataset

from framework import Datasets, StepOutput
from framework.strategies import DDP
from framework.types import FitInfo, StepInfo
from recipes.toy import ToyModel
from recipes.toy_model_parallel import ToyModelParallel

RECORDED = (
    "+callbacks.recorder._target_=tests.helpers.recorder.Recorder",
    "trainer.limit_val_batches=0",
    "checkpoint.monitor=null",
)


def on(gpus: int) -> str:
    """Return the override for this number of GPUs."""
    return f"trainer.gpus={gpus}"


def task(name: str) -> tuple[str, ...]:
    """Return the overrides that replace the recipe's task by a class of this module."""
    return (f"task._target_={__name__}.{name}", "~task.loss", "~task.metrics")


class Quiet:
    """Makes every synchronization with the GPU an error, except in the first steps and around a log."""

    def __init__(self, every: int, first: int = 20) -> None:
        self.every = every
        self.first = first
        self.guarded = 0

    def on_train_step_end(self, report: StepInfo) -> None:
        # Such a step is logged.
        may_wait = report.step < self.first or report.step % self.every == 0
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
        self.step = step
        self.factor = factor
        self.steps = 0

    def training_step(self, model: nn.Module, batch: Sequence[Tensor]) -> StepOutput:
        self.steps += 1
        output = self.validation_step(model, batch)
        if self.steps != self.step:
            return output
        large = output.loss * self.factor
        return output._replace(loss=large - large.detach() + output.loss.detach())

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]

    def validation_step(self, model: nn.Module, batch: Sequence[Tensor]) -> StepOutput:
        x, target = batch
        return StepOutput((model(x).float() - target).square().mean() * 1e-3, len(target))


class Faulty:
    """The toy's task until one step, in which one rank runs out of memory or has an index out of range.

    once: the fault doesn't happen again after a restart. runs_ahead: on a GPU the index comes after 50 ms of work, so
    the host has begun further steps, with their exchanges of gradients, when the GPU gets to it. Otherwise the host
    waits for the fault.
    """

    def __init__(self, what: str, step: int = 5, rank: int = 0, once: bool = False, runs_ahead: bool = False) -> None:
        self.what = what
        self.step = step
        self.steps = 0
        self.runs_ahead = runs_ahead
        is_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        self.is_due = int(os.environ.get("RANK", "0")) == rank and not (once and is_restarted)

    def training_step(self, model: nn.Module, batch: Sequence[Tensor]) -> StepOutput:
        self.steps += 1
        x, target = batch
        if self.steps == self.step and self.is_due:
            x = x + (self._too_much(x) if self.what == "memory" else self._out_of_range(x))
        return StepOutput((model(x) - target).square().mean(), len(target))

    def validation_step(self, model: nn.Module, batch: Sequence[Tensor]) -> StepOutput:
        x, target = batch
        return StepOutput((model(x) - target).square().mean(), len(target))

    def _too_much(self, x: Tensor) -> Tensor:
        """Take all memory of a GPU, piece by piece; on the host, ask at once for more than any has."""
        size_bytes = 1 << 32 if x.is_cuda else 1 << 50
        taken = []
        while True:
            taken.append(torch.empty(size_bytes, dtype=torch.uint8, device=x.device))

    def _out_of_range(self, x: Tensor) -> Tensor:
        if x.is_cuda and self.runs_ahead:
            # The number is in cycles.
            torch.cuda._sleep(100_000_000)
        found = x.flatten()[torch.full((4,), x.numel() + 7, device=x.device)].sum()
        if x.is_cuda and not self.runs_ahead:
            torch.cuda.synchronize(x.device)
        return found


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

    def on_train_step_end(self, report: StepInfo) -> None:
        side = 4096 if self.device.type == "cuda" else 64
        square = torch.ones(side, side, device=self.device)
        for _ in range(20):
            square = torch.mm(square, square) / side


class WeighedByNumber:
    """The toy's task, whose loss has a weight that is a Python number."""

    def training_step(self, model: nn.Module, batch: Sequence[Tensor]) -> StepOutput:
        x, target = batch
        return StepOutput((model(x) - target).square().mean(), len(target), weight=2.0 * len(target))

    validation_step = training_step


class AllowsTf32(ToyModel):
    """Allows TF32 in torch's newer way, after which torch refuses to read the older setting."""

    def __init__(self) -> None:
        super().__init__()
        torch.backends.cuda.matmul.fp32_precision = "tf32"


class Block(nn.Module):
    """A linear layer with dropout that takes its input by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)
        self.dropout = nn.Dropout(0.5)

    def forward(self, *, x: Tensor) -> Tensor:
        output: Tensor = x + self.dropout(self.linear(x).relu())
        return output


class CallsByKeyword(nn.Module):
    """Blocks that get tensors as keyword arguments only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x=x)
        output: Tensor = self.head(x)
        return output


# Batches that aren't tensors in lists and dicts


class Graph:
    """Moves itself, as the batches of PyG and DGL do."""

    def __init__(self, x: Tensor, target: Tensor) -> None:
        self.x = x
        self.target = target

    def to(self, device: torch.device, non_blocking: bool = False) -> Graph:
        return Graph(self.x.to(device, non_blocking=non_blocking), self.target.to(device, non_blocking=non_blocking))


@dataclass
class Pair:
    """Two tensors and something else."""

    x: Tensor
    target: Tensor
    name: str


@dataclass(frozen=True)
class Nested:
    """A dataclass of what moves itself."""

    graph: Graph
    sizes: dict[str, list[Tensor]]


@dataclass
class Words:
    """Sequences of different lengths, and their targets."""

    sequences: PackedSequence
    target: Tensor


def collate(kind: str, samples: list[tuple[Tensor, Tensor]]) -> Any:
    """Return a batch of the kind: graph, pair, nested, packed, or a packed sequence in a dataclass (words)."""
    x = torch.stack([sample[0] for sample in samples])
    target = torch.stack([sample[1] for sample in samples])
    if kind == "graph":
        return Graph(x, target)
    if kind == "pair":
        return Pair(x, target, "a batch")
    if kind == "nested":
        return Nested(Graph(x, target), {"sizes": [torch.full((1,), float(len(x)))]})
    sequences = pack_sequence([row[: 2 + number % 9, None] for number, row in enumerate(x)], enforce_sorted=False)
    return (sequences, target) if kind == "packed" else Words(sequences, target)


class Collate:
    """`collate` of one kind, which loader processes get too."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, samples: list[tuple[Tensor, Tensor]]) -> Any:
        return collate(self.kind, samples)


def batches(kind: str, num_samples: int = 400) -> Datasets:
    """Return the toy's samples, in batches of the kind."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, 10, generator=generator)
    target = x[:, :5].cumsum(dim=1)
    return Datasets(train=TensorDataset(x, target), val=TensorDataset(x[:40], target[:40]), collate_fn=Collate(kind))


class Reader(nn.Module):
    """Reads rows, or sequences by an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = ToyModel()
        self.lstm = nn.LSTM(1, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor | PackedSequence) -> Tensor:
        if isinstance(x, PackedSequence):
            _, (state, _) = self.lstm(x)
            output: Tensor = self.head(state[-1])
        else:
            output = self.rows(x)
        return output


class ReadsBatches:
    """Takes the batches of `batches`, all of whose tensors must be on the model's device."""

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        device = next(model.parameters()).device
        if isinstance(batch, Nested):
            assert batch.sizes["sizes"][0].device == device
            batch = batch.graph
        if isinstance(batch, (list, tuple)):
            x, target = batch
        elif isinstance(batch, Words):
            x = batch.sequences
            target = batch.target
        else:
            x = batch.x
            target = batch.target
        # The lengths of a packed sequence stay on the CPU, where cuDNN wants them.
        inputs = x.data if isinstance(x, PackedSequence) else x
        assert (inputs.device, target.device) == (device, device)
        return StepOutput((model(x) - target).square().mean(), len(target))

    validation_step = training_step


class Numbers(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream of the toy's samples."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        for _ in range(330):
            x = torch.randn(10, generator=generator)
            yield x, x[:5] * 2


def stream() -> Datasets:
    return Datasets(train=Numbers(), val=Numbers())

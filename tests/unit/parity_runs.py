"""Trainings on simulated ranks, one after another in this process, noted by `Recording`; and what their notes say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from framework.data.batching import BatchPlan, micro_batches
from framework.parity.answering import findings
from framework.parity.recording import FOLDER, Recording
from framework.run_dir import RunDir
from framework.types import FitInfo, MicroIndices, StepReport
from tests.unit.simulated_ranks import cpu_context

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def mean_square(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def sgd(parameters: Iterable[Tensor], *, world_size: int) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@dataclass
class Training:
    """What is trained. `batches`: the samples of each step; others are fields of what the framework's trainer does."""

    model: Callable[[], nn.Module]
    loss: Loss = mean_square
    batches: Sequence[int] = (16, 16, 16)
    accumulate: int = 1
    optimizer: Callable[..., torch.optim.Optimizer] = sgd
    data: Callable[[int], tuple[Tensor, Tensor]] = field(default_factory=lambda: points)
    precision: str = "32-true"

    def findings(self, folder: Path, *, processes: int = 2) -> dict[str, Any]:
        """As `job=parity` gives them."""
        for name, world, moves in (("one", 1, False), ("moved", 1, True), ("many", processes, False)):
            self._train(folder / name, world=world, moves=moves)
        sides = (folder / name / FOLDER for name in ("one", "moved", "many"))
        return findings(*sides, processes=processes)

    def _train(self, folder: Path, *, world: int, moves: bool) -> None:
        ranks = [_Rank(self, folder, rank=rank, world=world, moves=moves) for rank in range(world)]
        begin = 0
        for step, count in enumerate(self.batches, start=1):
            plan = BatchPlan(max(self.batches), self.accumulate, world)
            for rank in ranks:
                rank.backward(plan, range(begin, begin + count))
            for parameters in zip(*(rank.model.parameters() for rank in ranks), strict=True):
                grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
                if grads:
                    mean = torch.stack(grads).sum(dim=0) / world
                    for parameter in parameters:
                        parameter.grad = mean.clone()
            for rank in ranks:
                rank.update(step, count)
            begin += count
        for rank in ranks:
            rank.recording.on_fit_end()


class _Rank:
    """One rank with generators of its own."""

    def __init__(self, training: Training, folder: Path, *, rank: int, world: int, moves: bool) -> None:
        self.training, self.rank, self.world = training, rank, world
        torch.manual_seed(0)
        self.model = training.model()
        self.optimizer = training.optimizer(self.model.parameters(), world_size=world)
        self.recording = Recording(
            run_dir=RunDir(folder),
            context=cpu_context(rank, world_size=world),
            steps=len(training.batches),
            precision=training.precision,
            moves_weights=moves,
        )
        torch.manual_seed(rank)
        self.recording.on_fit_start(FitInfo(self.model, 0, None, 1, None, self.optimizer))
        self.state = torch.get_rng_state()

    def backward(self, plan: BatchPlan, samples: range) -> None:
        torch.set_rng_state(self.state)
        # In another order than they lie, as a shuffled epoch's.
        order = torch.tensor(samples)[torch.randperm(len(samples), generator=torch.Generator().manual_seed(1))]
        self.indices = []
        for part in micro_batches(plan, global_count=len(samples), rank=self.rank):
            chosen = order[part.start : part.stop] if part else order[:1]
            self.indices.append(MicroIndices(chosen, len(part)))
            x, y = self.training.data(max(samples) + 1)
            weight = len(part) * self.world / len(samples)
            (self.training.loss(self.model, x[chosen], y[chosen]) * weight).backward()
        self.state = torch.get_rng_state()

    def update(self, step: int, count: int) -> None:
        torch.set_rng_state(self.state)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.recording.on_train_step_end(StepReport(step, 0, torch.zeros(()), count, tuple(self.indices)))
        self.state = torch.get_rng_state()


def points(size: int) -> tuple[Tensor, Tensor]:
    """8 numbers a sample, the first half of them elsewhere than the second; targets of 4."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(64, 8, generator=generator)
    x = x + torch.linspace(0, 2, 64)[:, None]
    return x[:size], torch.tanh(x[:size] @ torch.randn(8, 4, generator=generator))

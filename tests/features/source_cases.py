"""Sources whose samples depend on the model: PPO, which uses a rollout in several steps, and the hardest samples."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from framework import Batch, BatchInfo, Datasets, Source, StepOutput
from recipes.cartpole import play

MOVES = 40
STEPS_PER_ROLLOUT = 3


def padded(column: Tensor) -> Tensor:
    """Return the column of episodes with MOVES moves each, so that all processes have tensors of one shape."""
    rows = column.new_zeros(len(column), MOVES, *column.shape[2:])
    rows[:, : column.shape[1]] = column
    return rows


class Rollouts(Source):
    """Each rollout is used in three steps; it belongs to the places of the batch, as environments do."""

    slot_state: ClassVar[dict[str, int]] = {"rollout": 0}

    def __init__(self) -> None:
        self.rollout: Any = None

    def __len__(self) -> int:
        return 60

    def batch(self, model: nn.Module, info: BatchInfo) -> Batch:
        if info.step % STEPS_PER_ROLLOUT == 0:
            seeds = [[info.step, position] for position in info.positions.tolist()]
            episodes = play(model, seeds, max_moves=MOVES, greedy=False)
            logits, values = model(episodes.states)
            likelihoods = logits.log_softmax(dim=-1).gather(-1, episodes.actions.unsqueeze(-1)).squeeze(-1)
            returns = episodes.is_made.flip(1).cumsum(1).flip(1) / 10
            columns = [*episodes, likelihoods, returns - values, returns]
            self.rollout = tuple(padded(column) for column in columns)
        return self.rollout


def rollouts() -> Datasets:
    return Datasets(train=Rollouts(), val=TensorDataset(torch.arange(4)))


class PPO:
    """The clipped objective, over whole rollouts."""

    def training_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        states, actions, is_made, before, advantages, returns = batch
        logits, values = model(states)
        likelihoods = logits.log_softmax(dim=-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        ratio = (likelihoods - before).exp()
        gains = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        losses = (values - returns).square() - gains
        return StepOutput(losses[is_made].mean(), len(states), weight=is_made.sum())

    def validation_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        episodes = play(model, [[seed] for seed in batch[0].tolist()], max_moves=MOVES, greedy=True)
        return StepOutput(-episodes.is_made.sum() / len(batch[0]), len(batch[0]))


class Hardest(Source):
    """Takes the half of the candidates of all processes that is hardest; counts how often it took each sample."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(50, 6, generator=generator, dtype=torch.float64)
        self.labels = self.inputs[:, 0].gt(0).long()
        self.taken = torch.zeros(50, dtype=torch.int64)

    def __len__(self) -> int:
        return 41

    def batch(self, model: nn.Module, info: BatchInfo) -> Batch:
        candidates = []
        for position in info.positions.tolist():
            candidates.append(np.random.default_rng([info.step, position]).choice(50, 2, replace=False))
        drawn = torch.tensor(np.stack(candidates))
        losses = cross_entropy(model(self.inputs[drawn.flatten()]), self.labels[drawn.flatten()], reduction="none")
        drawn = info.gather(drawn).flatten()
        losses = info.gather(losses.view(-1, 2)).flatten()
        hardest = drawn[losses.argsort(descending=True, stable=True)][: info.global_count]
        self.taken += torch.bincount(hardest, minlength=50)
        own = hardest[info.positions]
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        return self.inputs[own], self.labels[own], weights

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken.copy_(state["taken"])


def hardest() -> Datasets:
    return Datasets(train=Hardest())


class Classify:
    """Checks that the batch was made with the weights of now."""

    def training_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        inputs, labels, weights = batch
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            assert torch.equal(parameter, weight)
        return StepOutput(cross_entropy(model(inputs), labels), len(labels))

    def validation_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        raise AssertionError("there is nothing to validate")

"""CartPole (Barto, Sutton and Anderson, 1983) by an actor and a critic: each step plays episodes with the policy.

The equations and limits are those of Gymnasium's CartPole-v1. Shapes in the comments:

    B  episodes of a batch
    T  moves: those of the longest episode of the batch
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss
from torch.utils.data import TensorDataset

from framework import Batch, BatchInfo, Datasets, Source, StepOutput

GRAVITY = 9.8
CART_MASS = 1.0
POLE_MASS = 0.1
# From the joint to the pole's centre.
POLE_LENGTH = 0.5
FORCE = 10.0
SECONDS = 0.02
MAX_X = 2.4
MAX_ANGLE = 12 * math.pi / 180


# The game


def move(state: Tensor, action: Tensor) -> Tensor:
    """Return the states after 0.02 s of a push to the left (0) or right (1). state: (B, 4)."""
    x, speed, angle, rotation = state.unbind(dim=1)
    force = FORCE * (2 * action - 1)
    mass = CART_MASS + POLE_MASS
    push = (force + POLE_MASS * POLE_LENGTH * rotation**2 * angle.sin()) / mass
    inertia = POLE_LENGTH * (4 / 3 - POLE_MASS * angle.cos() ** 2 / mass)
    angular = (GRAVITY * angle.sin() - angle.cos() * push) / inertia
    linear = push - POLE_MASS * POLE_LENGTH * angular * angle.cos() / mass
    return torch.stack(
        [x + SECONDS * speed, speed + SECONDS * linear, angle + SECONDS * rotation, rotation + SECONDS * angular], dim=1
    )


class Episodes(NamedTuple):
    """Episodes of different length, padded."""

    states: Tensor  # (B, T, 4)
    actions: Tensor  # (B, T)
    # The move was made: the pole had not fallen before.
    is_made: Tensor  # (B, T)


def play(model: nn.Module, seeds: list[list[int]], *, max_moves: int, greedy: bool) -> Episodes:
    """Play an episode for each seed, at most `max_moves` long. What is drawn depends on its seed alone."""
    generators = [np.random.default_rng(seed) for seed in seeds]
    state = torch.tensor(np.stack([generator.uniform(-0.05, 0.05, size=4) for generator in generators]))
    draws = torch.tensor(np.stack([generator.random(max_moves) for generator in generators]))
    is_up = torch.ones(len(seeds), dtype=torch.bool)
    states = []
    actions = []
    made = []
    for number in range(max_moves):
        logits, _ = model(state)
        to_right = logits.double().softmax(dim=1)[:, 1].cpu()
        threshold = 0.5 if greedy else draws[:, number]
        action = (to_right > threshold).double()
        states.append(state)
        actions.append(action.long())
        made.append(is_up)

        state = move(state, action)
        is_up = is_up & (state[:, 0].abs() < MAX_X) & (state[:, 2].abs() < MAX_ANGLE)
        if not is_up.any():
            break
    return Episodes(torch.stack(states, dim=1), torch.stack(actions, dim=1), torch.stack(made, dim=1))


# Data


class CartPole(Source):
    """Episodes that the model plays: a sample is an episode.

    Args:
        episodes: Number of episodes of an epoch.
        max_moves: An episode ends after as many moves.
        seed: Together with step and position, it decides what is drawn for an episode.
    """

    def __init__(self, episodes: int, max_moves: int, seed: int) -> None:
        self.episodes = episodes
        self.max_moves = max_moves
        self.seed = seed

    def __len__(self) -> int:
        return self.episodes

    def batch(self, model: nn.Module, info: BatchInfo) -> Batch:
        seeds = [[self.seed, info.step, position] for position in info.positions.tolist()]
        return play(model, seeds, max_moves=self.max_moves, greedy=False)


def cartpole(episodes: int, max_moves: int, seed: int, val_episodes: int = 20) -> Datasets:
    """Return episodes to train on, and the seeds of those to validate."""
    return Datasets(train=CartPole(episodes, max_moves, seed), val=TensorDataset(torch.arange(val_episodes)))


# Model and task


class ActorCritic(nn.Module):
    """Scores of both actions, and what the critic expects of the rest of the episode."""

    def __init__(self, hidden_size: int = 64) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, hidden_size), nn.Tanh(), nn.Linear(hidden_size, 2))
        self.critic = nn.Sequential(nn.Linear(4, hidden_size), nn.Tanh(), nn.Linear(hidden_size, 1))

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        # The game is played in float64 on the CPU.
        state = state.to(next(self.parameters()))
        return self.actor(state), self.critic(state).squeeze(-1)


class Play:
    """Advantage actor-critic: make moves likelier that brought more than the critic expected.

    Args:
        discount: What a reward is worth one move earlier.
        max_moves: Of an episode that is validated.
        scale: The critic's values are returns divided by it.
    """

    def __init__(self, discount: float, max_moves: int, scale: float = 50.0) -> None:
        self.discount = discount
        self.max_moves = max_moves
        self.scale = scale

    def training_step(self, model: nn.Module, batch: Episodes) -> StepOutput:
        made = batch.is_made.double()
        returns = torch.zeros_like(made)  # (B, T)
        after = torch.zeros_like(made[:, 0])
        for number in reversed(range(made.shape[1])):
            after = made[:, number] * (1 + self.discount * after)
            returns[:, number] = after

        logits, values = model(batch.states)
        returns = returns.to(values.dtype) / self.scale
        log_probabilities = logits.log_softmax(dim=-1).gather(-1, batch.actions.unsqueeze(-1)).squeeze(-1)
        losses = smooth_l1_loss(values, returns, reduction="none") - (returns - values.detach()) * log_probabilities

        # The mean over moves, so their number is the weight.
        num_moves = batch.is_made.sum()
        loss = losses[batch.is_made].mean()
        return StepOutput(loss, len(made), {"return": (num_moves, len(made))}, weight=num_moves)

    def validation_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        (seeds,) = batch
        episodes = play(model, [[seed] for seed in seeds.tolist()], max_moves=self.max_moves, greedy=True)
        num_moves = episodes.is_made.sum().to(seeds.device)
        return StepOutput(-num_moves / len(seeds), len(seeds), {"return": (num_moves, len(seeds))})

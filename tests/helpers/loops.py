"""The toy recipe as a plain PyTorch loop, which the framework must agree with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from recipes.toy import ToyModel, toy_regression
from tests.helpers.internals import GlobalOrder, seed_everything

BATCH_SIZE = 20


def toy_model(*, seed: int = 0) -> ToyModel:
    """Return the model with the first weights of a run with this seed. Seeds the generators of this process."""
    seed_everything(seed, rank=0)
    return ToyModel()


def toy_batches(
    *, epochs: int, batches: int | None = None, batch_size: int = BATCH_SIZE, shuffle: bool = True
) -> list[Sequence[Tensor]]:
    """Return (inputs, targets) of the first `batches` batches of each epoch (None: all), in the order of seed 0."""
    data: Any = toy_regression().train
    order = GlobalOrder(len(data), seed=0, shuffle=shuffle)
    taken: list[Sequence[Tensor]] = []
    for epoch in range(epochs):
        for indices in order.indices(epoch)[:].split(batch_size)[:batches]:
            taken.append([tensor[indices] for tensor in data.tensors])
    return taken


def plain_loop(
    batches: Sequence[Sequence[Tensor]],
    *,
    schedule: Callable[[Optimizer], LRScheduler] | None = None,
    after_step: Callable[[ToyModel], None] | None = None,
    lr: float = 0.001,
) -> dict[str, Tensor]:
    """The weights after one optimizer step on each batch."""
    model = toy_model()
    optimizer = SGD(model.parameters(), lr=lr)
    scheduler = None if schedule is None else schedule(optimizer)
    for inputs, targets in batches:
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        if after_step is not None:
            after_step(model)
    return model.state_dict()


def toy_loss(weights: dict[str, Tensor], *, part: str, samples: int | None = None) -> float:
    """The mean loss of these weights over the first `samples` samples of a part of the toy data."""
    model = ToyModel()
    model.load_state_dict(weights)
    data: Any = getattr(toy_regression(), part)
    inputs, targets = (tensor[:samples] for tensor in data.tensors)
    with torch.no_grad():
        return nn.functional.mse_loss(model(inputs), targets).item()

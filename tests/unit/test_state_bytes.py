"""Estimated bytes of optimizer states and checkpoints, compared with real ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn

from framework import Strategy
from framework.checkpoint import LocalStorage
from tests.helpers.internals import (
    checkpoint_bytes,
    generator_states,
    optimizer_state_bytes,
    tensor_bytes,
    write_checkpoint,
)


def network(device: str = "cpu") -> nn.Sequential:
    with torch.random.fork_rng(devices=[]), torch.device(device):
        return nn.Sequential(nn.Linear(300, 500), nn.BatchNorm1d(500), nn.Linear(500, 70), nn.Linear(70, 7, bias=False))


def stepped(make, model: nn.Module) -> torch.optim.Optimizer:
    """The real thing: on the CPU, with gradients of a real backward."""
    optimizer = make(model.parameters())
    model(torch.ones(4, 300)).sum().backward()
    optimizer.step()
    return optimizer


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "plain SGD": partial(torch.optim.SGD, lr=0.1),
    "Adam": torch.optim.Adam,
    "fused AdamW": partial(torch.optim.AdamW, fused=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizers_estimated_state_is_exact(make):
    real = stepped(make, network())
    values = chain.from_iterable(state.values() for state in real.state.values())
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    assert optimizer_state_bytes(make, network("meta").parameters()) == tensor_bytes(tensors)


def test_frozen_parameters_have_no_state():
    model = network("meta")
    model[0].requires_grad_(False)
    unfrozen = optimizer_state_bytes(torch.optim.Adam, model[1:].parameters())
    assert optimizer_state_bytes(torch.optim.Adam, model.parameters()) == unfrozen > 0


def test_groups_that_a_target_makes_from_the_model_are_counted():
    model = network("meta")

    def by_layer(_: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam([{"params": layer.parameters()} for layer in model])

    expected = optimizer_state_bytes(torch.optim.Adam, model.parameters())
    assert optimizer_state_bytes(by_layer, model.parameters()) == expected > 0


class KeepsGradients(Strategy):
    gradients_kept = 1


def estimated(model: nn.Module, make: Callable[..., torch.optim.Optimizer], **more: Any) -> int:
    sizes = optimizer_state_bytes(make, model.parameters())
    settings = {"world_size": 1, "averages": 0, "strategy": Strategy(), **more}
    return checkpoint_bytes(model, sizes, **settings)


@pytest.mark.parametrize(("make", "world_size"), [("plain SGD", 1), ("Adam", 3)])
def test_a_checkpoints_estimated_size_is_close(tmp_path, make, world_size):
    model = network()
    optimizer = stepped(OPTIMIZERS[make], model)
    state = {
        "model": model.state_dict(),
        "training": {"optimizer": optimizer.state_dict()},
        "generators": [generator_states(()) for _ in range(world_size)],
    }
    directory = tmp_path / write_checkpoint(
        LocalStorage(tmp_path), state, step=1, epoch=0, metrics={}, config_text="recipe: none\n"
    )
    real = sum(file.stat().st_size for file in directory.iterdir())
    how = partial(estimated, model, OPTIMIZERS[make], world_size=world_size)
    rough = how()
    size = tensor_bytes(model.parameters())
    assert rough == pytest.approx(real, rel=0.15)
    assert how(averages=1) > rough + 2 * size
    assert how(strategy=KeepsGradients()) == rough + world_size * size


def test_frozen_and_tied_weights_make_checkpoints_smaller():
    model = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.Linear(1000, 1000, bias=False))
    assert estimated(model, torch.optim.Adam) == pytest.approx(6 * 4e6, rel=0.01)
    model[0].requires_grad_(False)
    assert estimated(model, torch.optim.Adam) == pytest.approx(4 * 4e6, rel=0.01)
    model[1].weight = model[0].weight
    assert estimated(model, torch.optim.Adam) == pytest.approx(4e6, rel=0.03)

"""Bytes that are counted without the tensors, against those that real ones take."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from framework.checkpoint import write
from framework.checkpoint.store import saved_plainly
from framework.footprint import optimizer_state, rough_checkpoint_bytes, saved_bytes, tensor_bytes
from framework.seed import generator_states


def network(device: str = "cpu") -> nn.Sequential:
    with torch.random.fork_rng(devices=[]), torch.device(device):
        return nn.Sequential(nn.Linear(30, 50), nn.BatchNorm1d(50), nn.Linear(50, 7), nn.Linear(7, 7, bias=False))


def stepped(make, model: nn.Module) -> torch.optim.Optimizer:
    """The real thing: on the CPU, with gradients of a real backward."""
    optimizer = make(model.parameters())
    model(torch.ones(4, 30)).sum().backward()
    optimizer.step()
    return optimizer


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "plain SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "Adam with amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "fused AdamW, which the meta device refuses": partial(torch.optim.AdamW, fused=True),
    "Adafactor, which reads a value and factors its state": torch.optim.Adafactor,
    "ASGD, which reads a value": torch.optim.ASGD,
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.5, centered=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizers_state_is_what_a_real_one_keeps(make):
    real = stepped(make, network())
    wanted = [
        {name: (value.shape, value.dtype) for name, value in state.items() if isinstance(value, torch.Tensor)}
        for state in real.state.values()
    ]
    found = optimizer_state(make, network("meta").parameters())
    assert [
        {name: (value.shape, value.dtype) for name, value in entry.items() if isinstance(value, torch.Tensor)}
        for entry in found.entries
        if entry
    ] == wanted
    assert tensor_bytes(found.tensors()) == tensor_bytes(
        value for state in real.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    )


def test_frozen_parameters_have_no_state_and_no_gradient_is_left():
    model = network("meta")
    model[0].requires_grad_(False)
    found = optimizer_state(torch.optim.Adam, model.parameters())
    assert len(found.entries) == 5
    assert all(parameter.grad is None for parameter in model.parameters())


def really_saved(tree) -> int:
    file = io.BytesIO()
    with saved_plainly():
        torch.save(tree, file)
    return len(file.getbuffer())


def test_file_sizes_are_known_without_data():
    for tree_of in (
        lambda device: network(device).state_dict(),
        lambda device: {"state": {0: {"step": torch.tensor(1.0, device=device)}}, "list": [(1, "two")]},
        lambda device: [torch.zeros(1000, dtype=torch.uint8, device=device), torch.zeros(0, 3, device=device)],
    ):
        assert saved_bytes(tree_of("meta")) == pytest.approx(really_saved(tree_of("cpu")), rel=0.01, abs=128)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_shared_memory_is_saved_once(device):
    weight = torch.zeros(5000, device=device)
    shared, apart = weight.view(50, 100), torch.zeros(5000, device=device)
    assert saved_bytes({"a": weight, "b": apart}) - saved_bytes({"a": weight, "b": shared}) >= 20_000


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_estimated_size_of_a_checkpoint_is_about_the_real_one(tmp_path, make, world_size):
    model = network()
    optimizer = stepped(make, model)
    state = {
        "model": model.state_dict(),
        "training": {"optimizer": optimizer.state_dict()},
        "generators": [generator_states(()) for _ in range(world_size)],
    }
    directory = write(tmp_path, state, step=1, epoch=0, metrics={}, config_text="recipe: none\n")
    real = sum(file.stat().st_size for file in directory.iterdir())
    rough = rough_checkpoint_bytes(model.state_dict(), make, model.parameters(), world_size=world_size, averages=0)
    assert rough == pytest.approx(real, rel=0.15)
    averaged = rough_checkpoint_bytes(model.state_dict(), make, model.parameters(), world_size=world_size, averages=1)
    assert averaged > rough + 2 * tensor_bytes(model.parameters())
    left_out = rough_checkpoint_bytes(
        model.state_dict(), make, model.parameters(), world_size=world_size, averages=0, gradients=1
    )
    assert left_out == rough + world_size * tensor_bytes(model.parameters())


def test_frozen_and_tied_weights_make_checkpoints_smaller():
    model = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.Linear(1000, 1000, bias=False))

    def rough() -> int:
        weights = model.state_dict()
        return rough_checkpoint_bytes(weights, torch.optim.Adam, model.parameters(), world_size=1, averages=0)

    assert rough() == pytest.approx(6 * 4e6, rel=0.01)
    model[0].requires_grad_(False)
    assert rough() == pytest.approx(4 * 4e6, rel=0.01)
    model[1].weight = model[0].weight
    assert rough() == pytest.approx(4e6, rel=0.03)

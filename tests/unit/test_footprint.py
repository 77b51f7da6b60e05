"""Bytes that are counted without the tensors, against those that real ones take."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from framework.footprint import optimizer_state, saved_bytes, tensor_bytes


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


def test_parameters_that_are_not_trained_have_no_state_and_gradients_are_gone_again():
    model = network("meta")
    model[0].requires_grad_(False)
    found = optimizer_state(torch.optim.Adam, model.parameters())
    assert len(found.entries) == 5
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_short_type_has_a_short_state():
    whole, half = (
        tensor_bytes(optimizer_state(OPTIMIZERS["SGD with momentum"], network("meta").to(dtype).parameters()).tensors())
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert whole == 2 * half > 0


def test_an_optimizer_that_can_not_step_alone_says_so():
    with pytest.raises(TypeError, match="closure"):
        optimizer_state(torch.optim.LBFGS, network("meta").parameters())


def really_saved(tree) -> int:
    file = io.BytesIO()
    torch.save(tree, file)
    return len(file.getbuffer())


def test_the_size_of_a_file_is_found_from_tensors_without_data():
    for tree_of in (
        lambda device: network(device).state_dict(),
        lambda device: {"state": {0: {"step": torch.tensor(1.0, device=device)}}, "list": [(1, "two")]},
        lambda device: [torch.zeros(1000, dtype=torch.uint8, device=device), torch.zeros(0, 3, device=device)],
    ):
        assert saved_bytes(tree_of("meta")) == pytest.approx(really_saved(tree_of("cpu")), rel=0.01, abs=128)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_shared_memory_is_saved_once(device):
    weight = torch.zeros(5000, device=device)
    assert saved_bytes({"a": weight, "b": weight.view(50, 100)}) < 1.2 * 20_000
    assert saved_bytes({"a": weight, "b": torch.zeros(5000, device=device)}) > 40_000

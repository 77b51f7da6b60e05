from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from framework.distributed.context import Context
from framework.errors import ConfigError, TopologyError
from framework.strategies import DDP, Single, auto, ddp
from framework.topology import Topology


def make(*, procs: int = 1, devices: tuple[str, ...] = ("cpu",)) -> Context:
    topology = Topology(nnodes=1, procs_per_node=procs, gpus_per_node=0, span=len(devices))
    return Context(topology, 0, 0, 0, tuple(map(torch.device, devices)), "gloo")


@pytest.fixture
def group():
    """A gloo group of this process alone, which opens no port."""
    dist.init_process_group(
        "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=20),
    )
    yield
    dist.destroy_process_group()


def linear() -> nn.Linear:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).reshape(2, 3))
    return model


def test_single_leaves_the_model_alone_and_allocates_nothing_per_step(own_state):
    strategy, model = Single(context=make()), linear()
    assert strategy.wrap(model) is model
    assert strategy.unwrap(model) is model
    assert strategy.accumulate(model, synchronise=True) is strategy.accumulate(model, synchronise=False)


def test_single_refuses_several_processes_and_says_what_to_do():
    with pytest.raises(TopologyError, match=r"strategy=ddp \(or auto\), or topology\.procs_per_node=1"):
        Single(context=make(procs=2))


def test_auto_is_single_for_one_process_and_ddp_for_several():
    assert isinstance(auto(context=make()), Single)
    assert isinstance(auto(context=make(procs=2), static_graph=True), DDP)


@pytest.mark.parametrize("broadcast", [True, False])
def test_ddp_wraps_and_unwraps_and_synchronises_only_when_told(own_state, group, broadcast):
    strategy, model = DDP(context=make(), broadcast_buffers=broadcast, bucket_cap_mb=1), linear()
    wrapped = strategy.wrap(model)
    assert isinstance(wrapped, DistributedDataParallel)
    assert wrapped.device_ids is None
    assert strategy.unwrap(wrapped) is model
    assert strategy.unwrap(model) is model
    seen = []
    for synchronise in (False, True):
        with strategy.accumulate(wrapped, synchronise=synchronise):
            seen.append(wrapped.require_backward_grad_sync)
            wrapped(torch.ones(4, 3)).sum().backward()
    assert seen == [False, True]
    assert wrapped.require_backward_grad_sync
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.full((2, 3), 8.0))


def test_ddp_hands_its_options_to_torch(own_state, group):
    strategy = DDP(context=make(), broadcast_buffers=False, find_unused_parameters=True, gradient_as_bucket_view=False)
    wrapped = strategy.wrap(linear())
    assert isinstance(wrapped, DistributedDataParallel)
    assert wrapped.find_unused_parameters is True
    assert wrapped.gradient_as_bucket_view is False
    buffers = "forward_sync_buffers" if hasattr(wrapped, "forward_sync_buffers") else "broadcast_buffers"
    assert getattr(wrapped, buffers) is False


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(("cpu",), None), (("cpu", "cpu"), None), (("cuda:3",), [3]), (("cuda:2", "cuda:3"), None)],
)
def test_device_ids_are_given_only_for_a_replica_that_is_one_gpu(own_state, monkeypatch, devices, expected):
    given = {}
    monkeypatch.setattr("framework.strategies.ddp.DistributedDataParallel", lambda _, **how: given.update(how))
    DDP(context=make(devices=devices), find_unused_parameters=True).wrap(linear())
    assert given["device_ids"] == expected


def test_ddp_refuses_a_model_with_nothing_to_train(own_state):
    model = linear().requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter of Linear requires a gradient"):
        DDP(context=make()).wrap(model)


class OutOfOrder(nn.Module):
    """Uses its layers in another order than it has them; one is used twice."""

    def __init__(self):
        super().__init__()
        self.last, self.first, self.twice = nn.Linear(3, 1), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.twice(self.twice(self.first(x))))


def test_ddp_keeps_the_order_in_which_gradients_came_and_brings_it_back(own_state, group):
    strategy, model = DDP(context=make()), OutOfOrder()
    wrapped = strategy.wrap(model)
    with strategy.accumulate(wrapped, synchronise=False):
        wrapped(torch.ones(4, 3)).sum().backward()
    assert strategy.state_dict(wrapped)["gradient_order"] == []  # nothing was exchanged yet
    with strategy.accumulate(wrapped, synchronise=True):
        wrapped(torch.ones(4, 3)).sum().backward()
    assert strategy.state_dict(wrapped)["exchanges"] == 1
    order = strategy.state_dict(wrapped)["gradient_order"]
    assert sorted(order) == sorted(name for name, _ in model.named_parameters())
    assert order.index("last.weight") < order.index("twice.weight") < order.index("first.weight")
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())

    other, twin = DDP(context=make()), OutOfOrder()
    wrapped = other.wrap(twin)
    before = {name: tensor.clone() for name, tensor in twin.state_dict().items()}
    generator = torch.get_rng_state()
    seen = []
    for name, parameter in twin.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    other.load_state_dict(wrapped, {"gradient_order": order[::-1], "exchanges": 1})
    assert seen == order[::-1]
    assert other.state_dict(wrapped)["gradient_order"] == order[::-1]
    assert other.unwrap(wrapped) is twin
    assert all(torch.equal(tensor, before[name]) for name, tensor in twin.state_dict().items())
    assert all(parameter.grad is None for parameter in twin.parameters())
    assert torch.equal(torch.get_rng_state(), generator)


def test_where_ddp_keeps_its_first_layout_nothing_is_noted(own_state, group):
    strategy, model = DDP(context=make(), find_unused_parameters=True), OutOfOrder()
    wrapped = strategy.wrap(model)
    wrapped(torch.ones(4, 3)).sum().backward()
    assert strategy.state_dict(wrapped)["gradient_order"] == []
    strategy.load_state_dict(wrapped, {"gradient_order": ["last.weight"], "exchanges": 1})
    assert model.last.weight.grad is not None  # nothing was exchanged


def test_ddp_gives_a_rank_its_own_buffers_back(own_state, group):
    strategy, model = DDP(context=make(), broadcast_buffers=False), nn.BatchNorm1d(2)
    wrapped = strategy.wrap(model)
    mean = model.get_buffer("running_mean")
    mean.fill_(5.0)
    state = copy.deepcopy(strategy.state_dict(wrapped))  # its tensors are the live ones
    assert [sorted(buffers) for buffers in state["buffers"]] == [["num_batches_tracked", "running_mean", "running_var"]]
    mean.zero_()
    strategy.load_state_dict(wrapped, state)
    assert mean.tolist() == [5.0, 5.0]
    strategy.load_state_dict(wrapped, {"buffers": [{"running_mean": torch.zeros(2)}] * 2})  # of two ranks
    assert mean.tolist() == [5.0, 5.0]


class Wrapped(nn.Module):
    """What DDP is to the exchange: it calls the module inside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self) -> Any:
        return self.module()


def test_the_order_of_gradients_is_not_left_to_a_compiled_call():
    model: Any = Wrapped(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    came: list[str] = []
    for name, parameter in model.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))

    def compiled() -> None:
        raise AssertionError("called")

    module, model._compiled_call_impl = model.module, compiled
    order = ["1.bias", "0.weight", "1.weight", "0.bias"]
    ddp._exchange_in_order(model, order)
    assert came == order
    assert (model.module, model._compiled_call_impl) == (module, compiled)

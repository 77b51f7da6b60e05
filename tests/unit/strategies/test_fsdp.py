"""What strategy=fsdp takes apart, and what it refuses. How ranks compute together: tests/multiproc/test_spread.py."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from framework.distributed.context import Context
from framework.distributed.tensors import is_model_spread, is_spread, spread_like, whole
from framework.errors import ConfigError, TopologyError
from framework.strategies import FSDP
from framework.topology import Topology
from tests.unit.simulated_ranks import cpu_context

pytestmark = pytest.mark.usefixtures("group", "own_state")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.up(x).relu())
        return result


class Blocks(nn.Module):
    """Two blocks in a list, an embedding whose weights the head uses too, attention alone and in a layer of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([Block(8), Block(8)])
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = block(hidden)
        result: Tensor = self.head(self.layer(self.attention(hidden, hidden, hidden)[0]))
        return result


def by_themselves(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def wrapped(model: nn.Module, **keywords: Any) -> nn.Module:
    return FSDP(context=cpu_context(), **keywords).wrap(model)


@pytest.mark.parametrize(
    ("at_least", "expected"),
    [
        (100, ["", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "layer"]),
        (140, ["", "blocks.0.up", "blocks.1.up", "layer"]),
        (270, ["", "blocks.0", "blocks.1", "layer"]),
        (1000, [""]),
    ],
)
def test_modules_of_enough_parameters_are_gathered_by_themselves(at_least: int, expected: list[str]) -> None:
    """144 and 136 in a block, 464 in the layer, which reads the weights of its parts; two use the embedding's 160."""
    plain = Blocks()
    model = copy.deepcopy(plain)
    assert by_themselves(wrapped(model, min_num_params=at_least)) == expected
    tokens = torch.arange(6).reshape(2, 3)
    torch.testing.assert_close(model(tokens), plain(tokens))
    model(tokens).sum().backward()
    assert all(is_spread(parameter.grad) for parameter in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tokens), plain.eval()(tokens))


def test_modules_of_a_class_are_gathered_by_themselves() -> None:
    assert by_themselves(wrapped(Blocks(), wrap=["Block"])) == ["", "blocks.0", "blocks.1"]


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (["Blok"], r"Blocks has no module of the class Blok\.\nIt has Block, Dropout, Embedding"),
        (["ModuleList"], "ModuleList only holds other modules"),
        ("Block", r"must be auto, or a list of class names: strategy\.wrap=\[Block\]"),
    ],
)
def test_a_class_that_cannot_be_gathered_is_refused(wrap: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wrapped(Blocks(), wrap=wrap)


def test_what_torch_refuses_is_refused_with_what_to_do() -> None:
    model = Block(4)
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError, match=r"without dimensions: scale\.\nGive it the shape \(1,\)"):
        wrapped(model)
    mixed = Block(4)
    mixed.down.to(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"up\.bias is float32, down\.bias is bfloat16"):
        wrapped(mixed)
    with pytest.raises(ConfigError, match=r"strategy\.min_num_params=0 is below 1"):
        wrapped(Block(4), min_num_params=0)


def test_several_devices_of_a_process_are_refused() -> None:
    two = Context(Topology(1, 1, 0, 2), 0, 0, 0, (torch.device("cpu"),) * 2, "gloo")
    with pytest.raises(TopologyError, match=r"Use topology\.gpus_per_process=1 topology\.min_gpus_per_process=1"):
        FSDP(context=two)


def test_gloo_between_gpus_is_refused() -> None:
    shared = Context(Topology(1, 2, 1, 1), 0, 0, 0, (torch.device("cuda", 0),), "gloo")
    with pytest.raises(TopologyError, match=r"from GPU to GPU, which backend=gloo can't"):
        FSDP(context=shared)
    FSDP(context=replace(shared, backend="nccl"))


@pytest.mark.parametrize("reshard", [None, True, False])
def test_after_a_forward_without_backward_the_model_is_spread_as_before(reshard: bool | None) -> None:
    model = wrapped(Block(8), min_num_params=100, reshard_after_forward=reshard)
    before = [id(parameter) for parameter in model.parameters()]
    with torch.no_grad():
        model(torch.ones(2, 8))
    assert is_model_spread(model)
    assert [id(parameter) for parameter in model.parameters()] == before


def test_gradients_add_up_until_they_are_synchronised() -> None:
    strategy, plain = FSDP(context=cpu_context(), min_num_params=100), Block(8)
    model = Block(8)
    model.load_state_dict(plain.state_dict())
    strategy.wrap(model)
    for synchronise in (False, False, True) * 2:
        inputs = torch.randn(4, 8)
        with strategy.accumulate(model, synchronise=synchronise):
            model(inputs).square().mean().backward()
        plain(inputs).square().mean().backward()
        if synchronise:
            for own, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                assert own.grad is not None
                torch.testing.assert_close(whole(own.grad), wanted.grad)
            model.zero_grad()
            plain.zero_grad()


def test_a_whole_tensor_is_spread_as_another_is_without_keeping_it() -> None:
    model = wrapped(Block(8))
    own = next(model.parameters())
    full = torch.randn(16, 8, dtype=torch.float64)
    part: Any = spread_like(own, full)
    assert part.placements == own.placements  # type: ignore[attr-defined]
    assert torch.equal(whole(part), full)
    assert part.to_local().untyped_storage().data_ptr() != full.untyped_storage().data_ptr()
    plain = torch.ones(2)
    assert spread_like(plain, full) is full
    assert whole(plain) is plain

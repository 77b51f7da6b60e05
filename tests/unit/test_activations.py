"""Modules that are recomputed in the backward: the same numbers, less memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from framework.errors import ConfigError
from tests.helpers.internals import apply_activation_checkpointing

pytestmark = pytest.mark.usefixtures("own_state")


class Block(nn.Module):
    """Draws numbers, keeps statistics, takes a keyword, and counts how often it computes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.BatchNorm1d(2 * width)
        self.drop = nn.Dropout(0.4)
        self.calls = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        result: Tensor = x + scale * self.down(self.drop(self.norm(self.up(x)).relu()))
        return result


class Blocks(nn.Module):
    def __init__(self, kind: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.blocks = nn.ModuleList([kind(8), kind(8)])
        self.tail = nn.ModuleList([kind(8)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        result: Tensor = self.tail[0](x)
        return result


class Counts(Block):
    """Changes a buffer that isn't a statistic."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.get_buffer("seen").add_(1)
        return super().forward(x, scale=scale)


def kept_bytes(model: nn.Module, inputs: Tensor) -> tuple[Tensor, int]:
    """The loss, and what autograd keeps for its backward beside parameters."""
    own = {id(parameter) for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if id(tensor) not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(inputs).square().sum()
    return loss, sum(kept.values())


def train(model: nn.Module) -> tuple[list[Tensor], dict[str, Any], Tensor]:
    """Gradients of each of three steps, the state after them, and the state of the generator."""
    torch.manual_seed(5)
    gradients = []
    for _ in range(3):
        model(torch.randn(4, 8)).square().sum().backward()
        gradients += [each.grad for each in model.parameters() if each.grad is not None]
        model.zero_grad()
    return gradients, model.state_dict(), torch.get_rng_state()


@pytest.mark.parametrize("which", ["auto", ["Block", "Linear"]], ids=str)
def test_recomputing_changes_no_number_name_or_draw(which: Any) -> None:
    """Bit for bit, BatchNorm's statistics and how many batches they are of too."""
    torch.manual_seed(0)
    plain = Blocks()
    again = copy.deepcopy(plain)
    names = [name for name, _ in again.named_parameters()]
    apply_activation_checkpointing(again, which)
    assert [name for name, _ in again.named_parameters()] == names
    wanted = train(plain)
    found = train(again)
    assert list(found[1]) == list(wanted[1])
    for a, b in zip(wanted[0] + list(wanted[1].values()), found[0] + list(found[1].values()), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(wanted[2], found[2])
    assert [vars(block)["calls"] for block in (*plain.blocks, *again.blocks)] == [3, 3, 6, 6]


def test_evaluation_recomputes_nothing() -> None:
    plain = Blocks()
    inputs = torch.randn(256, 8)
    again = copy.deepcopy(plain)
    apply_activation_checkpointing(again, "auto")
    (_, much) = kept_bytes(plain, inputs)
    (loss, little) = kept_bytes(again, inputs)
    assert little < 0.6 * much
    loss.backward()
    assert [block.calls for block in (*again.blocks, *again.tail)] == [2, 2, 1]
    with torch.no_grad():
        again.eval()(inputs)
    with torch.inference_mode():
        again(inputs)
    assert [block.calls for block in again.blocks] == [4, 4]


def test_a_copy_computes_with_its_own_weights() -> None:
    model = Blocks().eval()
    inputs = torch.randn(3, 8)
    apply_activation_checkpointing(model, ["Block"])
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.get_parameter("blocks.0.down.bias").add_(1.0)
    assert not torch.equal(copied(inputs), model(inputs))


def test_repeated_modules_are_found_at_any_depth() -> None:
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2, enable_nested_tensor=False)
    stages = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    model = nn.Sequential(Blocks(), nn.ModuleDict({"a": layers}), stages)
    apply_activation_checkpointing(model, "auto")
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == [
        "0.blocks.0",
        "0.blocks.1",
        "1.a.layers.0",
        "1.a.layers.1",
        "2.0",
        "2.1",
    ]


@pytest.mark.parametrize(
    ("model", "which", "message"),
    [
        (Blocks(), ["Blok"], r"Blocks has no module of the class Blok\.\nIt has BatchNorm1d,"),
        (Blocks(), ["ModuleList"], "ModuleList only holds other modules"),
        (nn.Sequential(nn.Linear(3, 7), nn.Tanh()), "auto", "Sequential has no list or sequence with several"),
    ],
)
def test_what_cannot_be_recomputed_is_refused(model: nn.Module, which: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_activation_checkpointing(model, which)
    apply_activation_checkpointing(model, None)
    assert not any("forward" in vars(module) for module in model.modules())


def test_changing_a_buffer_in_forward_is_refused() -> None:
    model = Blocks(Counts)
    apply_activation_checkpointing(model, ["Counts"])
    with pytest.raises(ConfigError, match=r"the forward of Counts changes its buffer seen"):
        model(torch.randn(4, 8)).sum().backward()


class Drops(nn.Module):
    """Draws whatever it is called with: a tensor, keywords, containers, an object that torch can't look into."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Any = None, *, mapping: Any = None, item: Any = None) -> Tensor:
        if mapping is not None:
            x = mapping["x"][0]
        elif item is not None:
            x = item.x
        return nn.functional.dropout(x * self.weight, 0.5)


class Item:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Spread(nn.Module):
    """Has weights on two devices, so it may draw on both."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.ones(8), torch.ones(8)])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.parts[0]


@pytest.mark.parametrize(
    ("module", "call", "indices"),
    [
        (Drops(), lambda module, x: module(x), {0}),
        (Drops(), lambda module, x: module(x=x), {0}),
        (Drops(), lambda module, x: module(mapping={"x": [x]}), {0}),
        (Drops(), lambda module, x: module(item=Item(x)), {0}),
        (Spread(), lambda module, x: module(x), {0, 1}),
    ],
)
def test_device_generators_are_saved_for_any_call(
    module: nn.Module, call: Callable[[nn.Module, Tensor], Tensor], indices: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of GPUs are fakes: torch looks for devices in the arguments of `get_device_states`."""
    seen: list[set[torch.device]] = []

    def get_device_states(*args: Any) -> tuple[list[int], list[Tensor]]:
        seen.append({each.device for each in tree_leaves(args) if isinstance(each, Tensor)})
        return [], []

    monkeypatch.setattr("torch.utils.checkpoint.get_device_states", get_device_states)
    apply_activation_checkpointing(nn.Sequential(module), [type(module).__name__])
    with FakeTensorMode():
        for number, name in enumerate(dict(module.named_parameters())):
            owner, _, last = name.rpartition(".")
            weight = nn.Parameter(torch.empty(8, device=f"cuda:{number}"))
            setattr(module.get_submodule(owner), last, weight)
        x = torch.empty(4, 8, device="cuda:0")
        monkeypatch.setattr("torch.cuda._initialized", True)
        call(module, x)
        monkeypatch.undo()
    assert seen == [{torch.device("cuda", index) for index in indices}]


@pytest.mark.parametrize("by_keyword", [False, True])
def test_an_input_that_changes_is_an_error(by_keyword: bool) -> None:
    """Recomputing with the changed input would give wrong gradients in silence."""
    model = nn.Sequential(Drops())
    apply_activation_checkpointing(model, ["Drops"])
    x = torch.randn(4, 8)
    output = model[0](x=x) if by_keyword else model[0](x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()

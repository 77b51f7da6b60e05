"""What strategy=fsdp takes apart, and what it refuses. How ranks compute together: tests/multiproc/test_spread.py."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from framework.config.schema import Precision
from framework.distributed.context import Context
from framework.distributed.tensors import is_model_spread, is_spread, spread_like, whole
from framework.errors import ConfigError, TopologyError
from framework.strategies import FSDP
from framework.topology import Topology
from framework.types import own_groups
from tests.unit.simulated_ranks import cpu_context

pytestmark = pytest.mark.usefixtures("group", "own_state")


GO_TOGETHER = {
    Precision.FP32: ("fp32", "bf16"),
    Precision.BF16_MIXED: ("fp32", "bf16"),
    Precision.FP16_MIXED: ("fp32", "fp16"),
    Precision.BF16: ("bf16",),
    Precision.FP64: (),
}


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
        ([], r"strategy\.wrap=\[\]: must be auto, or a list of class names"),
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


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            {"param_dtpye": "bf16"},
            r"strategy\.mp_policy\.param_dtpye: .* Did you mean strategy\.mp_policy\.param_dtype",
        ),
        ({"reduce_dtype": "bfloat16"}, r"reduce_dtype=bfloat16: must be one of fp32, bf16, fp16, or null"),
        ("bf16", r"strategy\.mp_policy=bf16: must be a mapping, such as strategy\.mp_policy\.param_dtype=bf16"),
    ],
)
def test_a_number_format_that_there_is_none_of_is_refused(policy: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FSDP(context=cpu_context(), mp_policy=policy)


@pytest.mark.parametrize("key", ["param_dtype", "reduce_dtype"])
@pytest.mark.parametrize("precision", list(Precision))
def test_number_formats_that_go_with_a_precision(precision: Precision, key: str) -> None:
    """How those that do compute: tests/multiproc/test_spread.py."""
    longer = ("fp32",) if (precision, key) == (Precision.BF16, "reduce_dtype") else ()
    for name in ("fp32", "bf16", "fp16"):
        strategy = FSDP(context=cpu_context(), mp_policy={key: name})
        if name in GO_TOGETHER[precision] + longer:
            strategy.check_precision(precision)
            continue
        with pytest.raises(ConfigError, match=rf"{key}={name} can't go with trainer\.precision={precision.value}: "):
            strategy.check_precision(precision)
    FSDP(context=cpu_context()).check_precision(precision)


def test_why_formats_do_not_go_together_and_what_does() -> None:
    half = FSDP(context=cpu_context(), mp_policy={"param_dtype": "fp16"})
    with pytest.raises(ConfigError, match=r"without a loss scaler small .*\n.*null or fp32 or bf16, or .*16-mixed"):
        half.check_precision(Precision.FP32)
    brain = FSDP(context=cpu_context(), mp_policy={"reduce_dtype": "bf16", "param_dtype": "fp16"})
    with pytest.raises(
        ConfigError, match=r"with a loss scaler, .*\nUse strategy\.mp_policy\.reduce_dtype=null or fp32"
    ):
        brain.check_precision(Precision.FP16_MIXED)


class Normed(nn.Module):
    """With statistics, with and without weights, between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 2)
        self.norm, self.bare = nn.BatchNorm1d(8), nn.BatchNorm1d(8, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.bare(self.norm(self.up(x)).relu()))
        return result


def test_short_weights_are_what_is_computed_with_and_the_model_gives_the_type_it_would() -> None:
    """Statistics and what is computed with them stay in their type; so does what the optimizer has."""
    policy = {"param_dtype": "bf16"}
    plain = Normed()
    model = copy.deepcopy(plain)
    seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.BatchNorm1d):
            module.register_forward_hook(
                lambda _, given, output, name=name: seen.update({name: (given[0].dtype, output.dtype)})
            )
    wrapped(model, mp_policy=policy, min_num_params=72)
    inputs = torch.randn(16, 8)
    output = model(inputs)
    assert (output.dtype, seen["up"][0], seen["down"][0]) == (torch.float32, torch.bfloat16, torch.bfloat16)
    assert all(buffer.dtype in (torch.float32, torch.int64) for buffer in model.buffers())
    torch.testing.assert_close(output, plain(inputs), rtol=0.05, atol=0.05)
    torch.testing.assert_close(model.norm.running_mean, plain.norm.running_mean, rtol=0.0, atol=0.01)
    output.sum().backward()
    assert all(each.dtype == each.grad.dtype == torch.float32 for each in model.parameters())  # type: ignore[union-attr]


def test_a_degree_that_does_not_divide_the_processes_is_refused() -> None:
    four = cpu_context(world_size=4)
    for given in (3, 8, 0, True, "some"):
        with pytest.raises(TopologyError, match=r"doesn't divide the 4 processes .*\nUse one of 1, 2, 4; auto"):
            FSDP(context=four, data_parallel_shard_degree=given)
    nodes = replace(four, topology=Topology(2, 2, 0, 1))
    degrees = {
        given: FSDP(context=nodes, data_parallel_shard_degree=given).sharding.ranks for given in (None, "auto", 1)
    }
    assert degrees == {None: 4, "auto": 2, 1: 1}
    assert FSDP(context=cpu_context(), data_parallel_shard_degree=8).sharding.ranks == 1


def test_memory_of_the_cpu_is_for_those_that_compute_elsewhere() -> None:
    with pytest.raises(ConfigError, match=r"these processes compute on the CPU, where they are already\."):
        FSDP(context=cpu_context(), cpu_offload=True)
    gpus = Context(Topology(1, 4, 4, 1), 0, 0, 0, (torch.device("cuda", 0),), "nccl")
    assert FSDP(context=gpus, cpu_offload=True).sharding.is_on_cpu
    with pytest.raises(ConfigError, match=r"one copy of the model over all 4 processes, and here each 2 have one\."):
        FSDP(context=gpus, cpu_offload=True, data_parallel_shard_degree=2)


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


def test_weights_whose_channels_lie_last_are_gathered_as_any_others() -> None:
    """As `trainer.channels_last` lays them; torch refuses to spread them so."""
    plain = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
    model = wrapped(copy.deepcopy(plain))
    image = torch.randn(2, 2, 6, 6).contiguous(memory_format=torch.channels_last)
    for each in (plain, model):
        each(image).square().mean().backward()
    for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), wanted.grad)  # type: ignore[arg-type]


def test_buffers_are_shared_where_a_step_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before each micro-batch of it."""
    shared: list[int] = []
    monkeypatch.setattr("framework.strategies.fsdp.broadcast", lambda buffers: shared.append(len(list(buffers))))
    strategy, model, counts = FSDP(context=cpu_context(world_size=2)), nn.BatchNorm1d(2), []
    for synchronise in (False, True, True, False, False, True):
        strategy.accumulate(model, synchronise=synchronise)
        counts.append(len(shared))
    assert counts == [1, 1, 2, 3, 3, 3]
    assert set(shared) == {3}


def test_the_group_that_all_gather_in_is_named_for_its_time_outs() -> None:
    """Of one copy over all ranks as well, where it may be the default group or another: that is for torch to say."""
    strategy = FSDP(context=cpu_context())
    weight: Any = next(strategy.wrap(Block(4)).parameters())
    assert weight.device_mesh.get_group() in own_groups(strategy)

"""strategy=fsdp: what is gathered by itself, number formats, copies, and steps that overflow."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from framework.strategies import FSDP
from tests.helpers.contexts import cpu_context
from tests.helpers.internals import Context, Topology, group_timeout, is_dtensor, is_model_sharded, set_timeout
from tests.helpers.rank_pool import RankPool
from tests.helpers.results import differ
from tests.parity.training import STRATEGIES, How, WeightsOfSteps, trainer_of

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_state")]


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


def gather_by_themselves(context: Context, options: dict[str, Any]) -> list[str]:
    """Give the names of the modules that are; the model computes as before and stays sharded."""
    # Of torch 2.14, for each linear layer: its output is a view if the input has three dimensions.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(FSDPLinear\) returned a view")
    torch.manual_seed(0)
    plain = Blocks()
    model = FSDP(context=context, **options).wrap(copy.deepcopy(plain))
    tokens = torch.arange(6).reshape(2, 3)
    torch.testing.assert_close(model(tokens), plain(tokens))
    model(tokens).sum().backward()
    assert all(is_dtensor(parameter.grad) for parameter in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tokens), plain.eval()(tokens))
    assert is_model_sharded(model)
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"min_num_params": 100}, ["", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "layer"]),
        ({"min_num_params": 270, "reshard_after_forward": False}, ["", "blocks.0", "blocks.1", "layer"]),
        ({"wrap": ["Block"], "reshard_after_forward": True}, ["", "blocks.0", "blocks.1"]),
    ],
    ids=str,
)
def test_modules_are_gathered_by_themselves(rank_pool: RankPool, options: dict[str, Any], expected: list[str]) -> None:
    """144 and 136 in a block, 464 in the layer, which reads the weights of its parts; two use the embedding's 160."""
    assert rank_pool.run(gather_by_themselves, options, ranks=2) == [expected] * 2


class Normed(nn.Module):
    """Has normalisations with statistics between its layers, with and without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8)
        self.bare = nn.BatchNorm1d(8, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.bare(self.norm(self.up(x)).relu()))
        return result


def compute_in_short_weights(context: Context) -> None:
    torch.manual_seed(0)
    plain = Normed()
    model = copy.deepcopy(plain)
    seen = {}
    for name, module in model.named_children():
        module.register_forward_pre_hook(lambda _, given, name=name: seen.update({name: given[0].dtype}))
    FSDP(context=context, mp_policy={"param_dtype": "bf16"}, min_num_params=72).wrap(model)
    inputs = torch.randn(16, 8)
    output = model(inputs)
    assert (output.dtype, seen["up"], seen["down"]) == (torch.float32, torch.bfloat16, torch.bfloat16)
    assert all(buffer.dtype in (torch.float32, torch.int64) for buffer in model.buffers())
    torch.testing.assert_close(output, plain(inputs), rtol=0.05, atol=0.05)
    torch.testing.assert_close(model.norm.running_mean, plain.norm.running_mean, rtol=0.0, atol=0.01)
    output.sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.dtype == parameter.grad.dtype == torch.float32


def test_weights_are_cast_and_statistics_are_not(rank_pool: RankPool) -> None:
    rank_pool.run(compute_in_short_weights, ranks=2)


def shards(strategy: FSDP) -> int:
    return strategy.costs().num_shards


def test_over_how_many_ranks_a_copy_is_sharded() -> None:
    four = cpu_context(world_size=4)
    nodes = replace(four, topology=Topology(2, 2, 0, 1))
    degrees = {given: shards(FSDP(context=nodes, data_parallel_shard_degree=given)) for given in (None, "auto", 1)}
    assert degrees == {None: 4, "auto": 2, 1: 1}
    assert shards(FSDP(context=cpu_context(), data_parallel_shard_degree=8)) == 1
    gpus = Context(Topology(1, 4, 4, 1), 0, 0, 0, (torch.device("cuda", 0),), "nccl")
    assert FSDP(context=gpus, cpu_offload=True).exchanges_on_cpu


def groups_of(context: Context) -> tuple[list[int], set[timedelta | None]]:
    """Sizes of the groups that ranks of a sharded model talk in, and their time-outs after a change."""
    made = STRATEGIES["hsdp"](context=context)
    made.wrap(How().model())
    groups = made.groups
    set_timeout(33.0, context, groups=groups)
    found = {group_timeout(group) for group in groups}
    set_timeout(90.0, context, groups=groups)
    return [group.size() for group in groups], found


@pytest.mark.exhaustive
def test_sharded_groups_get_the_runs_timeout(rank_pool: RankPool) -> None:
    """A rank that waits for one of its own copy waits no longer than for any other."""
    assert rank_pool.run(groups_of, ranks=4) == [([2, 2], {timedelta(seconds=33)})] * 4


class Overflows(nn.Sequential):
    """Has an infinite gradient in the third step, in the first layer's last row, which is in one rank's shard."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 1))
        self.steps = 0

    def forward(self, input: Tensor) -> Tensor:
        hidden = self[0](input)
        self.steps += self.training
        if self.training and self.steps == 3:
            hidden.register_hook(lambda gradient: gradient.masked_fill(torch.arange(10) == 9, torch.inf))
        result: Tensor = self[2](self[1](hidden))
        return result


def overflow_once(context: Context, strategy: str) -> tuple[list[bool], float]:
    """Give whether each step after the first moved the weights, and the scale of the loss, which begins too high."""
    how = How(precision="16-mixed", passes=1)
    watch = WeightsOfSteps()
    torch.manual_seed(0)
    made = STRATEGIES[strategy](context=context)
    trainer = trainer_of(context, made, how, steps=4, model=Overflows(), callbacks={"watch": watch})
    trainer.fit()
    moved = [differ(before, after) for before, after in pairwise(watch.weights)]
    return moved, trainer.state.precision.scaler.get_scale()


@pytest.mark.parametrize("strategy", ["fsdp", "allreduce"])
def test_an_overflow_on_one_rank_skips_all(rank_pool: RankPool, strategy: str) -> None:
    assert rank_pool.run(overflow_once, strategy, ranks=2) == [([True, False, True], 16384.0)] * 2

"""What ranks hold after a backward, an average or an evaluation, whatever the tensors are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from framework import Strategy
from framework.strategies import DDP, FSDP, AllReduce, Butterfly, LocalSGD
from tests.helpers.internals import Context, gather_to_all
from tests.helpers.rank_pool import RankPool

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_state")]


class Branching(nn.Module):
    """Has parameters of several types, layouts and shapes; each rank uses other ones."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(3, 2).double()
        self.scale = nn.Parameter(torch.randn(()))
        self.phase = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.some = nn.Linear(3, 1)
        self.never = nn.Linear(3, 1)
        self.frozen = nn.Linear(3, 1).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, image: Tensor, *, uses_some: bool) -> Tensor:
        hidden = self.norm(self.conv(image).mean(dim=(2, 3)) * self.scale)
        total = self.wide(hidden.double()).square().sum() + self.frozen(hidden).sum()
        total = total + (self.phase * hidden.sum()).abs().sum()
        if uses_some:
            total = total + self.some(hidden).square().sum()
        return total


AVERAGES: dict[str, Callable[..., Strategy]] = {
    "allreduce": AllReduce,
    "allreduce small buckets": partial(AllReduce, bucket_cap_mb=1e-4),
    "allreduce each": partial(AllReduce, bucket_cap_mb=0),
    "butterfly": Butterfly,
    "local_sgd": partial(LocalSGD, every_n_steps=1, warmup_steps=3),
}


def average_gradients(context: Context, name: str) -> list[Tensor | None]:
    """Check two accumulated micro-batches, three times: give the gradients."""
    torch.manual_seed(context.rank)
    strategy = AVERAGES[name](context=context)
    model = Branching()
    wrapped = strategy.wrap(model)
    begun = gather_to_all(model.state_dict(), context)
    for state in begun:
        assert all(torch.equal(value, begun[0][key]) for key, value in state.items())
    torch.manual_seed(10 + context.rank)
    parameters = [each for each in model.parameters() if each.requires_grad]
    left: list[list[Tensor | None]] = []
    for _ in range(3):
        mine: list[Tensor | None] = [None] * len(parameters)
        for synchronise in (False, True):
            with strategy.accumulate(wrapped, synchronise=synchronise):
                loss = wrapped(torch.randn(4, 2, 5, 5), uses_some=context.rank == 0)
                found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
                mine = [_sum(*pair) for pair in zip(mine, found, strict=True)]
                loss.backward()
        for parameter, given in zip(parameters, zip(*gather_to_all(mine, context), strict=True), strict=True):
            if all(each is None for each in given):
                assert parameter.grad is None
                continue
            wanted = torch.zeros_like(parameter.detach())
            for gradient in given:
                if gradient is not None:
                    wanted += gradient / context.world_size
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, wanted)
            assert (parameter.grad.stride(), parameter.grad.dtype) == (parameter.stride(), parameter.dtype)
        left.append([None if each.grad is None else each.grad.clone() for each in parameters])
        model.zero_grad(set_to_none=True)
    assert model.never.weight.grad is None
    assert model.frozen.weight.grad is None
    return left[-1]


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None:
        return other
    if other is None:
        return one
    return one + other


@pytest.mark.parametrize("name", list(AVERAGES))
def test_every_gradient_is_the_mean_over_ranks(rank_pool: RankPool, name: str) -> None:
    """A rank that has none counts as zeros; where no rank has one there is none."""
    first, *others = rank_pool.run(average_gradients, name, ranks=3)
    for other in others:
        for one, same in zip(first, other, strict=True):
            assert one is same is None or (one is not None and same is not None and torch.equal(one, same))


def average_weights(context: Context) -> None:
    """Ranks move their weights by themselves; every second step all must have the mean of what they had."""
    torch.manual_seed(context.rank)
    strategy = LocalSGD(context=context, every_n_steps=2, bucket_cap_mb=1e-4)
    model = strategy.wrap(Branching())
    begun = _copied(model)
    torch.manual_seed(10 + context.rank)
    for step in range(1, 6):
        with strategy.accumulate(model, synchronise=True), torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and not name.startswith("never"):
                    parameter.add_(0.1 * torch.randn_like(parameter))
            for buffer in model.buffers():
                buffer.add_(context.rank + 1)
        own = _copied(model)
        of_ranks = gather_to_all(own, context)
        strategy.after_update(model)
        with strategy.evaluation_weights(model):
            for name, value in model.state_dict().items():
                if name.startswith("norm.") and not name.endswith(("weight", "bias")):
                    assert torch.equal(value, of_ranks[0][name])
                else:
                    wanted = torch.stack([each[name] for each in of_ranks]).mean(dim=0)
                    torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)
            seen = _copied(model)
        for name, value in model.state_dict().items():
            assert torch.equal(value, seen[name] if step % 2 == 0 else own[name])
    for name in ("never.weight", "frozen.weight"):
        # This holds where a third isn't exact, too.
        assert torch.equal(model.state_dict()[name], begun[name])


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_local_sgd_averages_weights_of_any_kind(rank_pool: RankPool) -> None:
    rank_pool.run(average_weights, ranks=3)


BUFFERS: dict[str, Callable[..., Strategy]] = {"ddp": DDP, "allreduce": AllReduce, "fsdp": FSDP}


def share_buffers(context: Context, name: str, *, broadcasts: bool) -> list[Any]:
    """Give the statistic before each forward, before and after an evaluation begins, and what a state brings back."""
    strategy: Any = BUFFERS[name](context=context, broadcast_buffers=broadcasts)
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    wrapped = strategy.wrap(model)
    statistic = model.get_buffer("0.running_mean")
    before: list[float] = []
    model[0].register_forward_pre_hook(lambda *_: before.append(statistic[0].item()))
    torch.manual_seed(context.rank)
    for synchronise in (False, True, False, True):
        with strategy.accumulate(wrapped, synchronise=synchronise):
            wrapped(torch.randn(3, 2) + context.rank).sum().backward()
    after = statistic[0].item()
    state = {key: value for key, value in strategy.state_dict(wrapped).items() if key == "buffers"}
    strategy.before_evaluation(wrapped)
    evaluated = statistic[0].item()
    statistic.fill_(7.0 + context.rank)
    strategy.load_state_dict(wrapped, state)
    restored = statistic[0].item()
    statistic.fill_(7.0 + context.rank)
    strategy.broadcast_buffers(wrapped, source=1)
    assert strategy.buffers_differ is not broadcasts
    return [before, after, evaluated, restored, statistic[0].item()]


@pytest.mark.parametrize("name", list(BUFFERS))
def test_buffers_come_from_rank_0_or_stay_separate(rank_pool: RankPool, name: str) -> None:
    one, other = rank_pool.run(share_buffers, name, broadcasts=True)
    # Before the first and the third forward, which begin steps, not before the second and fourth.
    assert [mine == theirs for mine, theirs in zip(one[0], other[0], strict=True)] == [True, False, True, False]
    assert one[1] != other[1]
    assert one[2] == other[2] == one[1]
    # A state holds no gradients.
    assert (one[3], other[3]) == (7.0, 8.0)
    # The state is that of the rank that was asked for it.
    assert (one[4], other[4]) == (8.0, 8.0)
    one, other = rank_pool.run(share_buffers, name, broadcasts=False)
    for found in (one, other):
        assert found[1] == found[2] == found[3]
    assert one[1] != other[1]
    assert (one[4], other[4]) == (7.0, 8.0)


class Sparse(nn.Linear):
    """Has sparse gradients that no attribute announces."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.embedding(input, self.weight, sparse=True)


def fail_in_steps(context: Context) -> float:
    strategy = Butterfly(context=context)
    sparse = nn.Sequential(nn.Linear(2, 2), Sparse(2, 4, bias=False))
    strategy.wrap(sparse)
    with (
        pytest.raises(RuntimeError, match="sparse tensors"),
        strategy.accumulate(sparse, synchronise=True),
    ):
        sparse[1](torch.tensor([1, 2])).sum().backward()
    model = nn.Linear(1, 1)
    strategy.wrap(model)
    with suppress(ZeroDivisionError), strategy.accumulate(model, synchronise=True):
        model(torch.tensor([[float(context.rank)]])).sum().backward()
        _ = 1 / 0
    assert model.weight.grad is not None
    return model.weight.grad.item()


def test_sparse_gradients_are_refused_without_an_exchange(rank_pool: RankPool) -> None:
    assert rank_pool.run(fail_in_steps, ranks=2) == [0.0, 1.0]


def step_with_sparse_gradients(context: Context) -> list[float]:
    torch.manual_seed(0)
    model = nn.Embedding(4, 2, sparse=True)
    strategy = LocalSGD(context=context, every_n_steps=1)
    strategy.wrap(model)
    before = model.weight.detach().clone()
    with strategy.accumulate(model, synchronise=True):
        model(torch.tensor([context.rank])).sum().backward()
    SGD(model.parameters(), lr=1.0).step()
    strategy.after_update(model)
    moved: list[float] = (model.weight.detach() - before).sum(dim=1).tolist()
    return moved


def test_local_sgd_accepts_sparse_gradients(rank_pool: RankPool) -> None:
    for moved in rank_pool.run(step_with_sparse_gradients, ranks=3):
        assert moved == pytest.approx([-2 / 3, -2 / 3, -2 / 3, 0.0])

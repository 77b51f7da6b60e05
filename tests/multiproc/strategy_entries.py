"""What ranks run that average gradients."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.distributed.butterfly import MEAN, SUM, butterfly_all_reduce
from framework.distributed.collectives import gather_to_all
from framework.distributed.context import Context
from framework.distributed.group import set_timeout
from framework.errors import ConfigError
from framework.launch import heartbeat
from framework.launch.link import Link
from framework.launch.plan import RankArguments
from framework.strategies import DDP, AllReduce, Butterfly
from tests.multiproc.collective_entries import group, leave, wait_for

TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t,
    lambda t: t[::2],
    lambda t: t[: t.numel() // 6 * 6].view(2, -1, 3),
    lambda t: t[: t.numel() // 4 * 4].view(-1, 4).t(),
    lambda t: t[: t.numel() // 4 * 4].view(4, -1)[:, 1:],
)


def cases(world_size: int) -> Iterator[tuple[int, torch.dtype, Callable[[Tensor], Tensor]]]:
    """Sizes about the number of ranks, and others; the same on every rank."""
    draw = random.Random(5)
    small = [*range(2 * world_size + 2), 63, 64, 65]
    for size in (*small, *(draw.randrange(1, 5000) for _ in range(12)), 100_003):
        yield size, draw.choice(TYPES), draw.choice(LAYOUTS)


def butterfly_as_all_reduce(rank: RankArguments, _link: Link) -> None:
    """Sums of small whole numbers are exact in every type, so they must be the same bits; leaves how many cases."""
    with group(rank) as context:
        generator = torch.Generator().manual_seed(context.rank)
        results = []
        for size, dtype, layout in cases(context.world_size):
            whole = layout(torch.randint(-8, 9, (size,), generator=generator).to(dtype))
            expected = whole.clone()
            dist.all_reduce(expected)
            summed = whole.clone(memory_format=torch.preserve_format)
            strides = summed.stride()
            assert butterfly_all_reduce(summed, op=SUM) is summed
            assert summed.stride() == strides
            assert torch.equal(summed, expected), (size, dtype)
            # In place of a part of a greater tensor: what lies beside it stays.
            around = torch.randn(size, generator=generator).to(dtype)
            part, before = layout(around), around.clone()
            outside = torch.ones(size, dtype=torch.bool)
            layout(outside).fill_(False)
            exact = _mean(part, context)
            butterfly_all_reduce(part, op=MEAN)
            # Of values about 1, of which some may cancel.
            torch.testing.assert_close(part, exact.to(dtype), rtol=0.0, atol=16 * torch.finfo(dtype).eps)
            assert torch.equal(around[outside], before[outside])
            results.append(_bits(part))
        assert all(others == results for others in gather_to_all(results, context))
        leave(rank, len(results))


def _mean(tensor: Tensor, context: Context) -> Tensor:
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    total = tensor.to(wide, copy=True)
    dist.all_reduce(total)
    return total / context.world_size


def _bits(tensor: Tensor) -> str:
    values = tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def wait_for_a_partner_in_vain(rank: RankArguments, _link: Link) -> None:
    """Rank 1 comes to no round; a great sum is beyond the type, its mean is not."""
    with group(rank) as context:
        large = torch.full((3,), 60000.0, dtype=torch.float16)
        assert butterfly_all_reduce(large, op=MEAN).tolist() == [60000.0] * 3
        set_timeout(1.0, context)
        if context.rank == 1:
            wait_for(Path(rank.run_dir, "rank_0.json"), within_s=25.0)
            leave(rank, "waited")
            return
        try:
            butterfly_all_reduce(torch.ones(4))
        except RuntimeError as error:
            leave(rank, str(error))


class Branching(nn.Module):
    """Which parameters are used depends on what is asked for; of several types, layouts and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(3, 2).double()
        self.scale = nn.Parameter(torch.randn(()))
        self.phase = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.some, self.never = nn.Linear(3, 1), nn.Linear(3, 1)
        self.frozen = nn.Linear(3, 1).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, image: Tensor, *, uses_some: bool) -> Tensor:
        hidden = self.norm(self.conv(image).mean(dim=(2, 3)) * self.scale)
        total = self.wide(hidden.double()).square().sum() + self.frozen(hidden).sum()
        total = total + (self.phase * hidden.sum()).abs().sum()
        if uses_some:
            total = total + self.some(hidden).square().sum()
        return total


def replicas_of(rank: RankArguments, _link: Link) -> None:
    """Every strategy: what they begin with, what they average, and what stays without a gradient.

    Leaves how many collectives it has begun, by which it is told who is late.
    """
    with group(rank) as context:
        for make, cap_mb in ((AllReduce, 25), (AllReduce, 0), (AllReduce, 1e-4), (Butterfly, 25), (Butterfly, 0)):
            torch.manual_seed(context.rank)
            strategy = make(context=context, bucket_cap_mb=cap_mb)
            model = Branching()
            assert strategy.wrap(model) is model
            _assert_equal(model, context)
            torch.manual_seed(10 + context.rank)
            for drops in (True, True, False):
                _step(strategy, model, context, drops=drops)
        leave(rank, heartbeat._collectives())


def _assert_equal(model: nn.Module, context: Context) -> None:
    """Weights and buffers are those of rank 0."""
    for first, *others in zip(*(each.values() for each in gather_to_all(model.state_dict(), context)), strict=True):
        assert all(torch.equal(first, other) for other in others)


def _step(strategy: AllReduce | Butterfly, model: Branching, context: Context, *, drops: bool) -> None:
    """Two micro-batches. Gradients that weren't dropped before are added to, as by any backward."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    mine: list[Tensor | None] = [None if p.grad is None else p.grad.clone() for p in parameters]
    for synchronise in (False, True):
        image = torch.randn(4, 2, 5, 5)
        with strategy.accumulate(model, synchronise=synchronise):
            loss = model(image, uses_some=context.rank == 0)
            found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
            mine = [_sum(old, new) for old, new in zip(mine, found, strict=True)]
            loss.backward()
        if not synchronise:
            assert all(_same(p.grad, own) for p, own in zip(parameters, mine, strict=True))
    of_ranks = zip(*gather_to_all(mine, context), strict=True)
    for number, (parameter, given) in enumerate(zip(parameters, of_ranks, strict=True)):
        if all(each is None for each in given):
            assert parameter.grad is None, number
            continue
        zeros = torch.zeros_like(parameter.detach())
        mean = torch.stack([zeros if each is None else each for each in given]).mean(dim=0)
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, mean)
        assert parameter.grad.stride() == parameter.stride()
        assert parameter.grad.dtype == parameter.dtype
    assert model.never.weight.grad is None
    assert model.frozen.weight.grad is None
    grads = [p.grad for p in parameters if p.grad is not None]
    assert len(set(gather_to_all(tuple(map(_bits, grads)), context))) == 1
    if drops:
        model.zero_grad(set_to_none=True)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    torch.testing.assert_close(one, other)
    return True


def buffers_of_replicas(rank: RankArguments, _link: Link) -> None:
    """Statistics before each forward and before evaluation; leaves what is refused."""
    with group(rank) as context:
        seen: dict[str, Any] = {}
        for shared in (True, False):
            strategy = AllReduce(context=context, broadcast_buffers=shared)
            model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
            strategy.wrap(model)
            mean = model.get_buffer("0.running_mean")
            before: list[float] = []
            model[0].register_forward_pre_hook(lambda *_, mean=mean, before=before: before.append(mean[0].item()))
            for synchronise in (False, True, False, True):
                with strategy.accumulate(model, synchronise=synchronise):
                    model(torch.randn(3, 2) + context.rank).sum().backward()
            after = mean[0].item()
            state = strategy.state_dict(model)
            strategy.before_evaluation(model)
            mean_then = mean[0].item()
            mean.zero_()
            strategy.load_state_dict(model, state)
            seen[str(shared)] = [before, after, mean_then, mean[0].item()]
        leave(rank, {**seen, "refused": [_refused(context), _failed(context)]})


class Sparse(nn.Linear):
    """Has sparse gradients, and doesn't say so."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.embedding(input, self.weight, sparse=True)


def _refused(context: Context) -> str:
    strategy, model = Butterfly(context=context), nn.Sequential(nn.Linear(2, 2), Sparse(2, 4, bias=False))
    strategy.wrap(model)
    try:
        with strategy.accumulate(model, synchronise=True):
            model[1](torch.tensor([1, 2])).sum().backward()
    except ConfigError as error:
        return str(error)
    return "nothing"


def _failed(context: Context) -> str:
    """An error in a forward passes, and nothing is exchanged for it."""
    strategy, model = AllReduce(context=context), nn.Linear(1, 1)
    strategy.wrap(model)
    try:
        with strategy.accumulate(model, synchronise=True):
            model(torch.tensor([[float(context.rank)]])).sum().backward()
            raise ValueError("a mistake")
    except ValueError as error:
        told = str(error)
    assert model.weight.grad is not None
    return f"{told} {model.weight.grad.item()}"


def thin_matrices_in_buckets(rank: RankArguments, _link: Link) -> None:
    """PowerSGD with several buckets under way at once; leaves how many."""
    with group(rank) as context:
        options = {"start_powerSGD_iter": 2, "min_compression_rate": 1}
        strategy = DDP(context=context, comm_hook={"powersgd": options}, bucket_cap_mb=0.3)
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(8)))
        wrapped = strategy.wrap(model)
        torch.manual_seed(context.rank)
        for _ in range(20):
            model.zero_grad()
            with strategy.accumulate(wrapped, synchronise=True):
                wrapped(torch.randn(4, 200)).square().mean().backward()
        grads = [each.grad for each in model.parameters() if each.grad is not None]
        assert len(set(gather_to_all(tuple(map(_bits, grads)), context))) == 1
        errors = strategy.state_dict(wrapped)["powersgd"]["errors"]
        assert len(errors) == (context.world_size if context.is_main else 0)
        leave(rank, [len(each) for each in errors])

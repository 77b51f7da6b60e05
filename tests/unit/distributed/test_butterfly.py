"""The butterfly: its rounds on paper, and between real ranks against the backend's own all-reduce."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers.internals import Context, butterfly_all_reduce_mean, gather_to_all, rounds
from tests.helpers.rank_pool import RankPool

TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
SIZES = (0, 1, 7, 24, 100_003)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6, 7, 12])
def test_partners_swap_in_the_same_round(num_ranks: int) -> None:
    by_rank = [list(rounds(rank, num_ranks)) for rank in range(num_ranks)]
    inner = 1 << (num_ranks.bit_length() - 1)
    assert {len(swaps) for swaps in by_rank} == {inner.bit_length() - 1 + (inner < num_ranks)}
    for rank, swaps in enumerate(by_rank):
        held = (0, inner)
        for place, swap in enumerate(swaps):
            if swap is None:
                continue
            assert by_rank[swap.partner][place] == (rank, swap.kept, swap.sent)
            assert swap.sent[1] - swap.sent[0] + swap.kept[1] - swap.kept[0] == held[1] - held[0]
            held = swap.kept
        assert held == ((rank, rank + 1) if rank < inner else (0, 0))


def layouts(values: Tensor) -> list[Tensor]:
    """Views of it that are contiguous, strided, and a transposed part."""
    four = values[: values.numel() // 4 * 4].view(-1, 4)
    return [values, values[::2], four.t()[1:]]


def reduce_everything(context: Context) -> int:
    """Sums of small whole numbers are exact in every type, so their means must be the same bits."""
    draw = torch.Generator().manual_seed(context.rank)
    cases = 0
    results = []
    for size in SIZES:
        for dtype in TYPES if size < 100 else (torch.float32,):
            for layout in range(3):
                whole = torch.randint(-8, 9, (size,), generator=draw).to(dtype)
                mine = layouts(whole)[layout]
                around = torch.randn(size, generator=draw).to(dtype)
                expected = mine.clone()
                strides = mine.stride()
                dist.all_reduce(expected)
                (torch.view_as_real(expected) if dtype.is_complex else expected).div_(context.world_size)
                butterfly_all_reduce_mean(mine)
                assert mine.stride() == strides
                assert torch.equal(mine, expected), (size, dtype, layout)
                # A part of a larger tensor: what lies beside it stays.
                part = layouts(around)[layout]
                outside = torch.ones(size, dtype=torch.bool)
                before = around.clone()
                layouts(outside)[layout].fill_(False)
                mean = part.to(torch.complex128 if part.is_complex() else torch.float64, copy=True)
                dist.all_reduce(mean)
                butterfly_all_reduce_mean(part)
                wanted = (mean / context.world_size).to(dtype)
                torch.testing.assert_close(part, wanted, rtol=0.0, atol=16 * torch.finfo(dtype).eps)
                assert torch.equal(around[outside], before[outside])
                results.append(part.clone())
                cases += 1
    for others in gather_to_all(results, context):
        assert all(map(torch.equal, others, results)), "ranks must have the same bits"
    return cases


@pytest.mark.multiproc
@pytest.mark.parametrize("ranks", [3, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (2, 4, 5, 6))])
def test_butterfly_equals_an_all_reduce(rank_pool: RankPool, ranks: int) -> None:
    assert rank_pool.run(reduce_everything, ranks=ranks) == [3 * (4 * len(TYPES) + 1)] * ranks

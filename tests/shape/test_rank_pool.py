from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from framework.distributed.context import Context
from tests.helpers.rank_pool import RankError, RankPool


def summed(context: Context, value: float) -> tuple[float, int]:
    total = torch.tensor(value * context.rank)
    dist.all_reduce(total)
    return total.item(), os.getpid()


def rank_1_fails(context: Context, how: str) -> None:
    if context.rank == 1:
        if how == "dies":
            os._exit(3)
        raise ValueError("the sky is falling")
    dist.barrier()


def test_ranks_are_started_once(rank_pool: RankPool) -> None:
    first = rank_pool.run(summed, 2.0, ranks=3)
    second = rank_pool.run(summed, 3.0, ranks=3)
    assert [total for total, _ in first] == [6.0] * 3
    assert [total for total, _ in second] == [9.0] * 3
    assert [pid for _, pid in first] == [pid for _, pid in second]


@pytest.mark.parametrize(("how", "message"), [("raises", "the sky is falling"), ("dies", "Rank 1: died")])
def test_a_broken_rank_is_reported_and_replaced(rank_pool: RankPool, how: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        rank_pool.run(rank_1_fails, how)
    assert [total for total, _ in rank_pool.run(summed, 1.0)] == [1.0, 1.0]

"""The rounds of a butterfly on paper, and between one to six real ranks against the backend's own all-reduce."""

from __future__ import annotations

from pathlib import Path

import pytest

from framework.distributed.butterfly import halvings, rounds
from framework.launch.warm import WarmServer
from tests.helpers.ranks import left_by_ranks

ENTRIES = "tests.multiproc.strategy_entries"


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8, 32])
def test_partners_swap_what_the_other_keeps_until_each_has_one_part(num_ranks: int) -> None:
    rounds = [list(halvings(rank, num_ranks)) for rank in range(num_ranks)]
    assert {len(swaps) for swaps in rounds} == {num_ranks.bit_length() - 1}
    for rank, swaps in enumerate(rounds):
        held = (0, num_ranks)
        for number, swap in enumerate(swaps):
            other = rounds[swap.partner][number]
            assert (other.partner, other.sent, other.kept) == (rank, swap.kept, swap.sent)
            assert sorted((swap.sent, swap.kept)) == [(held[0], sum(held) // 2), (sum(held) // 2, held[1])]
            held = swap.kept
        assert held == (rank, rank + 1)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 6, 7, 12])
def test_whoever_sends_has_a_partner_who_receives_in_the_same_round(num_ranks: int) -> None:
    by_rank = [list(rounds(rank, num_ranks)) for rank in range(num_ranks)]
    (number,) = {len(each) for each in by_rank}
    inner = 1 << (num_ranks.bit_length() - 1)
    assert number == inner.bit_length() - 1 + (inner < num_ranks)
    for rank, swaps in enumerate(by_rank):
        for place, swap in enumerate(swaps):
            if swap is not None:
                assert by_rank[swap.partner][place] == (rank, swap.kept, swap.sent)
    alone = [rank for rank, swaps in enumerate(by_rank) if swaps and swaps[0] is None]
    assert alone == list(range(num_ranks - inner, inner) if inner < num_ranks else [])


@pytest.mark.multiproc
@pytest.mark.parametrize("procs", [1, 3, 4, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (2, 5, 6))])
def test_it_is_an_all_reduce_for_any_size_type_and_layout(warm: WarmServer, tmp_path: Path, procs: int) -> None:
    counts = left_by_ranks(f"{ENTRIES}:butterfly_as_all_reduce", procs=procs, warm=warm, folder=tmp_path)
    assert counts == [2 * procs + 2 + 3 + 12 + 1] * procs


@pytest.mark.multiproc
def test_it_waits_no_longer_than_the_time_out_that_was_set_last(warm: WarmServer, tmp_path: Path) -> None:
    """The group was made with another: 30 s."""
    told = left_by_ranks(f"{ENTRIES}:wait_for_a_partner_in_vain", procs=2, warm=warm, folder=tmp_path)
    assert "1000ms" in told[0]

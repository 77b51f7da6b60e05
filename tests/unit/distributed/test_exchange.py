"""The exchange beside training: one that wasn't opened doesn't pass for that of one rank."""

from __future__ import annotations

import pytest

from framework.distributed.exchange import SideExchange
from tests.unit.simulated_ranks import cpu_context


def test_one_rank_alone_needs_no_group() -> None:
    exchange = SideExchange(cpu_context(), timeout_s=1.0)
    assert exchange.begin([1.0, 2.0])() == [[1.0, 2.0]]
    assert exchange.give("a", source=0) == "a"


def test_one_that_was_not_opened_is_no_exchange_of_several() -> None:
    exchange = SideExchange(cpu_context(1, world_size=2), timeout_s=1.0)
    with pytest.raises(RuntimeError, match="wasn't opened"):
        exchange.begin([1.0])
    with pytest.raises(RuntimeError, match="wasn't opened"):
        exchange.give("a", source=0)

"""What a strategy costs is one value, for job=plan and estimated sizes."""

from __future__ import annotations

from framework import Strategy, StrategyCosts
from framework.strategies import DDP
from tests.helpers.contexts import cpu_context


class Earlier(Strategy):
    """Has its costs as attributes, like strategies of earlier versions."""

    weight_copies = 2

    def __init__(self) -> None:
        self.num_shards = 4


def test_attributes_of_earlier_strategies_count() -> None:
    assert Earlier().costs() == StrategyCosts(num_shards=4, weight_copies=2)
    assert Strategy().costs() == StrategyCosts()


def test_a_view_of_the_buckets_needs_no_copy_of_the_gradients() -> None:
    context = cpu_context(world_size=2)
    assert not DDP(context=context).costs().copies_gradients
    assert DDP(context=context, gradient_as_bucket_view=False).costs().copies_gradients

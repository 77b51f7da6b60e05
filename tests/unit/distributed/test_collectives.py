"""The collectives between real ranks, and time-outs; alone they need no process group."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from framework.errors import RunError
from tests.helpers.contexts import cpu_context
from tests.helpers.internals import (
    Context,
    SideChannel,
    any_over_ranks,
    barrier,
    broadcast_object,
    butterfly_all_reduce_mean,
    gather_to_all,
    gather_to_first,
    new_subgroup,
    set_group_timeouts,
    sum_over_ranks,
)
from tests.helpers.rank_pool import RankPool


def test_one_rank_exchanges_nothing_and_needs_no_group() -> None:
    context = cpu_context()
    values = torch.tensor([2.0, 3.0])
    assert not dist.is_initialized()
    assert sum_over_ranks(values, context) is values
    assert values.tolist() == [2.0, 3.0]
    assert [any_over_ranks(flag, context) for flag in (True, False)] == [True, False]
    assert (
        gather_to_all({"some": "thing"}, context) == gather_to_first({"some": "thing"}, context) == [{"some": "thing"}]
    )
    assert broadcast_object(3, context) == 3
    barrier(context)
    exchange = SideChannel(context, timeout_s=1.0)
    assert exchange.gather([1.0, 2.0])() == [[1.0, 2.0]]
    assert exchange.broadcast("a", source=0) == "a"


def every_collective(context: Context, folder: str) -> None:
    world = context.world_size
    mine = context.rank
    given = torch.tensor([float(mine), 1.0, 0.5], dtype=torch.float64)
    assert sum_over_ranks(given, context) is given
    assert given.tolist() == [world * (world - 1) / 2, float(world), world / 2]
    assert [any_over_ranks(mine == chosen, context) for chosen in range(world)] == [True] * world
    assert any_over_ranks(False, context) is False
    values = gather_to_all({"rank": mine, "names": ["x"] * mine}, context)
    assert values == [{"rank": other, "names": ["x"] * other} for other in range(world)]
    # This is more than is sent at once, and sizes differ.
    large = bytes([mine]) * ((17 << 20) - 1000 * mine)
    gathered = gather_to_first(large, context)
    if mine:
        assert gathered == []
    else:
        assert len(gathered) == world
        for rank, content in enumerate(gathered):
            assert (len(content), set(content)) == ((17 << 20) - 1000 * rank, {rank})
    assert broadcast_object({"rank": mine}, context) == {"rank": 0}
    for number in range(20):
        Path(folder, f"{number}_{mine}").touch()
        barrier(context)
        assert all(Path(folder, f"{number}_{other}").exists() for other in range(world))

    exchange = SideChannel(context, timeout_s=60.0)
    exchange.open()
    first = exchange.gather([float(mine), 0.5])
    second = exchange.gather([-1.0 * mine])
    assert second() == [[-1.0 * other] for other in range(world)]
    assert first() == [[float(other), 0.5] for other in range(world)]
    for source in range(world):
        assert exchange.broadcast({"of": mine}, source=source) == {"of": source}


@pytest.mark.multiproc
def test_every_collective_does_what_it_says(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(every_collective, str(tmp_path), ranks=3)


def all_reduce(values: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(values, group=group)


def butterfly(values: torch.Tensor, group: dist.ProcessGroup) -> None:
    butterfly_all_reduce_mean(values, group=group)


def wait_alone(context: Context, call: Callable[[torch.Tensor, dist.ProcessGroup], None], *, older: bool) -> str:
    """Return rank 0's error if rank 1 doesn't come within a limit that was set after the group was made."""
    group = new_subgroup([range(context.world_size)], context)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        if older:
            warnings.simplefilter("ignore", FutureWarning)
            patch.delattr(dist, "set_timeout", raising=False)
        set_group_timeouts(0.2, [group])
    message = ""
    if context.rank == 0:
        with pytest.raises(RuntimeError) as caught:
            call(torch.ones(4), group)
        message = str(caught.value)
    barrier(context)
    dist.destroy_process_group(group)
    return message


@pytest.mark.multiproc
@pytest.mark.parametrize(("call", "older"), [(all_reduce, False), (all_reduce, True), (butterfly, False)])
def test_a_collective_uses_the_latest_timeout(rank_pool: RankPool, call: object, older: bool) -> None:
    """Torch's public function sets it, or its private one in versions without a public one."""
    assert "200ms" in rank_pool.run(wait_alone, call, older=older)[0]


def exchange_alone(context: Context) -> str:
    exchange = SideChannel(context, timeout_s=0.2)
    exchange.open()
    message = ""
    if context.rank == 0:
        with pytest.raises(RunError) as caught:
            exchange.gather([1.0])()
        message = str(caught.value)
    barrier(context)
    for group in exchange.groups:
        dist.destroy_process_group(group)
    return message


@pytest.mark.multiproc
def test_a_timed_out_exchange_names_rank_and_key(rank_pool: RankPool) -> None:
    message = rank_pool.run(exchange_alone)[0]
    assert message.startswith("Rank 0 ")
    assert "backend.timeout" in message

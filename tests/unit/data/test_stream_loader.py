"""Windows of several ranks whose streams are of other lengths: as many on all, and every sample in one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from framework.data.stream import Deal, Reading
from framework.data.stream_loader import StreamEvalLoader, StreamLoader, evaluation_plan
from framework.data.workers import read_ahead
from framework.distributed.context import Context
from framework.errors import CheckpointError, DataError, RunError
from framework.streams import check_state
from tests.unit.simulated_ranks import CPU, RankLeftError, SimulatedRanks, cpu_context
from tests.unit.streams import Drawing, Parts, SimulatedExchange, Stateful, make_loader, sample

# Simulated ranks are threads, which seed the generators of one process at a time.
pytestmark = pytest.mark.usefixtures("own_state")


def targets(windows: Any) -> list[list[list[float]]]:
    """Of each window and micro-batch, the targets of the samples that count."""
    return [[each.batch[1].tolist() if each.num_samples else [] for each in window.micro_batches] for window in windows]


def loaders(ranks: SimulatedRanks, lengths: Sequence[int], **more: Any) -> Callable[[Context], StreamLoader]:
    return lambda context: make_loader(
        Parts(lengths), context, exchange=SimulatedExchange(ranks, context), is_sharded=True, **more
    )


def dealt(lengths: Sequence[int], *, epoch: int = 0, **more: Any) -> list[Any]:
    """What each rank gets: of each window its sizes, the global count, and whether it is the last."""
    ranks = SimulatedRanks(len(lengths))
    make = loaders(ranks, lengths, **more)

    def one(context: Context) -> Any:
        seen = []
        for window in make(context).epoch(epoch):
            micro = list(window.micro_batches)
            assert len(micro) == window.num_micro_batches == len(window.indices)
            assert [each.num_samples for each in micro] == [each.num_samples for each in window.indices]
            assert all(len(each.batch[0]) > 0 for each in micro)  # also of what stands in
            seen.append(([each.num_samples for each in micro], window.global_count, window.epoch_end))
        return seen

    ends = ranks.run(one)
    for end in ends:
        if isinstance(end, Exception):
            raise end
    return ends


def test_ranks_whose_stream_has_ended_join_with_nothing() -> None:
    """In the midst of an accumulation, or from the beginning."""
    assert dealt([11, 5, 0], accumulate=2) == [
        [([2, 2], 8, False), ([2, 2], 5, False), ([2, 1], 3, True)],
        [([2, 2], 8, False), ([1, 0], 5, False), ([0, 0], 3, True)],
        [([0, 0], 8, False), ([0, 0], 5, False), ([0, 0], 3, True)],
    ]


def test_or_the_epoch_ends_where_the_first_has_nothing_left() -> None:
    assert dealt([11, 5], accumulate=2, stops_first=True) == [
        [([2, 2], 8, False), ([2, 2], 5, True)],
        [([2, 2], 8, False), ([1, 0], 5, True)],
    ]
    with pytest.raises(DataError, match=r"has no sample for index 1, 2\.\nUse data\.stream=join, fewer processes"):
        dealt([11, 0, 0], stops_first=True)
    with pytest.raises(DataError, match="The train stream gives no sample in epoch 0"):
        dealt([0, 0], stops_first=True)


@pytest.mark.parametrize(("lengths", "told"), [((0, 5, 9), [1, 1, 1, 2, 2]), ((3, 0, 5), [0, 0, 2]), ((4, 4), [0, 0])])
def test_a_window_says_which_rank_is_the_first_that_has_samples(lengths: Sequence[int], told: list[int]) -> None:
    ranks = SimulatedRanks(len(lengths))
    make = loaders(ranks, lengths)
    ends = ranks.run(lambda context: [window.first_rank for window in make(context).epoch(0)])
    assert ends == [told] * len(lengths)
    assert {window.first_rank for window in make_loader(Parts(lengths)).epoch(0)} == {None}


class Unsaved(Stateful):
    """Of which a checkpoint can't hold where it stands."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": np.int64(self.position)}


def test_a_state_that_cannot_be_saved_is_told_before_the_first_step() -> None:
    with pytest.raises(
        CheckpointError, match=r"the train stream's state_dict\(\)\.position a numpy\.int64.*\n.*\n.*item"
    ):
        next(make_loader(Unsaved([9]), check_state=check_state).epoch(0))
    assert len(list(make_loader(Unsaved([9])).epoch(0))) == 5  # where nothing is saved
    kept = make_loader(Stateful([3]), check_state=check_state)
    states = [kept.state_dict() for _ in kept.epoch(0)]
    assert [(each["has_ended"], each["state"]) for each in states] == [(False, {"position": 2}), (True, None)]


def resumed(
    lengths: Sequence[int], *, then: dict[str, Any], now: dict[str, Any], shorter: Sequence[int] | None = None
) -> list[Any]:
    """Each rank's windows that are left, after two, or what was raised; `then` and `now` say how the loader is made."""
    ranks = SimulatedRanks(len(lengths))

    def stand(context: Context) -> Any:
        loader, samples = make_stateful(ranks, lengths, context, **then), 0
        for _, window in zip(range(2), loader.epoch(0), strict=False):
            samples += window.global_count
        return loader.state_dict(), samples

    stood: Any = ranks.run(stand)

    def go_on(context: Context) -> Any:
        loader = make_stateful(ranks, lengths if shorter is None else shorter, context, **now)
        loader.load_state_dict([state for state, _ in stood], samples=stood[0][1])
        return targets(loader.epoch(0, start=stood[0][1]))

    return ranks.run(go_on)


def make_stateful(ranks: SimulatedRanks, lengths: Sequence[int], context: Context, **more: Any) -> StreamLoader:
    exchange = SimulatedExchange(ranks, context)
    return make_loader(Stateful(lengths), context, exchange=exchange, is_sharded=True, **more)


def test_an_epoch_of_another_end_does_not_go_on() -> None:
    for then, now in ((False, True), (True, False)):
        for end in resumed([9, 7], then={"stops_first": then}, now={"stops_first": now}):
            assert isinstance(end, CheckpointError)
            rules = ["join", "stop"][then], ["join", "stop"][now]
            assert "with data.stream={}, and this run reads a stream in 2 shard(s) with data.stream={}".format(
                *rules
            ) in (str(end))


def test_a_limit_below_what_one_rank_has_read_is_refused_on_all() -> None:
    """Though over all ranks there are fewer samples than a whole epoch of it would have."""
    assert [len(end) for end in resumed([9, 1], then={}, now={"limit": 12})] == [1, 1]
    for end in resumed([9, 1], then={}, now={"limit": 8}):
        assert isinstance(end, DataError)
        assert "at sample 4 of the part of process 0, of which an epoch has at most 4 samples" in str(end)
        assert "set it back" in str(end)


def test_a_stream_that_has_become_shorter_is_told() -> None:
    for end in resumed([9, 7], then={}, now={}, shorter=[4, 4]):
        assert isinstance(end, DataError)
        assert "can't go on at sample 8 of the train stream: in epoch 0 a process finds no more" in str(end)
    first, second = resumed([9, 7], then={}, now={}, shorter=[9, 4])
    assert isinstance(first, RankLeftError)
    assert isinstance(second, DataError)


def test_a_limit_ends_an_epoch_for_all() -> None:
    assert dealt([11, 3], limit=8) == [[([2], 4, False), ([2], 3, True)], [([2], 4, False), ([1], 3, True)]]
    assert make_loader(Parts([9]), limit=8).steps_per_epoch == 4
    assert make_loader(Parts([9])).steps_per_epoch is None


def test_alone_every_sample_is_in_a_window_in_order() -> None:
    found = [value for window in targets(make_loader(Parts([7, 4])).epoch(3)) for micro in window for value in micro]
    wanted = [sample(part, number, 3)[1].item() for part, size in enumerate((7, 4)) for number in range(size)]
    assert found == wanted


def test_streams_without_any_sample_are_refused_on_every_rank() -> None:
    with pytest.raises(DataError, match=r"The train stream gives no sample in epoch 4.*\n?.*begin anew in every epoch"):
        dealt([0, 0], epoch=4)
    with pytest.raises(DataError, match="no sample"):
        next(make_loader(Parts([])).epoch(0))


def test_ranks_that_should_read_the_same_and_do_not_are_told() -> None:
    """Of a stream that looks at its rank, or draws without a seed."""
    ranks = SimulatedRanks(3)

    def one(context: Context) -> Any:
        own = Parts([9, 12], only=int(context.rank == 2))
        return targets(make_loader(own, context, exchange=SimulatedExchange(ranks, context)).epoch(0))

    ends = ranks.run(one)
    assert {str(end) for end in ends} == {str(ends[0])}
    assert isinstance(ends[0], DataError)
    assert "Ranks 0 and 2 don't read the same train stream: in epoch 0" in str(ends[0])
    assert "data.stream=join" in str(ends[0])


def test_an_error_in_one_stream_is_raised_there_and_no_other_rank_goes_on() -> None:
    """With real ranks the others wait until they are ended."""
    ranks = SimulatedRanks(2)

    def one(context: Context) -> Any:
        exchange = SimulatedExchange(ranks, context)
        own = make_loader(Parts([30, 30], fails_at=9), context, exchange=exchange, is_sharded=True)
        return targets(own.epoch(0))

    first, second = ranks.run(one)
    assert isinstance(first, RankLeftError)
    assert isinstance(second, RunError)


def test_a_stream_that_cannot_be_cut_is_refused() -> None:
    context = cpu_context(1, world_size=2)
    with pytest.raises(DataError, match=r"gives no shard 1 of 2: IndexError: there are 3 parts\nUse as many processes"):
        make_loader(Parts([1, 1, 1]), context, is_sharded=True)
    with pytest.raises(DataError, match=r"a .*Drawing, has no shard\(num_shards, index\)"):
        make_loader(Drawing(), context, is_sharded=True)


LENGTHS = (13, 5, 0)


@pytest.mark.parametrize("make", [Parts, Stateful])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_loader_goes_on_where_another_stood(make: Any, is_sharded: bool) -> None:
    """After every window but the last; nothing of it depends on what was read ahead."""
    ranks = SimulatedRanks(3)
    lengths = LENGTHS if is_sharded else (18,)

    def loader(context: Context) -> StreamLoader:
        own = make(lengths) if is_sharded or make is Stateful else Parts(lengths)
        return make_loader(own, context, exchange=SimulatedExchange(ranks, context), is_sharded=is_sharded)

    def straight(context: Context) -> Any:
        found, states, samples = loader(context), [], 0
        windows = []
        for window in found.epoch(1):
            windows += targets([window])
            samples += window.global_count
            states.append((found.state_dict(), samples, window.epoch_end))
        return windows, states

    runs: list[Any] = ranks.run(straight)
    number = len(runs[0][0])
    assert number == (7 if is_sharded else 3)
    for done in range(1, number):
        states = [run[1][done - 1][0] for run in runs]
        samples = runs[0][1][done - 1][1]

        def again(context: Context, states: Any = states, samples: int = samples) -> Any:
            resumed = loader(context)
            resumed.load_state_dict(states, samples=samples)
            rest = targets(resumed.epoch(1, start=samples))
            return rest, targets(resumed.epoch(2))

        for rank, end in enumerate(ranks.run(again)):
            assert not isinstance(end, Exception), end
            assert end[0] == runs[rank][0][done:]
        fresh: Any = ranks.run(lambda context: targets(loader(context).epoch(2)))
        assert [end[1] for end in ranks.run(again)] == fresh  # type: ignore[index]


def test_a_shared_stream_goes_on_on_any_number_of_ranks_and_shards_do_not() -> None:
    ranks = SimulatedRanks(2)
    one = make_loader(Parts([18]), batch_size=4)
    whole, states = [], []
    for window in one.epoch(0):
        whole += targets([window])
        states.append(one.state_dict())

    def shared(context: Context) -> Any:
        loader = make_loader(Parts([18]), context, exchange=SimulatedExchange(ranks, context))
        loader.load_state_dict(states[1:2], samples=8)
        return targets(loader.epoch(0, start=8))

    found: Any = ranks.run(shared)
    assert [[a + b for (a,), (b,) in zip(*found, strict=True)]] == [[micro[0] for micro in whole[2:]]]

    def shards(context: Context) -> Any:
        loader = loaders(ranks, [5, 5])(context)
        given = [{**loader.state_dict(), "shards": 3}] * 3
        loader.load_state_dict(given, samples=0)  # at an epoch's beginning it doesn't matter
        loader.load_state_dict(given, samples=4)

    for end in ranks.run(shards):
        assert isinstance(end, CheckpointError)
        assert "of a stream in 3 shard(s) with data.stream=join, and this run reads a stream in 2 shard(s)" in str(end)
    with pytest.raises(CheckpointError, match=r"in 2 shard.*reads a stream that all processes share"):
        one.load_state_dict([{"shards": 2, "shard": 0, "samples": 2, "has_ended": False, "state": None}], samples=4)
    cut = make_loader(Parts([18]), limit=4)
    with pytest.raises(DataError, match="limit_train_batches is smaller"):
        next(cut.epoch(0, start=8))


@pytest.mark.parametrize("is_even", [False, True])
@pytest.mark.parametrize(("lengths", "is_sharded"), [((7, 2, 0), True), ((11,), False)])
def test_evaluation_takes_every_sample_once(lengths: Sequence[int], is_sharded: bool, is_even: bool) -> None:
    ranks = SimulatedRanks(3)

    def one(context: Context) -> Any:
        loader = StreamEvalLoader(
            Parts(lengths),
            deal=Deal(evaluation_plan(2, world_size=3), context.rank, is_sharded),
            reading=Reading("val"),
            device=CPU,
            exchange=SimulatedExchange(ranks, context),
            is_even=is_even,
        )
        first, second = list(loader), list(loader)
        assert all(torch.equal(a.batch[1], b.batch[1]) for a, b in zip(first, second, strict=True))
        loader.close()
        return len(first), [value for each in first if each.num_samples for value in each.batch[1].tolist()]

    ends: Any = ranks.run(one)
    if is_even:
        assert len({number for number, _ in ends}) == 1
    wanted = [sample(part, n, 0)[1].item() for part, size in enumerate(lengths) for n in range(size)]
    assert sorted(value for _, values in ends for value in values) == sorted(wanted)


def test_a_worker_reads_the_same_ahead_and_ends_with_the_epoch() -> None:
    """Also one that was left early; what it can't read is told as if it weren't one."""
    here, ahead = (make_loader(Stateful([9]), in_worker=in_worker) for in_worker in (False, True))
    for epoch in range(2):
        assert targets(ahead.epoch(epoch)) == targets(here.epoch(epoch))
        assert here.state_dict() == ahead.state_dict()
    left = ahead.epoch(2)
    next(left)
    ahead.load_state_dict([ahead.state_dict()], samples=2)
    assert targets(ahead.epoch(2, start=2)) == targets(here.epoch(2))[1:]
    ahead.close()
    drawn = [targets(make_loader(Drawing(), in_worker=in_worker).epoch(0)) for in_worker in (False, True)]
    assert drawn[0] == drawn[1]
    for other in (make_loader(Parts([9], fails_at=5), in_worker=True), make_loader(Parts([9]), in_worker=True)):
        other.load_state_dict([], samples=20)
        with pytest.raises((RunError, DataError), match=r"Sample 5 of the train stream|in epoch 1 it has only 9"):
            list(other.epoch(1, start=20))


def test_a_worker_that_is_left_says_where() -> None:
    def leaves() -> Iterator[int]:
        yield 1
        sys.exit("enough")

    found = read_ahead(leaves)
    assert next(found) == 1
    with pytest.raises(RunError, match=r"was left: SystemExit\('enough'\)(.|\n)*in leaves: sys.exit"):
        next(found)

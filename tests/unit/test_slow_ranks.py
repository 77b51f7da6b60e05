"""Which rank is named slow, in what and by how much: from given times, and in trainings timed by a given clock."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from framework import Strategy, Text
from framework.strategies import DDP, AllReduce
from framework.types import StepInfo
from tests.helpers.internals import (
    CURVES_OF_RANKS,
    KINDS,
    LAST_STRETCHES,
    SLOW_STRETCHES,
    STRETCH_S,
    Clock,
    Context,
    RankTimes,
    SlowRanks,
    excesses,
    slow_ranks_module,
)
from tests.helpers.rank_pool import RankPool
from tests.unit.small_trainer import BATCH, Numbers, make_trainer, samples, settings

STEP_S = 0.1
STEPS = 10
"""In a second, so that every log is a stretch of its own."""

Own = Callable[[int, int], dict[str, float]]
"""(log, rank) → own seconds of a step beyond 10 ms of data, 50 of computing and 1 of callbacks."""


def spent(**more: float) -> RankTimes:
    """Ten steps: whatever is not a rank's own, it waits."""
    usual = {"data": 0.01, "compute": 0.05, "callbacks": 0.001}
    own = {kind: seconds + more.get(kind, 0.0) for kind, seconds in usual.items()}
    waiting = STEP_S - sum(own.values())
    return RankTimes(STEPS, STEPS * STEP_S, **{kind: STEPS * s for kind, s in own.items()}, waiting=STEPS * waiting)


def note(ranks: SlowRanks, table: Sequence[RankTimes], *, step: int) -> dict[str, float]:
    return ranks.note([number for each in table for number in each], step=step)


def detect(own: Own, *, world_size: int = 4, logs: int = 10) -> tuple[list[str], list[tuple[int, str]]]:
    """Who is named after so many logs, and what was reported at which step."""
    ranks = SlowRanks(rank=0, world_size=world_size)
    ranks.start([f"node{rank // 2}, cuda:{rank % 2}" for rank in range(world_size)], step=0)
    reported = []
    for log in range(1, logs + 1):
        note(ranks, [spent(**own(log, rank)) for rank in range(world_size)], step=log * STEPS)
        if ranks.news is not None:
            reported.append((log * STEPS, ranks.news))
    return [str(each) for each in ranks.found()], reported


# From given times


@pytest.mark.parametrize("world_size", [2, 3, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_slow_rank_is_named(kind: str, world_size: int) -> None:
    named, reported = detect(lambda _, rank: {kind: 0.018} if rank == 1 else {}, world_size=world_size)
    assert named == [f"rank 1 (node0, cuda:1) is 18 % slower in {kind}"]
    assert reported == [(40, f"Rank 1 (node0, cuda:1) is 18 % slower in {kind} than the others, since step 1")]


def test_several_ranks_may_be_slow_differently() -> None:
    slow = {0: {"compute": 0.02}, 1: {"data": 0.03}, 2: {"callbacks": 0.011}}
    named, ((step, news),) = detect(lambda _, rank: slow.get(rank, {}))
    assert [text.split()[1::8] for text in named] == [["1", "data"], ["0", "compute"], ["2", "callbacks"]]
    assert step == 40
    assert news.endswith("is 30 % slower in data than the others, since step 1, and 2 more such")


@pytest.mark.parametrize(
    ("own", "logs"),
    [
        # The rank is only a little slower.
        (lambda _, rank: {"compute": 0.0095} if rank == 1 else {}, 10),
        # The rank is slow once.
        (lambda log, rank: {"data": 0.03} if rank == 1 and log == 6 else {}, 10),
        # The rank is slow at times.
        (lambda log, rank: {"data": 0.03} if rank == 1 and log % 5 in (0, 1, 3) else {}, 10),
        # Each rank is slow in turn.
        (lambda log, rank: {"compute": 0.05} if log % 4 == rank else {}, 40),
        # The run is too short.
        (lambda _, rank: {"data": 0.03} if rank == 1 else {}, SLOW_STRETCHES - 1),
    ],
    ids=["a little", "once", "at times", "in turn", "short"],
)
def test_noise_names_nobody(own: Own, logs: int) -> None:
    assert detect(own, logs=logs) == ([], [])


def test_a_lasting_slow_rank_is_reported_once() -> None:
    late = detect(lambda log, rank: {"data": 0.02} if rank == 3 and log > 90 else {}, logs=100)
    assert late[0] == ["rank 3 (node1, cuda:1) is 20 % slower in data (steps 901 to 1,000)"]
    assert late[1] == [(940, "Rank 3 (node1, cuda:1) is 20 % slower in data than the others, since step 901")]
    named, reported = detect(lambda log, rank: {"data": 0.02} if rank == 3 and log % 20 < 8 else {}, logs=57)
    assert (named, len(reported)) == ([], 1)
    named, _ = detect(lambda log, rank: {"data": 0.02} if rank == 3 and log <= 60 else {}, logs=100)
    assert named == ["rank 3 (node1, cuda:1) is 20 % slower in data (steps 1 to 600)"]


def test_short_logs_are_combined() -> None:
    ranks = SlowRanks(rank=0, world_size=2)
    ranks.start(["a, cpu", "b, cpu"], step=100)
    # Nothing is known about one rank.
    assert note(ranks, [RankTimes(), spent()], step=107) == {}
    for log in range(4 * LAST_STRETCHES):
        short = [RankTimes(*(number * STRETCH_S / 4 for number in spent(data=0.03 * rank))) for rank in range(2)]
        assert note(ranks, short, step=108 + log)["skew/worst"] == pytest.approx(0.3)
        assert (ranks.news is not None) == (log == 4 * SLOW_STRETCHES - 1)
    (found,) = ranks.found()
    assert str(found) == "rank 1 (b, cpu) is 30 % slower in data"
    assert found.first_step == 108


def test_shares_and_spread_are_logged() -> None:
    ranks = SlowRanks(rank=0, world_size=2)
    assert note(ranks, [spent(), spent(data=0.02)], step=10) == {
        "time/data": pytest.approx(0.2),
        "time/waiting": pytest.approx((0.039 + 0.019) / 2 / STEP_S),
        "skew/worst": pytest.approx(0.2),
        "skew/slowest_rank": 1.0,
        "skew/rank_0": pytest.approx(-0.2),
        "skew/rank_1": pytest.approx(0.2),
    }
    assert "skew/slowest_rank" not in note(ranks, [spent(), spent(data=0.002)], step=20)
    unknown = [spent()._replace(waiting=0.0, compute=0.0)] * 2
    assert "time/waiting" not in note(ranks, unknown, step=30)
    assert note(SlowRanks(rank=0, world_size=1), [spent()], step=10) == {"time/data": pytest.approx(0.1)}
    many = SlowRanks(rank=0, world_size=CURVES_OF_RANKS + 1)
    assert note(many, [spent()] * (CURVES_OF_RANKS + 1), step=10).keys() == {"time/data", "time/waiting", "skew/worst"}


@given(st.lists(st.floats(0.0, 0.5), min_size=2, max_size=9))
def test_the_median_is_of_the_others(own: list[float]) -> None:
    table = [RankTimes(steps=1, total=1.0, data=seconds) for seconds in own]
    expected = [mine - median(own[:rank] + own[rank + 1 :]) for rank, mine in enumerate(own)]
    assert excesses(table, "data") == pytest.approx(expected, abs=1e-12)


# In trainings. A rank's clock advances while it works; where ranks meet, all clocks are set to the latest one.

PLACES = ("data", "forward", "backward", "callbacks")
"""Where a rank may be slow."""
EVERY = 4
LOGS = 7
"""The first log isn't assessed. Each of the others is, by itself."""
Slow = dict[str, dict[int, float]]
"""Place → rank → seconds more of each step."""


class WorkClock:
    """Seconds that this rank has worked and waited. Nobody sleeps, so load and luck have no part in it."""

    def __init__(self, slow: Slow, rank: int) -> None:
        self.time = 0.0
        self._more = {place: slow.get(place, {}).get(rank, 0.0) for place in PLACES}

    def now(self) -> float:
        return self.time

    def work(self, place: str) -> None:
        self.time += 0.001 + 0.03 * (place == "forward") + self._more[place]

    def meet(self) -> None:
        """Wait for the rank that comes last."""
        latest = torch.tensor(self.time, dtype=torch.float64)
        dist.all_reduce(latest, op=dist.ReduceOp.MAX)
        self.time = latest.item()


class Meeting(Strategy):
    """A strategy in whose exchanges of gradients, and of buffers before a forward, clocks meet."""

    def __init__(self, strategy: Strategy, clock: WorkClock) -> None:
        self._strategy = strategy
        self._clock = clock
        self.unwrap = strategy.unwrap  # type: ignore[method-assign]
        self.observe_waiting = strategy.observe_waiting  # type: ignore[method-assign]

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = self._strategy.wrap(model)
        if isinstance(wrapped, nn.parallel.DistributedDataParallel):
            synchronise = wrapped._sync_buffers

            def meet() -> None:
                synchronise()
                self._clock.meet()

            vars(wrapped)["_sync_buffers"] = meet
        return wrapped

    @contextmanager
    def accumulate(self, model: nn.Module, *, synchronise: bool) -> Iterator[None]:
        with self._strategy.accumulate(model, synchronise=synchronise):
            yield
        if synchronise:
            self._clock.meet()


class Working(nn.Module):
    """Has buffers, and layers before and after those in which a backward takes time."""

    def __init__(self, clock: WorkClock) -> None:
        super().__init__()
        self.clock = clock
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        self.clock.work("forward")
        hidden = self.norm(self.first(inputs))
        hidden.register_hook(lambda _: self.clock.work("backward"))
        output: Tensor = self.last(hidden)
        return output


class Worked:
    """Takes time for each batch as a dataset, and for each step as a callback."""

    def __init__(self, clock: WorkClock, size: int = 0) -> None:
        self.clock = clock
        self.data = samples(size)
        self.asked = 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        if self.asked % BATCH == 0:
            self.clock.work("data")
        return self.data[index]

    def on_train_step_end(self, report: StepInfo) -> None:
        self.clock.work("callbacks")


class Texts(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[tuple[str, str]] = []

    def log(self, values: Mapping[str, Any], *, step: int, epoch: int) -> None:
        numbers = {name: value for name, value in values.items() if not isinstance(value, Text)}
        self.texts += [(name, value.text) for name, value in values.items() if isinstance(value, Text)]
        if numbers:
            super().log(numbers, step=step, epoch=epoch)


def found(context: Context, strategy: Any, slow: Slow) -> tuple[list[tuple[int, str]], dict[str, float], list[Any]]:
    """Who is named after a training, the last values logged, and what the logger was given as text."""
    clock = WorkClock(slow, context.rank)
    numbers = Texts()
    steps = EVERY * LOGS
    data: Any = Worked(clock, steps * BATCH * context.world_size)
    torch.manual_seed(0)
    with mock.patch.object(slow_ranks_module, "STRETCH_S", 0.0):
        # Every log counts by itself.
        trainer = make_trainer(
            settings(max_steps=steps, max_epochs=None, log_every_n_steps=EVERY, check_val_every_n_epoch=None),
            model=Working(clock),
            strategy=Meeting(strategy(context=context), clock),
            context=context,
            data=data,
            callbacks={"worked": Worked(clock)},
            loggers={"numbers": numbers} if context.is_main else {},
            clock=Clock(clock.now, operator.sub),
        )
        trainer.fit()
    named = [(each.rank, each.kind) for each in trainer.logbook.slow_ranks.found()]
    return sorted(named), numbers.logged[-1][2] if numbers.logged else {}, numbers.texts


@pytest.mark.multiproc
def test_the_waiting_rank_is_not_named(rank_pool: RankPool) -> None:
    """What the other one waits in backward, and for buffers, isn't its own."""
    (named, values, texts), (others, _, no_texts) = rank_pool.run(found, DDP, {"forward": {1: 0.03}})
    assert named == [(1, "compute")]
    assert values["skew/slowest_rank"] == 1
    assert values["skew/worst"] == pytest.approx(0.03 / 0.064, rel=0.05)
    assert values["time/waiting"] == pytest.approx(0.03 / 0.064 / 2, rel=0.05)
    ((tag, text),) = texts
    assert tag == "slow_rank"
    assert text.startswith("Rank 1 (")
    assert "slower in compute than the others" in text
    # Only rank 0 reports.
    assert (others, no_texts) == ([], [])


THREE = {"data": {1: 0.03}, "backward": {2: 0.03}, "callbacks": {0: 0.03}}


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("strategy", "slow", "named"),
    [
        (DDP, {}, []),
        (DDP, THREE, [(0, "callbacks"), (1, "data"), (2, "compute")]),
        (AllReduce, THREE, [(0, "callbacks"), (1, "data"), (2, "compute")]),
    ],
)
def test_each_slow_rank_is_named_and_no_other(
    rank_pool: RankPool, strategy: Any, slow: Slow, named: list[tuple[int, str]]
) -> None:
    (first, *_), *_ = rank_pool.run(found, strategy, slow, ranks=3)
    assert first == named

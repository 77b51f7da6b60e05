"""Streams: the same number of steps on every rank, each sample once, resumable after any step."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from framework import Strategy
from framework.errors import CheckpointError, ConfigError, DataError, FrameworkError, RunError
from framework.types import Datasets
from tests.helpers.internals import (
    BatchPlan,
    Config,
    Context,
    JobName,
    check_plain,
    check_streams,
    epoch_steps,
    first_batch,
    parse,
)
from tests.helpers.rank_pool import RankPool
from tests.unit.config.raw import raw_config
from tests.unit.small_trainer import samples
from tests.unit.streams import Drawing, KeepsItsPosition, Parts, Stateful, make_eval_loader, make_loader, opened, sample

# A DataLoader's worker sets a handler for SIGCHLD.
pytestmark = pytest.mark.usefixtures("own_state")


@dataclass(frozen=True)
class Case:
    """A stream of parts of these lengths, one for each of 3 ranks if it is sharded; resumed after some steps."""

    lengths: tuple[int, ...]
    is_sharded: bool = True
    batch_size: int = 2
    accumulate: int = 1
    stops_first: bool = False
    limit: int | None = None
    is_stateful: bool = False
    resume_after: int = 1

    @property
    def loader(self) -> dict[str, Any]:
        names = ("is_sharded", "batch_size", "accumulate", "stops_first", "limit")
        return {name: getattr(self, name) for name in names}


def targets(window: Any) -> list[list[float]]:
    """Return the targets of the samples that count, by micro-batch."""
    micro_batches = list(window.micro_batches)
    assert len(micro_batches) == window.num_micro_batches == len(window.indices)
    # A stand-in is a batch, too.
    assert all(len(each.batch[0]) for each in micro_batches)
    for indices, micro in zip(window.indices, micro_batches, strict=True):
        assert indices.num_samples == micro.num_samples
    return [target_of(micro) for micro in micro_batches]


def target_of(micro: Any) -> list[float]:
    """Return the targets of a micro-batch; none for a stand-in."""
    return list(micro.batch[1].tolist()) if micro.num_samples else []


def read(context: Context, cases: Sequence[Case]) -> list[Any]:
    """Return for each case the windows of epoch 1, those of a resumed loader, epoch 2 of both, and an evaluation."""
    exchange = opened(context)
    found = []
    for case in cases:
        kind = Stateful if case.is_stateful else Parts

        def loader(kind: Any = kind, case: Case = case) -> Any:
            return make_loader(kind(case.lengths), context, exchange=exchange, **case.loader)

        windows = []
        states = [None]
        taken = [0]
        straight = loader()
        for window in straight.epoch(1):
            windows.append((targets(window), window.global_count, window.epoch_end, window.first_rank))
            states.append(straight.state_dict())
            taken.append(taken[-1] + window.global_count)
        resumed = loader()
        after = case.resume_after % len(windows)
        every: list[Any] = [None] * context.world_size
        dist.all_gather_object(every, states[after])
        if after:
            resumed.load_state_dict(every, samples=taken[after])
        rest = [targets(window) for window in resumed.epoch(1, taken[after])]
        assert rest == [each for each, *_ in windows[after:]]
        for window, again in zip(straight.epoch(2), resumed.epoch(2), strict=True):
            assert targets(window) == targets(again)

        evaluated = []
        for is_even in (False, True):
            how: Any = {"is_sharded": case.is_sharded, "batch_size": case.batch_size, "is_even": is_even}
            evaluation = make_eval_loader(Parts(case.lengths), context, exchange=exchange, **how)
            batches = list(evaluation)
            for micro, again in zip(batches, evaluation, strict=True):
                assert micro.batch[1].tolist() == again.batch[1].tolist()
            evaluated.append([target_of(micro) for micro in batches])
        found.append((windows, evaluated))
    return found


def parts_of(lengths: tuple[int, ...], epoch: int) -> list[list[float]]:
    parts = []
    for part, size in enumerate(lengths):
        parts.append([sample(part, number, epoch)[1].item() for number in range(size)])
    return parts


def flat(nested: Any) -> list[float]:
    if not isinstance(nested, list):
        return [nested]
    return list(chain.from_iterable(map(flat, nested)))


CASES = (
    Case((13, 5, 0), resume_after=3),
    Case((13, 5, 0), is_stateful=True, resume_after=6),
    Case((0, 4, 11), batch_size=3, accumulate=2, resume_after=1),
    Case((6, 7, 14), batch_size=1, accumulate=3, is_stateful=True, resume_after=4),
    Case((25,), is_sharded=False, accumulate=2, resume_after=2),
    Case((23,), is_sharded=False, batch_size=3, is_stateful=True, resume_after=1),
    Case((2,), is_sharded=False, batch_size=1),
)


@pytest.mark.multiproc
def test_every_sample_is_taken_once_in_step(rank_pool: RankPool) -> None:
    """This holds in training and evaluation, for a shared stream, for shards of any lengths, and after a resume."""
    by_rank = rank_pool.run(read, CASES, ranks=3)
    for case, *found in zip(CASES, *by_rank, strict=True):
        runs = [windows for windows, _ in found]
        evaluations = [evaluated for _, evaluated in found]
        parts = parts_of(case.lengths, 1)
        global_batch = 3 * case.batch_size * case.accumulate
        steps = list(zip(*runs, strict=True))
        for number, step in enumerate(steps):
            taken = flat([window[0] for window in step])
            assert len({tuple(window[1:]) for window in step}) == 1, case
            assert len({len(window[0]) for window in step}) == 1, case
            assert (step[0][1], step[0][2]) == (len(taken), number == len(steps) - 1), case
            if not case.is_sharded:
                # The order is global, as with data of known length.
                assert taken == flat(parts)[number * global_batch : (number + 1) * global_batch], case
                assert step[0][3] is None
            else:
                assert step[0][3] == min(rank for rank in range(3) if flat(step[rank][0])), case
            micro_batches = chain.from_iterable(window[0] for window in step)
            assert max(map(len, micro_batches)) <= case.batch_size, case
        if case.is_sharded:
            for run, part in zip(runs, parts, strict=True):
                assert flat([window[0] for window in run]) == part, case
        for uneven, even in evaluations:
            assert [each for each in even if each] == uneven, case
        assert len({len(even) for _, even in evaluations}) == 1, case
        once = flat(parts_of(case.lengths, 0))
        assert sorted(flat([uneven for uneven, _ in evaluations])) == sorted(once), case


def steps(context: Context, cases: list[Case]) -> list[Any]:
    """Return (samples of each micro-batch, of all ranks, last) of the windows; or the error."""
    exchange = opened(context)
    found: list[Any] = []
    for case in cases:
        try:
            loader = make_loader(Parts(case.lengths), context, exchange=exchange, **case.loader)
            windows = []
            for window in loader.epoch(0):
                windows.append((list(map(len, targets(window))), window.global_count, window.epoch_end))
            found.append(windows)
        except FrameworkError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.multiproc
def test_an_epoch_ends_as_stop_or_join_says(rank_pool: RankPool) -> None:
    join = Case((11, 5, 0), accumulate=2)
    stop = replace(join, stops_first=True)
    cases = [join, replace(stop, lengths=(11, 5, 6)), replace(join, limit=24), replace(join, limit=7, accumulate=1)]
    assert rank_pool.run(steps, cases, ranks=3) == [
        [
            [([2, 2], 8, False), ([2, 2], 5, False), ([2, 1], 3, True)],
            [([2, 2], 12, False), ([2, 2], 7, True)],
            [([2, 2], 8, False), ([2, 2], 5, True)],
            [([2], 4, False), ([1], 1, True)],
        ],
        [
            [([2, 2], 8, False), ([1, 0], 5, False), ([0, 0], 3, True)],
            [([2, 2], 12, False), ([1, 0], 7, True)],
            [([2, 2], 8, False), ([1, 0], 5, True)],
            [([2], 4, False), ([0], 1, True)],
        ],
        [
            [([0, 0], 8, False), ([0, 0], 5, False), ([0, 0], 3, True)],
            [([2, 2], 12, False), ([2, 0], 7, True)],
            [([0, 0], 8, False), ([0, 0], 5, True)],
            [([0], 4, False), ([0], 1, True)],
        ],
    ]
    refused = [replace(stop, lengths=(11, 0, 0)), replace(join, lengths=(0, 0, 0))]
    ends = rank_pool.run(steps, refused, ranks=3)
    for of_stop, of_none in ends:
        assert "DataError: The train stream gives no sample in epoch 0." in of_stop
        assert "With data.stream=stop every process needs one: use data.stream=join, or fewer processes." in of_stop
        assert "DataError: The train stream gives no sample in epoch 0" in of_none
    limited = make_loader(Parts([9]), limit=8).steps
    assert limited is not None
    assert limited.constant == 4
    assert make_loader(Parts([9])).steps is None


def resume(context: Context, then: Case, now: Case, states: list[Any] | None, samples: int) -> Any:
    """Resume at `samples` from these states, by default those of all ranks after as many; return windows and states."""
    exchange = opened(context)
    own = []
    if states is None:
        before = make_loader(Stateful(then.lengths), context, exchange=exchange, **then.loader)
        taken = 0
        for window in before.epoch(0):
            taken += window.global_count
            if taken == samples:
                break
        states = [None] * context.world_size
        dist.all_gather_object(states, before.state_dict())
    loader = make_loader(Stateful(now.lengths), context, exchange=exchange, **now.loader)
    try:
        loader.load_state_dict(states, samples=samples)
        for window in loader.epoch(0, samples):
            own.append(targets(window))
        return own, states
    except FrameworkError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.multiproc
def test_a_shared_stream_resumes_on_other_ranks(rank_pool: RankPool) -> None:
    case = Case((25,), is_sharded=False, batch_size=3)
    two = rank_pool.run(resume, case, case, None, 12, ranks=2)
    wanted = parts_of((25,), 0)[0][12:]
    assert sorted(flat([windows for windows, _ in two])) == sorted(wanted)
    three = rank_pool.run(resume, case, replace(case, batch_size=2), two[0][1], 12, ranks=3)
    for number in range(3):
        assert flat([windows[number] for windows, _ in three]) == wanted[number * 6 : (number + 1) * 6]


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("now", "words"),
    [
        (
            {"lengths": (4, 4)},
            "DataError: (?s:.*)at sample 4 of shard . of 2 of the train stream, in epoch 0: a process finds no more",
        ),
        ({"limit": 8}, "DataError: (?s:.*)a process finds no more(?s:.*)trainer.limit_train_batches must not be small"),
        ({"limit": 12}, None),
    ],
)
def test_shards_resume_by_their_saved_rule(rank_pool: RankPool, now: dict[str, Any], words: str) -> None:
    then = Case((9, 7))
    ends = rank_pool.run(resume, then, replace(then, **now), None, 8, ranks=2)
    for end in ends:
        assert re.match(words, end) if words else len(end[0]) == 1, end


class Differs(IterableDataset[Any]):
    """A sample with something of every kind; another one on rank 1."""

    def __init__(self, rank: int, changed: Any) -> None:
        self.sample = {
            "image": torch.arange(6, dtype=torch.uint8).view(2, 3),
            "mean": torch.tensor([0.5, 1.5, float("nan")]),
            "name": "a",
            "label": 3,
            "row": np.arange(3.0),
            **(changed if rank else {}),
        }

    def __iter__(self) -> Iterator[Any]:
        return iter([self.sample] * 4)


DIFFERENT: list[dict[str, Any]] = [
    {"image": torch.arange(1, 7, dtype=torch.uint8).view(2, 3)},
    {"image": torch.arange(6, dtype=torch.uint8)},
    {"mean": torch.tensor([0.5, 1.6, 0.0])},
    {"name": "b"},
    {"label": 4},
    {"row": np.arange(1, 4.0)},
]


def compared(context: Context, changes: list[dict[str, Any]]) -> list[str]:
    exchange = opened(context)
    ends = []
    for dataset in (*(Differs(context.rank, each) for each in changes), Parts([9, 12], only=context.rank)):
        try:
            list(make_loader(dataset, context, exchange=exchange).epoch(0))
            ends.append("")
        except DataError as error:
            ends.append(str(error))
    return ends


@pytest.mark.multiproc
def test_ranks_with_different_shared_streams_are_named(rank_pool: RankPool) -> None:
    """Streams differ by content or length, not by the last digits, which depend on the processor."""
    same = [{}, {"mean": torch.tensor([0.5000001, 1.5, float("nan")])}]
    ends = rank_pool.run(compared, [*same, *DIFFERENT])
    assert ends[0] == ends[1]
    assert ends[0][:2] == ["", ""]
    for end in ends[0][2:]:
        assert "Ranks 0 and 1 don't read the same train stream: in epoch 0" in end
        assert "data.stream=join" in end


# One rank


def state_at(position: int) -> dict[str, Any]:
    state = make_loader(Stateful([9])).state_dict()
    shard = {"shard": 0, "samples": position, "state": {"position": position}, "next_digest": None}
    return {**state, "queues": [[shard]]}


def read_alone(dataset: Any, epoch: int = 0, start: int = 0, **how: Any) -> list[Any]:
    loader = make_loader(dataset, **how)
    try:
        if start:
            loader.load_state_dict([], samples=start)
        windows = []
        for window in loader.epoch(epoch, start):
            windows.append([micro.batch for micro in window.micro_batches])
        return windows
    finally:
        loader.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_stream_draws_depend_on_seed_epoch_and_place(num_workers: int) -> None:
    def drawn(epoch: int = 2, start: int = 0, **how: Any) -> list[tuple[float, ...]]:
        batches = read_alone(Drawing(), epoch, start, num_workers=num_workers, **how)
        rows: list[tuple[float, ...]] = []
        for (batch,) in batches:
            columns = [column.tolist() for column in batch]
            rows.extend(zip(*columns, strict=True))
        return rows

    before = torch.get_rng_state(), random.getstate()
    whole = drawn()
    assert len(set(chain.from_iterable(values for _, *values in whole))) == 20
    assert drawn(batch_size=7) == whole
    assert drawn(start=6) == whole[6:]
    draws = {row[1:] for row in whole}
    for other in (drawn(epoch=3), drawn(seed=6)):
        assert not {row[1:] for row in other} & draws
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


@pytest.mark.parametrize("make", [Parts, Stateful])
def test_a_stateful_stream_is_not_reread(make: Any) -> None:
    dataset = make([11])
    before = make_loader(make([11]), batch_size=4)
    next(before.epoch(1))
    loader = make_loader(dataset, batch_size=4)
    loader.load_state_dict([before.state_dict()], samples=4)
    rest = flat([targets(window) for window in loader.epoch(1, 4)])
    assert rest == parts_of((11,), 1)[0][4:]
    assert dataset.read == (11 if make is Parts else 7)


@pytest.mark.parametrize(("make", "num_workers"), [(KeepsItsPosition, 0), (KeepsItsPosition, 1), (Stateful, 0)])
def test_an_epoch_after_a_cut_one_restarts(make: Any, num_workers: int) -> None:
    """The epoch was cut by a limit, or left early; it may have been resumed."""
    loader = make_loader(make([7]), limit=5, num_workers=num_workers)
    loader.load_state_dict([state_at(2)], samples=2)
    for epoch, start in ((0, 2), (1, 0), (2, 0), (3, 0)):
        windows = loader.epoch(epoch, start)
        if epoch == 1:
            assert flat(targets(next(windows))) == parts_of((7,), 1)[0][:2]
            continue
        assert flat([targets(window) for window in windows]) == parts_of((7,), epoch)[0][start:5]
    loader.close()


def test_nothing_beyond_a_limit_is_read() -> None:
    dataset = Parts([50])
    assert len(read_alone(dataset, limit=8, batch_size=4)) == 2
    assert dataset.read == 8
    with pytest.raises(DataError, match="limit_train_batches must not be smaller"):
        read_alone(dataset, start=8, limit=8)


class Failing(Parts):
    def __iter__(self) -> Any:
        raise StopIteration


def test_an_early_error_is_no_end_of_stream() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        read_alone(Failing([5]))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_that_cannot_be_read_is_refused(num_workers: int) -> None:
    with pytest.raises(
        RunError, match=r"^Sample 5 of the train stream, in epoch 0, raised OSError(.|\n)*, in __iter__: "
    ):
        read_alone(Parts([9], fails_at=5), num_workers=num_workers)
    with pytest.raises(DataError, match="at sample 300 of the train stream, in epoch 2: a process finds no more"):
        read_alone(Parts([270]), 2, 300, num_workers=num_workers)
    with pytest.raises(DataError, match="The train stream gives no sample in epoch 0"):
        read_alone(Parts([]), num_workers=num_workers)


class Ragged(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([torch.zeros(2), torch.zeros(3)])


class Unsaved(Stateful):
    """A checkpoint can't hold its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": np.int64(self.position)}


def test_unfitting_samples_and_states_are_refused() -> None:
    with pytest.raises(RunError, match="Samples 0 to 1 of the train stream don't make a batch"):
        read_alone(Ragged())
    with pytest.raises(DataError, match=r"Drawing, has no shard\(num_shards, index\)"):
        make_loader(Drawing(), is_sharded=True)
    # At the first step, not hours later when it is to be saved.
    with pytest.raises(CheckpointError, match=r"the train stream's state_dict\(\)\.position a numpy\.int64"):
        next(
            make_loader(Unsaved([9]), check_state=partial(check_plain, name="the train stream's state_dict()")).epoch(0)
        )
    # Nothing is saved.
    assert len(read_alone(Unsaved([9]))) == 5
    inputs, _ = first_batch(Parts([3]), number=5, split="test")
    assert torch.equal(inputs[3:], inputs[:2])
    with pytest.raises(DataError, match="The test stream gives no sample"):
        first_batch(Parts([0]), number=5, split="test")


# What goes with a stream


class Mixing(Strategy):
    mixes_samples = True


class Staged(Strategy):
    num_stages = 2


STREAM = Datasets(Parts([3]), val=samples(4))
BESIDE = Datasets(samples(4), val=Parts([3]))
JOIN = {"stream": "join"}


def config(*, job: str = "train", **changes: Any) -> Config:
    whole = parse(raw_config())
    data = {key: value for key, value in changes.items() if hasattr(whole.data, key)}
    trainer = {key: value for key, value in changes.items() if hasattr(whole.trainer, key)}
    of_data = replace(whole.data, **{"shuffle": False, **data})
    return replace(whole, job=JobName(job), data=of_data, trainer=replace(whole.trainer, **trainer))


@dataclass(frozen=True, kw_only=True)
class WithStream:
    """Settings beside a stream, and why they are refused; None if they aren't."""

    changes: dict[str, Any]
    datasets: Datasets = STREAM
    strategy: Strategy = field(default_factory=Strategy)
    says: str | None = None


@pytest.mark.parametrize(
    "case",
    [
        WithStream(changes={"shuffle": True}, says="data.shuffle=true can't go with a stream to train on"),
        WithStream(changes={"loader": "resident"}, says="data.loader=resident can't go with a stream"),
        WithStream(changes={"limit_train_batches": 0.5}, says="trainer.limit_train_batches=0.5 is a share of a stream"),
        WithStream(changes={"val_check_interval": 0.5}, says="trainer.val_check_interval=0.5 is a share of an epoch"),
        WithStream(
            changes={"limit_val_batches": 0.5},
            datasets=BESIDE,
            says="trainer.limit_val_batches=0.5 is a share of a stream",
        ),
        WithStream(changes={"overfit_batches": 2}, says="trainer.overfit_batches can't go with a stream (train)"),
        WithStream(changes={"job": "parity", **JOIN}, says="data.stream=join can't go with job=parity"),
        WithStream(changes=JOIN, strategy=Mixing(), says="data.stream=join can't go with strategy.sync_batchnorm=true"),
        WithStream(changes=JOIN, strategy=Staged(), says="data.stream=join can't go with strategy=pipeline"),
        WithStream(changes={"limit_train_batches": 3, "limit_val_batches": 0.5, "num_workers": 1}, strategy=Mixing()),
        WithStream(changes={"shuffle": True, "num_workers": 8, "loader": "resident"}, datasets=BESIDE),
    ],
)
def test_what_a_stream_cannot_give_is_refused(case: WithStream) -> None:
    asked = config(**case.changes)
    if case.says is None:
        check_streams(asked, case.datasets, case.strategy)
        return
    with pytest.raises(ConfigError) as caught:
        check_streams(asked, case.datasets, case.strategy)
    assert case.says in str(caught.value)


def test_a_limit_counts_batches_of_each_process() -> None:
    plan = BatchPlan(12, 2, 3)
    limited = [config(limit_train_batches=n, accumulate_grad_batches=2).trainer for n in (1, 2, 3)]
    numbers = [epoch_steps(each, plan, sizes=None) for each in limited]
    assert [each and each.constant for each in numbers] == [1, 1, 2]
    assert epoch_steps(config().trainer, plan, sizes=None) is None

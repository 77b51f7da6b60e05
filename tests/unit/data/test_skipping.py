"""Steps whose samples are left out or trained later: the other batches stay as they are, also after a resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from framework import Source
from tests.helpers.contexts import CPU, cpu_context
from tests.helpers.internals import (
    LoaderOptions,
    MapLoader,
    SkippedSteps,
    SourceLoader,
    TrainProgress,
    UserBatches,
    number_of_step,
    plan_batches,
)
from tests.helpers.loaders import Made
from tests.unit import streams

pytestmark = pytest.mark.usefixtures("own_state")

SIZE = 22
EPOCHS = 3
TENSORS = TensorDataset(torch.arange(SIZE))
DRAWING = Made(lambda index: (index, torch.rand(())), SIZE)
"""Six global batches of 4 samples, of which the last has 2."""


class Batches:
    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Any:
        for begin in range(0, SIZE, 2):
            yield [begin, begin + 1] if begin % 4 else [begin]


class Games(Source):
    def __len__(self) -> int:
        return SIZE

    def batch(self, model: Any, info: Any) -> Any:
        raise NotImplementedError


def map_loader(dataset: Any, kind: Any, *, rank: int, ranks: int, **how: Any) -> MapLoader:
    plan = plan_batches(
        batch_size=4, global_batch_size=4, world_size=ranks, accumulate=2, drop_last=how.pop("drop_last", False)
    )
    options = LoaderOptions(kind, 0)
    keywords: dict[str, Any] = {"shuffle": True, "seed": 5, "accumulated": 2, **how}
    return MapLoader(dataset, split="train", plan=plan, rank=rank, device=CPU, options=options, **keywords)


def resident(**place: Any) -> MapLoader:
    return map_loader(TENSORS, "resident", **place)


def loaded(**place: Any) -> MapLoader:
    return map_loader(DRAWING, "dataloader", **place)


def without_the_last(**place: Any) -> MapLoader:
    return map_loader(TENSORS, "resident", drop_last=True, **place)


def limited(**place: Any) -> MapLoader:
    """Five steps of two batches each."""
    return map_loader(TENSORS, "resident", limit=10, **place)


def listed(**place: Any) -> MapLoader:
    return map_loader(TENSORS, "dataloader", sampler=UserBatches(Batches()), shuffle=False, **place)


def made(*, rank: int, ranks: int) -> SourceLoader:
    plan = plan_batches(batch_size=4, global_batch_size=4, world_size=ranks, accumulate=2)
    loader = SourceLoader(Games(), plan=plan, rank=rank, accumulated=2)
    loader.connect(lambda window, index: window.indices[index].indices)
    return loader


def stream(*, rank: int, ranks: int) -> Any:
    assert ranks == 1
    return streams.make_loader(streams.Parts([SIZE]), cpu_context(), batch_size=4)


MAP_LOADERS: list[Callable[..., Any]] = [resident, loaded, without_the_last, limited, listed, made]
CASES = {
    "in the middle": SkippedSteps(frozenset({2, 9})),
    "neighbours": SkippedSteps(frozenset({3, 4, 5}), frozenset()),
    "at the ends of an epoch": SkippedSteps(frozenset({1, 5, 6, 7})),
    "an epoch": SkippedSteps(frozenset(range(5, 13))),
    "later": SkippedSteps(frozenset(), frozenset({1, 3, 8})),
    "the last later": SkippedSteps(frozenset({5}), frozenset({4, 6, 12})),
    "both": SkippedSteps(frozenset({2, 8, 18}), frozenset({1, 4, 9, 11})),
}


def leaves(batch: Any) -> list[Any]:
    parts = batch if isinstance(batch, (tuple, list)) else [batch]
    return [part.tolist() if isinstance(part, Tensor) else part for part in parts]


def taken(loader: Any, steps: SkippedSteps, state: dict[str, Any] | None = None) -> tuple[list[Any], list[Any]]:
    """Return (epoch, batches) of each step from a progress on, and the progress after each."""
    progress = TrainProgress()
    if state is not None:
        progress.load_state_dict(state)
    done = []
    states = []
    while progress.epoch < EPOCHS:
        skips = steps.from_number(progress.next_number, late=progress.deferred)
        for window in loader.epoch(progress.epoch, progress.samples, skips=skips):
            if window.global_count:
                done.append((progress.epoch, [leaves(micro.batch) for micro in window.micro_batches]))
            progress.advance(window, global_batch_size=loader.global_batch_size)
            if window.global_count:
                states.append(progress.state_dict())
    return done, states


def expected(whole: list[Any], steps: SkippedSteps) -> list[Any]:
    """Return the steps of a run that skips none in the order of one that skips some."""
    numbered = list(enumerate(whole, start=1))
    result = []
    for epoch in range(EPOCHS):
        late = []
        for number, step in numbered:
            if step[0] != epoch or number in steps.dropped:
                continue
            if number in steps.deferred:
                late.append(step)
            else:
                result.append(step)
        result += late
    return result


@pytest.mark.parametrize("place", [{"rank": 0, "ranks": 1}, {"rank": 1, "ranks": 2}], ids=["alone", "of two"])
@pytest.mark.parametrize("make", MAP_LOADERS)
def test_the_other_batches_stay_as_they_are(make: Callable[..., Any], place: dict[str, int]) -> None:
    """They are also the same when training is resumed after any step."""
    whole, _ = taken(make(**place), SkippedSteps())
    for name, steps in CASES.items():
        done, states = taken(make(**place), steps)
        assert done == expected(whole, steps), name
        assert states[-1]["epoch"] == EPOCHS
        for position, state in enumerate(states, start=1):
            # The other epochs have nothing that the first two don't have.
            if state["epoch"] < 2:
                resumed, _ = taken(make(**place), steps, state)
                assert resumed == done[position:], (name, position)


@pytest.mark.parametrize("name", ["in the middle", "neighbours", "at the ends of an epoch", "an epoch"])
def test_a_stream_reads_past_skipped_steps(name: str) -> None:
    steps = CASES[name]
    whole, _ = taken(stream(rank=0, ranks=1), SkippedSteps())
    done, _ = taken(stream(rank=0, ranks=1), steps)
    assert done == expected(whole, steps)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_larger_batch_leaves_out_the_same_samples(drop_last: bool) -> None:
    """Deferred samples that are left are cut into global batches of the new size."""
    steps = SkippedSteps(frozenset(), frozenset({1, 2}))
    _, states = taken(resident(rank=0, ranks=1), steps)
    plan = plan_batches(batch_size=3, global_batch_size=3, world_size=1, accumulate=1, drop_last=drop_last)
    smaller = MapLoader(TENSORS, split="train", plan=plan, rank=0, device=CPU, shuffle=True, seed=5)
    # After steps 3 to 6, all but those.
    resumed, _ = taken(smaller, SkippedSteps(), states[3])
    samples: list[int] = []
    for epoch, batches in resumed:
        if epoch == 0:
            samples += batches[0][0]
    (first, _) = taken(resident(rank=0, ranks=1), SkippedSteps())
    wanted: list[int] = []
    for _, batches in first[:2]:
        wanted += batches[0][0] + batches[1][0]
    assert samples == wanted


def test_samples_that_are_left_out_are_not_loaded() -> None:
    asked: list[int] = []

    def note(index: int) -> int:
        asked.append(index)
        return index

    loader = map_loader(Made(note, SIZE), "dataloader", rank=0, ranks=1, shuffle=False)
    taken(loader, SkippedSteps(frozenset({2, 8, 14})))
    assert set(asked).isdisjoint({4, 5, 6, 7})


def test_steps_are_numbered_as_if_none_was_skipped() -> None:
    passed = {103, 104, 120}
    numbers = [number_of_step(step, step=100, skipped=2, passed=passed) for step in (101, 102, 118, 119)]
    assert numbers == [105, 106, 123, 124]
    assert number_of_step(101, step=100, skipped=0, passed=passed) == 101
    assert number_of_step(103, step=100, skipped=0, passed=passed) == 105

"""A stream that is read in shards: each window from one of them, in a fixed order, resumable on any readers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from framework import Mix
from framework.errors import CheckpointError, DataError
from tests.unit.streams import make_loader

# A DataLoader's worker sets a handler for SIGCHLD.
pytestmark = pytest.mark.usefixtures("own_state")

SIZES = (13, 4, 0, 7, 9)


def sample(file: int, number: int) -> Tensor:
    """What a sample draws follows the number that identifies it."""
    return torch.tensor([file * 100 + number, torch.rand(()).item()])


NUMBERS = sorted(float(file * 100 + number) for file, size in enumerate(SIZES) for number in range(size))


class Files(IterableDataset[Tensor]):
    """One file after another."""

    def __init__(self, sizes: Sequence[int] = SIZES) -> None:
        self.sizes = list(enumerate(sizes))

    def shard(self, num_shards: int, index: int) -> Files:
        part = type(self)()
        part.sizes = self.sizes[index::num_shards]
        return part

    def __iter__(self) -> Iterator[Tensor]:
        for file, size in self.sizes:
            for number in range(size):
                yield sample(file, number)


class FilesOfWorker(IterableDataset[Tensor]):
    """Splits the files by worker itself, as PyTorch's documentation shows."""

    def __iter__(self) -> Iterator[Tensor]:
        files = list(enumerate(SIZES))
        worker = get_worker_info()
        if worker is not None:
            files = files[worker.id :: worker.num_workers]
        for file, size in files:
            for number in range(size):
                yield sample(file, number)


class FilesWithState(Files):
    """Resumes from its state."""

    done = 0

    def __iter__(self) -> Iterator[Tensor]:
        places = [(file, number) for file, size in self.sizes for number in range(size)]
        while self.done < len(places):
            self.done += 1
            yield sample(*places[self.done - 1])
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class Buffered(FilesWithState):
    """Its state leaves out the samples that it has read ahead."""

    def __iter__(self) -> Iterator[Tensor]:
        buffer: list[Tensor] = []
        for each in super().__iter__():
            buffer.append(each)
            if len(buffer) == 3:
                yield from buffer
                buffer = []
        yield from buffer


Checkpoint = tuple[dict[str, Any], int]


def read(
    dataset: Any, num_workers: int, checkpoint: Checkpoint | None = None, *, batch_size: int = 3, **reading: Any
) -> tuple[list[Any], list[Checkpoint]]:
    """Return the batches of epoch 1, after a checkpoint if there is one, and a checkpoint after each."""
    loader = make_loader(dataset, num_workers=num_workers, batch_size=batch_size, **reading)
    taken = 0
    if checkpoint is not None:
        state, taken = checkpoint
        loader.load_state_dict([state], samples=taken)
    batches = []
    checkpoints = []
    for window in loader.epoch(1, taken):
        batches.append([micro.batch.tolist() for micro in window.micro_batches])
        taken += window.global_count
        checkpoints.append((loader.state_dict(), taken))
    loader.close()
    return batches, checkpoints


def some(checkpoints: list[Checkpoint], num_workers: int) -> list[tuple[int, Checkpoint]]:
    """Return the checkpoints but the last, with their steps. Of two workers, which take turns, each third one."""
    numbered = list(enumerate(checkpoints[:-1]))
    return numbered[::3] if num_workers else numbered


def numbers(batches: list[Any]) -> list[float]:
    """Return which samples are in the batches, in order."""
    return sorted(row[0] for row in chain.from_iterable(chain.from_iterable(batches)))


@pytest.mark.parametrize("make", [Files, FilesOfWorker, FilesWithState])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_shards_resume_bit_for_bit_after_any_step(make: Any, num_workers: int) -> None:
    batches, checkpoints = read(make(), num_workers)
    assert numbers(batches) == NUMBERS
    assert read(make(), num_workers)[0] == batches
    for step, checkpoint in some(checkpoints, num_workers):
        assert read(make(), num_workers, checkpoint)[0] == batches[step + 1 :]


@pytest.mark.parametrize("make", [Files, FilesOfWorker, FilesWithState])
@pytest.mark.parametrize(("then", "now"), [(0, 2), (2, 0), (3, 2)])
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
def test_other_workers_lose_and_repeat_nothing(make: Any, then: int, now: int) -> None:
    """A run that has changed its workers resumes bit for bit from then on."""
    batches, checkpoints = read(make(), then)
    rest, later = read(make(), now, checkpoints[3], batch_size=4)
    assert numbers(batches[:4] + rest) == NUMBERS
    for step, checkpoint in some(later, now):
        assert read(make(), now, checkpoint, batch_size=4)[0] == rest[step + 1 :]


def test_limits_and_dropped_batches_of_shards() -> None:
    batches, checkpoints = read(Files(), 2, limit=15)
    assert len(batches) == 5
    assert len(read(Files(), 2, checkpoints[1], limit=15)[0]) == 3

    loader = make_loader(Files(), num_workers=2, batch_size=2)
    sizes = [window.global_count for window in loader.epoch(0)]
    loader.close()
    assert sizes.count(1) == sum(total % 2 for total in (22, 11))


def test_workers_that_would_read_the_same_are_refused() -> None:
    class Whole(IterableDataset[float]):
        def __iter__(self) -> Iterator[float]:
            return iter([1.0] * 9)

    with pytest.raises(DataError, match=r"so every worker would read the same samples(.|\n)*data.num_workers=1"):
        read(Whole(), 2)


def test_a_state_that_leads_elsewhere_is_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    """As of a buffer that isn't part of it. The samples before are read again, which is exact."""
    batches, checkpoints = read(Buffered(), 0)
    assert read(Buffered(), 0, checkpoints[1], batch_size=3)[0] == batches[2:]
    state, taken = checkpoints[0]
    assert read(Buffered(), 0, (state, taken))[0] == batches[1:]
    four, places = read(Buffered(), 0, batch_size=4)
    assert read(Buffered(), 0, places[0], batch_size=4)[0] == four[1:]
    assert "the samples before are read again" in capsys.readouterr().out


@pytest.mark.parametrize("make", [Files, FilesWithState])
def test_other_data_is_refused_in_the_middle_of_an_epoch(make: Any) -> None:
    _, checkpoints = read(make(), 0)
    with pytest.raises(CheckpointError, match="Sample 6 of the train stream, in epoch 1 isn't the one"):
        read(make([3, 9, 9]), 0, checkpoints[1])
    with pytest.raises(DataError, match="at sample 6 of the train stream, in epoch 1: a process finds no more"):
        read(make([3, 3]), 0, checkpoints[1])
    damaged = {**checkpoints[1][0], "queues": [[{"shard": 0}]]}
    with pytest.raises(CheckpointError, match="state of the train stream in the checkpoint can't be read: KeyError"):
        read(make(), 0, (damaged, 6))


class Itself(Files):
    """Looks at its rank."""

    def shard(self, num_shards: int, index: int) -> Files:
        return self


def test_a_stream_that_splits_itself_needs_the_same_processes() -> None:
    _, checkpoints = read(Itself(), 0, is_sharded=True)
    assert read(Itself(), 0, checkpoints[0], is_sharded=True)[0]
    with pytest.raises(CheckpointError, match="was read in 1 shards, and 2 are read now"):
        read(Itself(), 2, checkpoints[0], is_sharded=True)


# Mixtures


class Letters(FilesWithState):
    """Another order in every pass."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        for each in super().__iter__():
            yield each + torch.tensor([10_000.0 * (self.epoch + 1), 0.0])


@pytest.mark.parametrize("kinds", [(Files, Letters), (FilesWithState, Letters)])
@pytest.mark.parametrize("at_end", ["stop", "restart"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_mixtures_resume_bit_for_bit(kinds: Any, at_end: Any, num_workers: int) -> None:
    def mixed() -> Mix:
        return Mix([kinds[0](), kinds[1]((3, 4))], weights=[2, 1], at_end=at_end)

    batches, checkpoints = read(mixed(), num_workers)
    for step, checkpoint in some(checkpoints, num_workers):
        assert read(mixed(), num_workers, checkpoint)[0] == batches[step + 1 :]
    found = numbers(batches)
    if at_end == "restart":
        assert set(NUMBERS) <= set(found)
        # Its second pass is of the next epoch.
        assert max(found) > 30_000
    else:
        assert len(set(found)) == len(found)


def test_a_mixture_draws_by_its_weights() -> None:
    class Ones(IterableDataset[Tensor]):
        def __init__(self, value: float) -> None:
            self.value = value

        def __iter__(self) -> Iterator[Tensor]:
            return iter(torch.full((4000, 1), self.value))

    loader = make_loader(Mix([Ones(0.0), Ones(1.0)], weights=[1, 3]), batch_size=100)
    drawn = []
    for epoch in (0, 1, 0):
        windows = loader.epoch(epoch, limit=30)
        drawn.append([micro.batch.flatten().tolist() for window in windows for micro in window.micro_batches])
    assert drawn[0] == drawn[2] != drawn[1]
    assert sum(chain.from_iterable(drawn[0])) / 3000 == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize(
    ("streams", "keywords", "says"),
    [
        ([[1, 2]], {}, "Stream 0 of a Mix is a list, not a torch.utils.data.IterableDataset"),
        ([], {}, "A Mix of 0 streams has 0 weights"),
        ([Files()], {"weights": [1, 2]}, "A Mix of 1 streams has 2 weights"),
        ([Files()], {"weights": [0]}, "Each must be a finite number above 0"),
        ([Files()], {"at_end": "loop"}, "is neither"),
    ],
)
def test_a_mixture_that_does_not_fit_is_refused(streams: Any, keywords: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        Mix(streams, **keywords)
    with pytest.raises(DataError, match=r"FilesOfWorker, has no shard\(num_shards, index\)"):
        Mix([FilesOfWorker()]).shard(2, 0)
    with pytest.raises(DataError, match="Stream 0 of a Mix, a Files, has no samples"):
        list(Mix([Files([]), Files()], weights=[1e9, 1], at_end="restart"))

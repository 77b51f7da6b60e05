"""One rank that reads a stream: the same samples whoever asks for them, from any place."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import IterableDataset

from framework.data.batching import BatchPlan
from framework.data.stream import Deal, Place, Reader, Reading, chunks, digest, first_batch
from framework.errors import DataError, RunError
from tests.unit.streams import Drawing, Parts, Stateful, sample

BEGIN = Place(0)


def read(dataset: Any, place: Place = BEGIN, *, deal: Deal, limit: int | None = None) -> list[Any]:
    return list(chunks(dataset, deal, place, Reading("train", seed=1, limit=limit)))


def alone(global_batch_size: int, *, micro_batches: int = 1) -> Deal:
    return Deal(BatchPlan(global_batch_size, micro_batches, 1), 0, False)


def rows(found: list[Any]) -> list[list[float]]:
    """Every sample that counts, in order."""
    micro = [each for chunk in found for each in chunk.micro_batches if each.num_samples]
    return [row for each in micro for row in torch.stack([each.batch[0].sum(dim=1), each.batch[1]], dim=1).tolist()]


def test_what_a_stream_draws_depends_on_the_place_of_the_sample_alone() -> None:
    before = torch.get_rng_state()
    reader = Reader(Drawing(), Place(2), part="train", seed=1, source=0)
    whole = reader.take(4) + reader.take(9)
    assert len({drawn for _, *drawn in [(n, a, b) for n, a, b in whole] for drawn in drawn}) == 20
    later = Reader(Drawing(), Place(2, 7), part="train", seed=1, source=0)
    later.go_to_place()
    assert later.take(2) == whole[7:9]
    others = [Reader(Drawing(), Place(epoch), part="train", seed=1, source=at) for epoch, at in ((3, 0), (2, 1))]
    assert all(other.take(1) != whole[:1] for other in others)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_shared_stream_is_dealt_as_data_of_known_length_are() -> None:
    """Every rank reads all of it, and each sample is kept once; of a short window a rank may have none."""
    kept = []
    for rank in range(3):
        found = read(Parts([7]), deal=Deal(BatchPlan(6, 2, 3), rank, False))
        assert [(chunk.size, chunk.end, len(chunk.micro_batches)) for chunk in found] == [(6, 6, 2), (1, 7, 1)]
        sizes = [[micro.num_samples for micro in chunk.micro_batches] for chunk in found]
        assert sizes == [[1, 1], [int(rank == 0)]]
        kept += [
            each
            for chunk in found
            for part, micro in zip(chunk.places, chunk.micro_batches, strict=True)
            for each in part[: micro.num_samples]
        ]
    assert sorted(kept) == list(range(7))


def test_a_stream_of_its_own_is_kept_whole() -> None:
    found = read(Parts([9]), deal=Deal(BatchPlan(11, 2, 3), 1, True))  # of 4 samples
    assert [chunk.size for chunk in found] == [4, 4, 1]
    assert [[micro.num_samples for micro in chunk.micro_batches] for chunk in found] == [[2, 2], [2, 2], [1]]
    assert rows(found) == rows(read(Parts([9]), deal=alone(9)))


@pytest.mark.parametrize("make", [Parts, Stateful])
def test_it_goes_on_where_it_stood(make: Any) -> None:
    """By passing over what was read; with a state of its own it isn't read again."""
    whole = read(make([11]), Place(1), deal=alone(4))
    first = whole[0]
    dataset = make([11])
    rest = read(dataset, Place(1, first.end, first.state), deal=alone(4))
    assert rows(rest) == rows(whole[1:])
    assert [chunk.end for chunk in rest] == [8, 11]
    assert (first.state is None, dataset.read) == ((True, 11) if make is Parts else (False, 7))
    assert rows(read(dataset, Place(2), deal=alone(4))) == rows(read(make([11]), Place(2), deal=alone(4)))
    assert read(make([11]), Place(1, 11, whole[-1].state, has_ended=True), deal=alone(4)) == []


def test_a_limit_cuts_it_and_nothing_beyond_is_read() -> None:
    dataset = Parts([50])
    assert [chunk.size for chunk in read(dataset, deal=alone(4), limit=8)] == [4, 4]
    assert dataset.read == 8
    for rank, wanted in enumerate(([3, 3, 1], [2, 2])):  # two windows, and of a third one a share
        mine = read(Parts([50]), deal=Deal(BatchPlan(5, 1, 2), rank, True), limit=11)
        assert [chunk.size for chunk in mine] == wanted


def test_a_stream_that_is_shorter_than_it_was_is_refused() -> None:
    with pytest.raises(DataError, match="can't go on at sample 300 of the train stream: in epoch 2 it has only 270"):
        read(Parts([270]), Place(2, 300), deal=alone(4))


def test_an_error_names_the_sample_and_the_line() -> None:
    with pytest.raises(
        RunError, match=r"Sample 5 of the train stream, in epoch 0, raised OSError: the connection"
    ) as e:
        read(Parts([9], fails_at=5), deal=alone(4))
    assert "streams.py" in str(e.value)
    mixed: Any = [torch.zeros(2), torch.zeros(3)]

    class Mixed(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(mixed)

    with pytest.raises(RunError, match="Samples 0 to 1 of the train stream don't make a batch"):
        read(Mixed(), deal=alone(4))


class Failing(Stateful):
    """One of its calls fails."""

    def __init__(self, call: str, error: BaseException) -> None:
        super().__init__([5])
        self.call, self.error = call, error

    def made(self, call: str) -> None:
        if call == self.call:
            raise self.error

    def set_epoch(self, epoch: int) -> None:
        self.made("set_epoch")

    def state_dict(self) -> dict[str, Any]:
        self.made("first_state" if self.position == 0 else "state_dict")
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.made("load_state_dict")
        super().load_state_dict(state)

    def __iter__(self) -> Any:
        self.made("iter")
        return iter(map(self.checked, super().__iter__()))

    def checked(self, given: Any) -> Any:
        self.made("next" if self.position == 4 else "")
        return given


@pytest.mark.parametrize("error", [KeyError("a"), StopIteration(), SystemExit(3)])
@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("set_epoch", r"set_epoch\(\) of the train stream, in epoch 1,"),
        ("load_state_dict", r"load_state_dict\(\) of the train stream, in epoch 1,"),
        ("iter", r"iter\(\) of the train stream, in epoch 1,"),
        ("first_state", r"state_dict\(\) of the train stream, before its first sample,"),
        ("state_dict", r"state_dict\(\) of the train stream, after 3 samples of epoch 1,"),
    ],
)
def test_an_error_of_another_call_is_not_one_of_a_sample(call: str, said: str, error: BaseException) -> None:
    """Nor the end of the stream."""
    with pytest.raises(RunError, match=f"^{said} raised {type(error).__name__}") as caught:
        read(Failing(call, error), Place(1, 1, {"position": 1}), deal=alone(2))
    assert "in made: raise self.error" in str(caught.value)


def test_a_sample_that_calls_exit_is_named() -> None:
    with pytest.raises(RunError, match=r"^Sample 3 of the train stream, in epoch 0, raised SystemExit: 3"):
        read(Failing("next", SystemExit(3)), deal=alone(2))


class KeepingItsPlace(Stateful):
    """Which it sets back at the end only."""

    def __iter__(self) -> Any:
        self.position, self.begin = self.begin or self.position, 0
        while self.position < self.lengths[0]:
            self.position += 1
            yield sample(0, self.position - 1, self.epoch)
        self.position = 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.begin = state["position"], 0


@pytest.mark.parametrize("make", [KeepingItsPlace, Stateful])
def test_an_epoch_begins_anew_after_one_that_was_cut(make: Any) -> None:
    """By a limit, or left early, also one that was gone on with."""
    dataset, reading = make([7]), Reading("train", limit=5)
    fresh = [rows(list(chunks(make([7]), alone(2), Place(epoch), reading))) for epoch in range(4)]
    reading = Reading("train", limit=5)
    state = {"position": 2}
    assert rows(list(chunks(dataset, alone(2), Place(0, 2, state), reading))) == fresh[0][2:]
    left = chunks(dataset, alone(2), Place(1), reading)
    assert rows([next(left)]) == fresh[1][:2]
    left.close()
    for epoch in (2, 3):
        assert rows(list(chunks(dataset, alone(2), Place(epoch), reading))) == fresh[epoch]


SAMPLE = {
    "image": torch.arange(6, dtype=torch.uint8).view(2, 3),
    "mean": torch.tensor([0.5, 1.5, float("nan")]),
    "name": "a",
    "label": 3,
    "wave": torch.tensor([1 + 2j]),
    "row": numpy.arange(3.0),
    "when": numpy.datetime64("2024-01-01"),
    "other": object(),
}


@pytest.mark.parametrize(
    "change",
    [
        {"image": torch.arange(1, 7, dtype=torch.uint8).view(2, 3)},
        {"image": torch.arange(6, dtype=torch.uint8)},
        {"mean": torch.tensor([0.5, 1.6, 0.0])},
        {"name": "b"},
        {"name": b"b"},
        {"label": 4},
        {"wave": torch.tensor([1 + 3j])},
        {"row": numpy.arange(1, 4.0)},
    ],
)
def test_a_digest_tells_samples_apart(change: dict[str, Any]) -> None:
    assert digest(SAMPLE) == digest({**SAMPLE, "other": object()})
    assert digest(SAMPLE) != digest({**SAMPLE, **change})


def test_the_first_samples_come_again_where_there_are_fewer() -> None:
    inputs, _ = first_batch(Parts([3]), number=5, part="test")
    assert torch.equal(inputs[3:], inputs[:2])
    with pytest.raises(DataError, match="The test stream gives no sample"):
        first_batch(Parts([0]), number=5, part="test")

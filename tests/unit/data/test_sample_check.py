"""Samples that are loaded twice at the start, and the data of a resumed run."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from framework import TensorSamples
from framework.errors import CheckpointError, RunError
from tests.helpers.internals import DataIdentity, LoaderOptions, MapLoader, plan_batches
from tests.helpers.loaders import Made, micro_batches

CPU = torch.device("cpu")
SIZE = 12
# torch's DataLoader sets a handler for SIGCHLD when it first starts workers.
pytestmark = pytest.mark.usefixtures("own_state")
IN_PROCESS = LoaderOptions(num_workers=0)
ONE_WORKER = LoaderOptions(num_workers=1)


def loader(dataset: Any, options: LoaderOptions = IN_PROCESS, *, seed: int = 5, **how: Any) -> MapLoader:
    plan = plan_batches(batch_size=4, global_batch_size=None, world_size=1, accumulate=1)
    return MapLoader(dataset, split="train", plan=plan, rank=0, device=CPU, options=options, seed=seed, **how)


def loaded(loading: MapLoader, epoch: int = 0, start: int = 0) -> list[Any]:
    try:
        return [micro.batch for micro in micro_batches(loading, epoch, start)]
    finally:
        loading.close()


SYSTEM = random.SystemRandom()
COUNT = itertools.count()


def unseeded(batch: list[Tensor], _: Any) -> list[Tensor]:
    return [batch[0] + torch.rand(())]


def unseeded_collate(samples: list[Any]) -> Any:
    return torch.full((len(samples),), SYSTEM.random())


@pytest.mark.parametrize("options", [IN_PROCESS, ONE_WORKER], ids=["in process", "worker"])
@pytest.mark.parametrize(
    ("dataset", "collate_fn", "said"),
    [
        (Subset(Made(lambda _: SYSTEM.random(), SIZE), range(8)), None, "a Subset of Made, can't be repeated: sample"),
        (Made(lambda i: {"x": i, "y": [0, next(COUNT)]}, SIZE), None, "at ['y'][1], differs"),
        (Made(lambda _: np.random.default_rng().random(3), SIZE), None, "differs when it is loaded twice"),
        (TensorSamples(torch.zeros(SIZE, 2), transform=unseeded), None, "a TensorSamples, can't be repeated: what its"),
        (Made(float, SIZE), unseeded_collate, "the batch that its collate function makes"),
        (Made(lambda i: i + random.random(), SIZE), None, None),
        (Made(lambda i: {"x": torch.full((2,), np.nan), "name": f"{i}", "none": i}, SIZE), None, None),
        (TensorDataset(torch.zeros(SIZE, 2)), None, None),
    ],
    ids=["system", "counted", "new", "batches", "collate", "seeded", "fixed", "tensors"],
)
def test_data_that_cannot_be_repeated_is_named(capfd, options, dataset, collate_fn, said):
    loaded(loader(dataset, LoaderOptions(options.kind, options.num_workers, collate_fn=collate_fn)))
    shown = capfd.readouterr().out
    assert shown.count("can't be repeated") == int(said is not None)
    assert (said or "") in shown


class Counting(Dataset[Tensor]):
    """Counts, opens something when it is first used, and keeps a generator."""

    def __init__(self) -> None:
        self.number = 0
        self.seen: list[int] = []
        self.opened: object = None
        self.by_index: dict[int, int] = {}
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        self.number += 1
        self.seen.append(index)
        self.opened = object()
        self.by_index[index] = self.by_index.get(index, 0) + 1
        return torch.tensor(self.generator.random())


@pytest.mark.parametrize("value", [0, 5.5], ids=["int", "float"])
def test_a_single_element_of_a_column_is_looked_at(value):
    column = torch.full((SIZE, 3), value)[:1, 1]
    batches = loaded(loader(Made(lambda _: column, SIZE)))
    assert torch.equal(torch.cat(batches), column.expand(SIZE, 1))


def test_the_check_leaves_no_trace():
    dataset = Counting()
    state = dataset.generator.bit_generator.state
    before = torch.get_rng_state(), random.getstate()
    batches: Any = loader(dataset).epoch(0)
    window = next(batches)
    assert dataset.number == 0
    assert dataset.seen == []
    assert dataset.opened is None
    assert dataset.by_index == {}
    assert dataset.generator.bit_generator.state == state
    next(window.micro_batches)
    assert dataset.number == len(dataset.seen) == 4
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


class FailsOnce:
    """Raises when it is first called, as a disk may that is slow to wake up."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, value: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise ValueError("bad disk")
        return value


@pytest.mark.parametrize("options", [IN_PROCESS, ONE_WORKER], ids=["in process", "worker"])
def test_a_sample_that_fails_once_ends_the_run(options):
    loading = loader(Made(FailsOnce(), SIZE), options)
    said = r"(?s)\ASample 0 of the train dataset raised ValueError: bad disk\n.*in __call__: raise ValueError"
    with pytest.raises(RunError, match=said):
        next(loading.epoch(0))
    loading.close()


def test_a_batch_transform_that_fails_once_ends_the_run():
    fails = FailsOnce()
    samples = TensorSamples(torch.zeros(SIZE, 2), transform=lambda batch, _: fails(batch))
    with pytest.raises(ValueError, match="bad disk"):
        loaded(loader(samples))


def two_rows(samples: list[Any]) -> Any:
    return torch.tensor(samples).view(2, 3)


@pytest.mark.parametrize("options", [IN_PROCESS, ONE_WORKER], ids=["in process", "worker"])
def test_a_collate_function_may_refuse_four_samples(capfd, options):
    plan = plan_batches(batch_size=6, global_batch_size=None, world_size=1, accumulate=1)
    options = LoaderOptions(options.kind, options.num_workers, collate_fn=two_rows)
    loading = MapLoader(Made(float, SIZE), split="train", plan=plan, rank=0, device=CPU, options=options)
    assert [batch.shape for batch in loaded(loading)] == [(2, 3), (2, 3)]
    shown = capfd.readouterr().out
    assert shown.count("Whether the batches of the train dataset can be repeated was not checked") == 1
    assert "The collate function, given samples [0, 1, 2, 3] of the train dataset, raised RuntimeError: shape" in shown
    assert loading.identity.sketch is not None


# The data of a resumed run


def plain(index: int) -> Any:
    return {"x": torch.full((3,), float(index)), "label": index % 3, "name": f"file {index}"}


def drawn(index: int) -> Tensor:
    return torch.rand(2) + index


class Staged(Made):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return float(index + self.epoch)


def saved(loading: MapLoader, epoch: int = 0) -> DataIdentity:
    loaded(loading, epoch)
    return DataIdentity.load(loading.identity.state_dict())


ROWS = torch.arange(24.0).view(SIZE, 2)
SAME: dict[str, tuple[Any, Any]] = {
    "rows": (TensorDataset(ROWS, ROWS[:, 0].long()), TensorDataset(ROWS + 1e-6, ROWS[:, 0].long())),
    "samples": (Made(plain, SIZE), Made(plain, SIZE)),
    "random": (Made(drawn, SIZE), Made(lambda index: torch.rand(3) - index, SIZE)),
    "staged": (Staged(plain, SIZE), Staged(plain, SIZE)),
    "transformed": (
        TensorSamples(ROWS, transform=lambda batch, _: [batch[0] + 1]),
        TensorSamples(ROWS, transform=lambda batch, _: [batch[0] + 2]),
    ),
}


@pytest.mark.parametrize("kind", SAME)
@pytest.mark.parametrize("options", [IN_PROCESS, ONE_WORKER], ids=["in process", "worker"])
def test_a_resumed_epoch_takes_the_same_data(kind, options):
    """Loading in another way, a limit, and a resume in a later epoch than the first change nothing."""
    first, second = SAME[kind]
    identity = saved(loader(first, shuffle=True), epoch=2)
    resumed = loader(second, options, shuffle=True, limit=2)
    resumed.load_identity(identity, samples=4)
    assert len(loaded(resumed, 2, start=4)) == 1


def renamed(index: int) -> Any:
    return {**plain(index), "name": f"file {index + 1}"}


@dataclass(frozen=True, kw_only=True)
class OtherData:
    """The data of a checkpoint, the data that a run resumes with, and why that is refused."""

    first: Any
    second: Any
    # Of the second loader.
    changes: dict[str, Any] = field(default_factory=dict)
    says: str


OTHERS = {
    "grown": OtherData(first=Made(plain, SIZE), second=Made(plain, 13), says="13 samples, and was 12 samples"),
    "shrunk": OtherData(first=Made(plain, SIZE), second=Made(plain, 8), says="8 samples, and was 12 samples"),
    "seed": OtherData(first=Made(plain, SIZE), second=Made(plain, SIZE), changes={"seed": 6}, says="another order"),
    "not shuffled": OtherData(
        first=Made(plain, SIZE), second=Made(plain, SIZE), changes={"shuffle": False}, says="another order"
    ),
    "rows": OtherData(
        first=TensorDataset(ROWS), second=TensorDataset(ROWS.flip(0)), says="Rows of the train dataset are others"
    ),
    "labels": OtherData(
        first=TensorDataset(ROWS.long()), second=TensorDataset(ROWS.long() + 1), says="Rows of the train dataset"
    ),
    "renamed": OtherData(
        first=Made(plain, SIZE),
        second=Made(renamed, SIZE),
        says=r"Samples \d+, \d+, \d+, \d+ of the train dataset are others",
    ),
    "floats": OtherData(first=Made(float, SIZE), second=Made(lambda index: index + 1.0, SIZE), says="Samples"),
    "another kind": OtherData(first=Made(plain, SIZE), second=Made(lambda index: (index,), SIZE), says="are others"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_data_within_an_epoch_is_refused(kind):
    case = OTHERS[kind]
    identity = saved(loader(case.first, shuffle=True))

    def resume(samples: int) -> None:
        resumed = loader(case.second, **{"shuffle": True, **case.changes})
        resumed.load_identity(identity, samples=samples)
        next(iter(resumed.epoch(0 if samples else 1, start=samples)))

    with pytest.raises(CheckpointError, match=f"(?s){case.says}.*init_from=CHECKPOINT"):
        resume(4)
    resume(0)

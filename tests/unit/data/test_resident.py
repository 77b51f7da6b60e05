"""Data that is kept in memory: where `auto` keeps it, what can't be kept, and `TensorSamples`."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

from framework import TensorSamples
from framework.errors import DataError
from tests.helpers.internals import (
    DEVICE_SHARE,
    LoadedBatches,
    LoaderKind,
    LoaderOptions,
    available_memory,
    batch_source,
    loader_module,
)
from tests.helpers.loaders import Made, eval_loader

CPU = torch.device("cpu")
META = torch.device("meta")
RESIDENT: LoaderKind = "resident"
DATALOADER: LoaderKind = "dataloader"
X = torch.arange(40.0).view(10, 4)
LABEL = torch.arange(10)
TENSORS = TensorDataset(torch.zeros(10, 100))
JOINED: Any = ConcatDataset([TENSORS, TENSORS])
GENERATOR = torch.Generator()


OWN = Made(lambda i: torch.full((100,), float(i)), 10)


@pytest.fixture(autouse=True)
def _sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "threads_per_process", lambda procs: 16 // procs)


def chosen(dataset: Any, device: torch.device = CPU, **asked: Any) -> TensorSamples | int:
    """Return what is kept in memory, or the number of loader processes."""
    source = batch_source(dataset, split="val", seed=0, device=device, options=LoaderOptions(**asked))
    return source.num_workers if isinstance(source, LoadedBatches) else source.samples


@dataclass(frozen=True, kw_only=True)
class Loading:
    """Data, what was asked for, and how it is loaded: by `workers` processes, or from memory."""

    dataset: Any
    asked: dict[str, Any] = field(default_factory=dict)
    workers: int | None = None
    said: str = "resident"


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    "case",
    [
        Loading(dataset=TENSORS, said="resident in the memory of cpu (4.00 kB)"),
        Loading(dataset=TENSORS, asked={"num_workers": 0}),
        Loading(dataset=OWN, asked={"kind": RESIDENT}),
        Loading(dataset=OWN, workers=8, said="loaded by 8 worker process(es)"),
        Loading(dataset=JOINED, workers=8, said="loaded by 8 worker process(es)"),
        Loading(dataset=JOINED, asked={"kind": RESIDENT}),
        Loading(dataset=OWN, asked={"procs_on_node": 4}, workers=3, said="worker process(es)"),
        Loading(dataset=OWN, asked={"procs_on_node": 4, "procs_on_cores": 2}, workers=7, said="worker process(es)"),
        Loading(dataset=OWN, asked={"procs_on_node": 16}, workers=0, said="in this process"),
        Loading(dataset=OWN, asked={"num_workers": 0}, workers=0, said="in this process"),
        Loading(dataset=TENSORS, asked={"num_workers": 2}, workers=2, said="loaded by 2"),
        Loading(dataset=TENSORS, asked={"kind": DATALOADER}, workers=8, said="loaded by 8"),
        Loading(dataset=TENSORS, asked={"kind": DATALOADER, "num_workers": 0}, workers=0, said="in this process"),
    ],
)
def test_data_is_resident_or_loaded_by_workers(caplog, case: Loading):
    """Tensors stay where they are; what may change from epoch to epoch is loaded; what was asked for is done."""
    with caplog.at_level("INFO", "framework"):
        found = chosen(case.dataset, logs=True, **case.asked)
    assert case.said in caplog.text
    assert (None if isinstance(found, TensorSamples) else found) == case.workers
    if isinstance(found, TensorSamples) and case.dataset is TENSORS:
        assert found.tensors[0].data_ptr() == TENSORS.tensors[0].data_ptr()


def test_data_that_does_not_fit_is_refused(monkeypatch):
    """What has to be resident may take all that is available: here 4,000 bytes."""
    monkeypatch.setattr(loader_module, "available_memory", lambda: 4000)
    assert isinstance(chosen(OWN, kind=RESIDENT), TensorSamples)
    with pytest.raises(DataError, match=r"val dataset can't be resident(.|\n)*data.loader=dataloader"):
        chosen(OWN, kind=RESIDENT, procs_on_node=2)
    # On macOS, the memory isn't known.
    monkeypatch.setattr(loader_module, "available_memory", lambda: None)
    assert isinstance(chosen(OWN, kind=RESIDENT, procs_on_node=100), TensorSamples)


class Device:
    """A device module: all of a device is free, but for what this process has taken."""

    def __init__(self, free: int, kept: int = 0) -> None:
        self.free = free
        self.kept = kept
        self.taken = 0

    def mem_get_info(self, _: Any) -> tuple[int, int]:
        return self.free - self.memory_reserved(_), self.free

    def memory_reserved(self, _: Any) -> int:
        return self.taken + self.kept

    def memory_allocated(self, _: Any) -> int:
        return self.taken


def test_data_is_resident_while_its_share_lasts(monkeypatch):
    device = Device(4000 * 2 * int(1 / DEVICE_SHARE) + 1000, kept=100)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    where = []
    for _ in range(3):
        rows = chosen(TENSORS, META)
        assert isinstance(rows, TensorSamples)
        assert len(rows) == 10
        where.append(rows.device)
        device.taken += rows.size_bytes if rows.device == META else 0
    assert where == [META, META, CPU]
    device.taken = 0
    shared = chosen(TENSORS, META, procs_on_device=3)
    assert isinstance(shared, TensorSamples)
    assert shared.device == CPU


def test_only_rows_of_samples_become_resident(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda _: Device(10_000))
    rows = chosen(TensorSamples(X, LABEL, rows=torch.tensor([1, 2])), META)
    assert isinstance(rows, TensorSamples)
    assert [tensor.shape for tensor in rows.tensors] == [(2, 4), (2,)]


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({"proc/meminfo": "MemTotal: 2000 kB\nMemAvailable:    800 kB\n"}, 800 * 1024),
        (
            {
                "proc/meminfo": "MemAvailable: 800 kB\n",
                "proc/self/cgroup": "1:cpu:/a\n0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": "300000",
                "sys/fs/cgroup/a/memory.current": "200000",
                "sys/fs/cgroup/a/memory.stat": "inactive_file 50000\n",
            },
            150_000,
        ),
        ({}, None),
    ],
    ids=["host", "control group", "unknown"],
)
def test_memory_respects_control_groups(tmp_path, files, available):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_memory(tmp_path) == available


# What can't be kept


def numpy_state() -> list[int]:
    state = np.random.get_state(legacy=False)["state"]
    return [*state["key"].tolist(), state["pos"]]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda i: random.random() if i == 270 else 0.0, "it draws random numbers"),
        (lambda i: np.random.rand() if i == 270 else 0.0, "it draws random numbers"),
        (lambda _: torch.rand(1), "it draws random numbers"),
        (lambda _: torch.rand(2, generator=GENERATOR), "its first sample isn't the same"),
        (lambda i: torch.rand(2, generator=GENERATOR) if i == 270 else torch.zeros(2), "from a generator of its own"),
        (lambda i: torch.zeros(2 if i < 256 else 3), "sample 256 differs"),
        (lambda i: (i, "name"), "holds str"),
    ],
)
def test_samples_that_cannot_be_kept_are_named(make, words):
    before = random.getstate(), torch.get_rng_state().tolist(), numpy_state()
    with pytest.raises(
        DataError, match=rf"The val dataset can't be resident: .*{words}(.|\n)*Use data.loader=dataloader"
    ):
        chosen(Made(make, 300), kind=RESIDENT)
    assert (random.getstate(), torch.get_rng_state().tolist(), numpy_state()) == before


@pytest.mark.usefixtures("own_state")
def test_torchvision_data_equal_a_plain_loop():
    """Decoded once, or refused if a transform is random."""
    from torchvision import transforms as v1
    from torchvision.datasets import FakeData
    from torchvision.transforms import v2

    normal = ([0.4, 0.5, 0.6], [0.2, 0.3, 0.1])
    for transform in (
        v1.ToTensor(),
        v1.Compose([v1.Resize(6), v1.CenterCrop(5), v1.Grayscale(), v1.ToTensor()]),
        v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(*normal)]),
    ):
        whole: Any = FakeData(12, (3, 8, 10), 4, transform=transform)
        datasets: list[Any] = [whole, Subset(whole, [11, 3, 4, 8]), ConcatDataset([whole, whole])]
        for dataset in datasets:
            loader = eval_loader(dataset, batch_size=3, options=LoaderOptions(RESIDENT))
            assert isinstance(chosen(dataset, kind=RESIDENT), TensorSamples)
            for number, micro in enumerate(loader):
                indices = range(3 * number, min(3 * number + 3, len(dataset)))
                wanted = default_collate([dataset[index] for index in indices])
                assert all(torch.equal(one, other) for one, other in zip(micro.batch, wanted, strict=True))
    for random_one in (v1.Compose([v1.RandomCrop(4), v1.ToTensor()]), v1.Compose([v1.ToTensor(), v1.RandomErasing()])):
        with pytest.raises(DataError, match="draws random numbers"):
            chosen(FakeData(12, (3, 8, 10), 4, transform=random_one), kind=RESIDENT)


# TensorSamples


def test_a_sample_is_its_row_transformed():
    samples = TensorSamples(X, LABEL, rows=torch.tensor([8, 3, 5]), transform=lambda b, _: [2 * b[0], b[1]])
    assert len(samples) == 3
    x, label = samples[1]
    assert (x.tolist(), int(label), int(samples[-1][1])) == ((2 * X[3]).tolist(), 3, 5)
    for index in (3, -4):
        with pytest.raises(IndexError, match="out of range"):
            samples[index]


def test_a_single_sample_draws_from_torchs_generator(own_state):
    samples = TensorSamples(X, transform=lambda b, draws: [b[0] + draws.uniform(4)])
    torch.manual_seed(1)
    first = samples[0][0]
    second = samples[0][0]
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(samples[0][0], first)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TensorSamples(), "it got none"),
        (lambda: TensorSamples(X, LABEL[:4]), "it got 10, 4"),
        (lambda numbers=[1, 2]: TensorSamples(numbers), "torch.as_tensor"),
        *(
            (lambda wrong=wrong: TensorSamples(X, LABEL, transform=wrong)[1], "first dimension is the sample")
            for wrong in (lambda b, _: [b[0][:0], b[1]], lambda b, _: b[0], lambda *_: ["x"])
        ),
    ],
)
def test_tensors_and_transforms_must_match(make, words):
    with pytest.raises(DataError, match=words):
        make()

"""Streams of libraries, as docs/streams.md shows them: killed at a random step and resumed, on one process and two."""

from __future__ import annotations

import multiprocessing
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.helpers import results
from tests.helpers.source import ROOT
from tests.unit.streams import make_loader

PRELOADED = ("datasets",)
Train = Callable[..., Path]

BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/streams.md").read_text(), re.MULTILINE | re.DOTALL)
TAR_SIZES = (9, 4, 7, 6)


def shown(name: str) -> str:
    """Return the block of the documentation that defines a class."""
    (block,) = (text for text in BLOCKS if f"class {name}" in text)
    return str(block)


OWN = """
import os
import random
import signal
from pathlib import Path

from framework import Datasets, Mix, StepOutput

{tars}

class Numbers(Tars):
    def __iter__(self):
        for sample in super().__iter__():
            yield {{"x": sample["x.json"]["x"] + torch.rand(())}}

    def shard(self, num_shards, index):
        return Numbers(self.urls[index::num_shards])

def table(first, size):
    import datasets
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({{"x": [float(first + number) for number in range(size)]}})
    return rows.to_iterable_dataset(num_shards=4).with_format("torch")

def data(kind):
    tars = Numbers(sorted(map(str, Path("tars").iterdir())))
    if kind == "states":
        return Datasets(Mix([tars, table(1000, 30)], weights=[1, 2], at_end="restart"))
    if kind == "buffer":
        return Datasets(Mix([tars, table(1000, 40).shuffle(seed=3, buffer_size=9)]))
    urls = sorted(map(str, Path("tars").iterdir()))
    pipeline = webdataset.WebDataset(urls, shardshuffle=False, nodesplitter=None)
    pipeline = pipeline.shuffle(5, rng=random.Random(0)).decode()
    return Datasets(pipeline.map(lambda sample: {{"x": sample["x.json"]["x"] + torch.rand(())}}))

class Task:
    steps = 0

    def training_step(self, model, batch):
        self.steps += 1
        if self.steps == int(os.environ.get("KILL_AT", 0)) and os.environ.get("RANK", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        x = batch["x"].float()[:, None] / 1000
        return StepOutput((model(x) - x.sin()).square().mean(), len(x))

    validation_step = training_step

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
"""
COMMON = (
    "recipe=toy",
    "model._target_=own.model",
    "task._target_=own.Task",
    "~task.loss",
    "~task.metrics",
    "data.datasets._target_=own.data",
    "~data.datasets.num_samples",
    "~data.datasets.seed",
    "data.shuffle=false",
    "data.global_batch_size=4",
    "trainer.max_epochs=2",
    "checkpoint.every_n_steps=1",
    "checkpoint.monitor=null",
    "logger=none",
    "trainer.num_threads=1",
)


@pytest.fixture
def tars(tmp_path: Path) -> list[str]:
    webdataset = pytest.importorskip("webdataset")
    folder = tmp_path / "tars"
    folder.mkdir()
    urls = []
    for tar, size in enumerate(TAR_SIZES):
        urls.append(str(folder / f"{tar}.tar"))
        with webdataset.TarWriter(urls[-1]) as writer:
            for number in range(size):
                writer.write({"__key__": f"{tar}_{number}", "x.json": {"x": tar * 100 + number}})
    return urls


class Layout(NamedTuple):
    """How many processes and workers read, and how they share the stream."""

    processes: int
    workers: int
    stream: str = "shared"


@pytest.mark.multiproc
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("tars")
@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("states", [Layout(1, 2), Layout(2, 2), Layout(2, 2, "join")]),
        ("buffer", [Layout(1, 0), Layout(2, 0), Layout(2, 0, "join")]),
        pytest.param("tars", [Layout(1, 2), Layout(2, 2), Layout(2, 0)], marks=pytest.mark.exhaustive),
        pytest.param("states", [Layout(1, 0), Layout(2, 0)], marks=pytest.mark.exhaustive),
        pytest.param("buffer", [Layout(1, 2), Layout(2, 2)], marks=pytest.mark.exhaustive),
    ],
)
def test_killed_runs_resume_bit_for_bit(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, layouts: list[Layout]
) -> None:
    """Shared streams also give the same numbers on one process and on two."""
    pytest.importorskip("datasets")
    (tmp_path / "own.py").write_text(OWN.format(tars=shown("Tars")))
    shared = []
    for layout in layouts:
        options = (
            *COMMON,
            f"+data.datasets.kind={kind}",
            f"topology.procs_per_node={layout.processes}",
            f"data.num_workers={layout.workers}",
            f"data.stream={layout.stream}",
        )
        whole = train(*options)
        steps = results.results(whole)["steps"]
        assert steps > 10

        monkeypatch.setenv("KILL_AT", str(random.randint(2, steps)))
        killed = train(*options, status=1)
        monkeypatch.delenv("KILL_AT")
        train(f"resume={killed}")
        assert results.results(killed)["steps"] == steps
        results.assert_same(results.weights(killed), results.weights(whole))
        if layout == Layout(1, layout.workers) or layout == Layout(2, layouts[0].workers):
            shared.append(results.weights(whole))
    one, two = shared
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0.0, atol=1e-6)


# What the documentation shows, in one process


@pytest.fixture
def chunks(tmp_path: Path) -> str:
    streaming = pytest.importorskip("litdata.streaming", exc_type=ImportError)
    folder = tmp_path / "chunks"
    cache = streaming.Cache(str(folder), chunk_size=6)
    for number in range(40):
        cache[number] = {"x": number}
    cache.done()
    cache.merge()
    return str(folder)


def defined(name: str) -> Any:
    """Return a class that the documentation shows."""
    namespace: dict[str, Any] = {}
    exec(shown(name), namespace)
    return namespace[name]


def read(dataset: Any, num_workers: int, checkpoint: Any = None) -> Iterator[tuple[list[Any], Any]]:
    """Yield each window's batches, and the checkpoint after it."""
    loader = make_loader(dataset, num_workers=num_workers, batch_size=3)
    taken = 0
    if checkpoint is not None:
        state, taken = checkpoint
        loader.load_state_dict([state], samples=taken)
    for window in loader.epoch(1, taken):
        batches = [micro.batch for micro in window.micro_batches]
        taken += window.global_count
        yield batches, (loader.state_dict(), taken)
    loader.close()


def check(make: Callable[[], Any], numbers: list[int], of: Callable[[Any], Any], *, num_workers: int) -> None:
    """Check that each sample is read once, and that a run resumes after any step."""
    windows = list(read(make(), num_workers))
    seen: list[int] = []
    for batches, _ in windows:
        for batch in batches:
            seen += of(batch).tolist()
    assert sorted(seen) == numbers
    for step, (_, checkpoint) in enumerate(windows[:-1]):
        rest = [batches for batches, _ in read(make(), num_workers, checkpoint)]
        assert repr(rest) == repr([batches for batches, _ in windows[step + 1 :]])


@pytest.mark.usefixtures("own_state")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_tar_files_resume_by_file_and_offset(tars: list[str], num_workers: int) -> None:
    numbers = [tar * 100 + number for tar, size in enumerate(TAR_SIZES) for number in range(size)]
    check(lambda: defined("Tars")(tars), numbers, lambda batch: batch["x.json"]["x"], num_workers=num_workers)


def check_chunks(chunks: str) -> None:
    litdata = pytest.importorskip("litdata")
    numbers = list(range(40))
    check(lambda: defined("Chunks")(chunks), numbers, lambda batch: batch["x"], num_workers=0)
    check(lambda: litdata.StreamingDataset(chunks, shuffle=True), numbers, lambda batch: batch["x"], num_workers=0)
    rows = defined("Rows")(chunks)
    assert [rows[number]["x"] for number in range(len(rows))] == numbers


def test_chunks_resume_by_their_state_or_are_read_again(chunks: str) -> None:
    """In a process of its own, since LitData keeps files open."""
    process = multiprocessing.get_context("fork").Process(target=check_chunks, args=(chunks,))
    process.start()
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.usefixtures("own_state")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_tables_resume_with_and_without_a_buffer(num_workers: int) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"x": list(range(40))}).to_iterable_dataset(num_shards=4)
    for make in (lambda: table, lambda: table.shuffle(seed=3, buffer_size=7)):
        check(make, list(range(40)), lambda batch: batch["x"], num_workers=num_workers)


@pytest.mark.usefixtures("own_state")
def test_the_files_of_the_documentation_resume(tmp_path: Path) -> None:
    files = []
    for number in range(11):
        files.append(str(tmp_path / f"{number}.pt"))
        torch.save(torch.tensor(number), files[-1])
    check(lambda: defined("Files")(files), list(range(11)), lambda batch: batch, num_workers=2)

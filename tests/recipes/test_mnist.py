"""MNIST: the real files as anyone would read them, a short training, and faults of the files in one error."""

from __future__ import annotations

import gc
import gzip
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from framework import ConfigError, Datasets
from recipes.mnist import mnist
from tests.helpers import results

IMAGES = "{}-images-idx3-ubyte.gz"
LABELS = "{}-labels-idx1-ubyte.gz"


def file_of(root: Path, name: str) -> Path:
    (path,) = root.rglob(name)
    return path


def read(root: Path, part: str) -> tuple[Tensor, Tensor]:
    """The format in three lines: https://yann.lecun.org/exdb/mnist."""
    images, labels = (gzip.decompress(file_of(root, name.format(part)).read_bytes()) for name in (IMAGES, LABELS))
    pixels = torch.frombuffer(bytearray(images[16:]), dtype=torch.uint8).view(-1, 1, 28, 28)
    return pixels, torch.frombuffer(bytearray(labels[8:]), dtype=torch.uint8).long()


@pytest.fixture(scope="module")
def data(data_root: Path) -> Datasets:
    return mnist(str(data_root), mirrors=[])


def samples(part: Any, indices: range) -> tuple[Tensor, Tensor]:
    images, labels = zip(*(part[index] for index in indices), strict=True)
    return torch.stack(images), torch.stack([torch.as_tensor(label) for label in labels])


def test_the_parts_are_the_normalised_files_exactly(data: Datasets, data_root: Path) -> None:
    pixels, labels = read(data_root, "train")
    order = torch.randperm(60_000, generator=torch.Generator().manual_seed(0))
    for part, rows in ((data.train, order[5000:]), (data.val, order[:5000])):
        assert len(part) == len(rows)  # type: ignore[arg-type]
        few = range(0, len(rows), 97)
        images, found = samples(part, few)
        assert torch.equal(images, pixels[rows[few]].float().div_(255).sub_(0.1307).div_(0.3081))
        assert torch.equal(found, labels[rows[few]])
    images, found = samples(data.test, range(10_000))
    pixels, labels = read(data_root, "t10k")
    assert torch.equal(images, pixels.float().div_(255).sub_(0.1307).div_(0.3081))
    assert torch.equal(found, labels)
    assert found[0] == 7


def test_its_seed_holds_out_the_validation_part(data: Datasets, data_root: Path) -> None:
    before = torch.get_rng_state()
    again = mnist(str(data_root), mirrors=[])
    other = mnist(str(data_root), mirrors=[], val_size=4000, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    first = range(100)
    assert torch.equal(samples(again.val, first)[0], samples(data.val, first)[0])
    assert not torch.equal(samples(other.val, first)[1], samples(data.val, first)[1])
    assert [len(part) for part in other] == [56_000, 4000, 10_000]
    assert mnist(str(data_root), mirrors=[], val_size=0).val is None
    for val_size in (-1, 60_000):
        with pytest.raises(ConfigError, match=rf"val_size={val_size}: must be from 0 to 59999"):
            mnist(str(data_root), mirrors=[], val_size=val_size)


def test_augmentation_is_for_training_alone(data: Datasets, data_root: Path, own_state: None) -> None:
    changed = mnist(str(data_root), mirrors=[], augment=lambda images, _: images.flip(-1))
    first = range(3)
    assert torch.equal(samples(changed.train, first)[0], samples(data.train, first)[0].flip(-1))
    for part in ("val", "test"):
        assert torch.equal(samples(getattr(changed, part), first)[0], samples(getattr(data, part), first)[0])


@pytest.mark.exhaustive
@pytest.mark.multiproc
@pytest.mark.usefixtures("own_state")
def test_a_short_training_learns_on_two_processes(train, data_root: Path) -> None:
    run_dir = train(
        "recipe=mnist",
        f"data.root={data_root}",
        "logger=jsonl",
        "topology.procs_per_node=2",
        "data.global_batch_size=32",
        "optimizer.lr=0.05",
        "optimizer.momentum=0.9",
        "trainer.max_epochs=1",
        "trainer.limit_train_batches=100",
        "trainer.limit_val_batches=1",
        "trainer.limit_test_batches=1",
    )
    found = results.results(run_dir)
    assert found["steps"] == 100
    assert found["last"]["metrics"]["val/accuracy"] > 0.8
    assert found["test"]["metrics"]["test/accuracy"] > 0.8


def test_packed_and_unpacked_files_stay_unchanged(data: Datasets, data_root: Path, tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for number, path in enumerate(sorted(file_of(data_root, IMAGES.format("train")).parent.glob("*.gz"))):
        if number % 2:
            shutil.copy(path, raw)
        else:
            (raw / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    names = set(raw.iterdir())
    mixed = mnist(str(tmp_path), mirrors=[])
    assert set(raw.iterdir()) == names
    for part in ("train", "test"):
        one, other = (samples(getattr(each, part), range(50)) for each in (mixed, data))
        assert all(map(torch.equal, one, other))


# torchvision doesn't close the answer of a mirror that lacks the file.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.usefixtures("own_state")
def test_missing_files_are_downloaded_once(data: Datasets, data_root: Path, tmp_path: Path, monkeypatch) -> None:
    """One of the processes that need them downloads them; a damaged file is replaced."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    source = file_of(data_root, IMAGES.format("train")).parent
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    (raw / LABELS.format("train")).write_bytes(b"damaged")
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            with suppress(ConnectionError):
                # torchvision looks for a redirect first, and doesn't read on.
                super().do_GET()

        def log_message(self, *arguments: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(source))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        mirrors = [f"http://127.0.0.1:{server.server_port}/none", f"http://127.0.0.1:{server.server_port}"]
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda _: mnist(str(tmp_path), mirrors=mirrors), range(3)))
        server.shutdown()
        thread.join()
    gc.collect()
    assert asked.count(f"/{IMAGES.format('train')}") == 2
    assert {path.name for path in raw.glob("*.gz")} == {path.name for path in source.glob("*.gz")}
    for each in found:
        assert all(map(torch.equal, samples(each.test, range(50)), samples(data.test, range(50))))


@pytest.mark.multiproc
@pytest.mark.usefixtures("own_state")
@pytest.mark.parametrize("fault", ["damaged", "missing"])
def test_a_bad_file_ends_all_ranks_once(train, fault: str, data_root: Path, tmp_path: Path, capfd) -> None:
    raw = tmp_path / "my data" / "MNIST" / "raw"
    name = IMAGES.format("train")
    if fault == "damaged":
        shutil.copytree(file_of(data_root, name).parent, raw)
        raw.chmod(0o755)
        (raw / name).chmod(0o644)
        (raw / name).write_bytes((raw / name).read_bytes()[:-100])
    train("recipe=mnist", "data.root=my data", "data.mirrors=[]", "topology.procs_per_node=2", status=2)
    said = capfd.readouterr().err
    assert said.count(f"{name} is {fault}") == 1
    assert "Traceback" not in said
    assert all(word in said for word in (str(raw), "data.root", "data.mirrors=[URL]", "recipe=digits"))

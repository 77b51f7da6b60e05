"""MNIST: the real files where they are, against torchvision's own reader; and what is said where they aren't right."""

from __future__ import annotations

import gzip
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from framework import ConfigError, DataError, Datasets
from recipes.mnist import RESOURCES, mnist, mnist_files, read_idx
from tests.helpers import results
from tests.helpers.command import run_framework

ROOT = Path(__file__).parents[2]
FIRST = "train-images-idx3-ubyte.gz"


@pytest.fixture(scope="module")
def data(data_root: Path) -> Datasets:
    return mnist(str(data_root))


def everything(part: Any) -> tuple[Tensor, Tensor]:
    """Images and labels of a part as one batch; random numbers have no say in it."""
    indices = torch.arange(len(part))
    rows = indices if part.rows is None else part.rows
    images, labels = part.transform([tensor[rows] for tensor in part.tensors], None)
    return images, labels


def test_names_and_checksums_are_torchvisions(own_state: None) -> None:
    from torchvision.datasets import MNIST

    assert [(resource.name, resource.md5) for resource in RESOURCES] == MNIST.resources


# The real files


def test_files_are_used_where_they_are(data_root: Path) -> None:
    raw = data_root / "MNIST" / "raw"
    before = {path: path.stat().st_mtime_ns for path in [raw, *raw.iterdir()]}
    assert mnist_files(str(data_root), mirrors=[]) == mnist_files(str(raw), mirrors=[])
    assert {path: path.stat().st_mtime_ns for path in [raw, *raw.iterdir()]} == before


def test_packed_and_unpacked_files_read_as_with_torchvision(data_root: Path, tmp_path: Path, own_state: None) -> None:
    from torchvision.datasets.mnist import read_image_file, read_label_file

    packed = mnist_files(str(data_root))
    for path in packed:
        with gzip.open(path) as source, (tmp_path / path.stem).open("wb") as target:
            shutil.copyfileobj(source, target)
    unpacked = mnist_files(str(tmp_path), mirrors=[])
    assert unpacked == [tmp_path / path.stem for path in packed]
    for one, other in zip(packed, unpacked, strict=True):
        theirs = (read_image_file if "images" in one.name else read_label_file)(str(other))
        assert torch.equal(read_idx(other), read_idx(one))
        assert torch.equal(read_idx(one).long(), theirs.long())


def test_the_parts(data: Datasets, data_root: Path) -> None:
    assert [len(part) for part in data if part is not None] == [55_000, 5_000, 10_000]  # type: ignore[arg-type]
    images, labels = everything(data.train)
    assert (images.shape, images.dtype) == ((55_000, 1, 28, 28), torch.float32)
    assert (labels.dtype, labels.unique().tolist()) == (torch.int64, list(range(10)))
    assert images.mean().item() == pytest.approx(0, abs=0.01)
    assert images.std().item() == pytest.approx(1, abs=0.01)
    # The test part is as it comes, and what is written on the first images is known.
    first = read_idx(mnist_files(str(data_root))[2])[0]
    image, label = data.test[0]  # type: ignore[index]
    assert label == 7
    torch.testing.assert_close(image[0], (first / 255 - 0.1307) / 0.3081)


def test_validation_is_held_out_of_training_by_a_seed_of_its_own(data: Datasets, data_root: Path) -> None:
    before = torch.get_rng_state()
    again, other = mnist(str(data_root)), mnist(str(data_root), val_size=4000, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(everything(again.val)[0], everything(data.val)[0])
    assert not torch.equal(everything(other.val)[1], everything(data.val)[1][:4000])
    every = read_idx(mnist_files(str(data_root))[1]).bincount()
    parts = [everything(part)[1].bincount() for part in (other.train, other.val)]
    assert torch.equal(parts[0] + parts[1], every)
    assert len(other.val) == 4000  # type: ignore[arg-type]


def test_images_are_normalised_bit_for_bit_as_they_were_one_by_one(data: Datasets, data_root: Path) -> None:
    order = torch.randperm(60_000, generator=torch.Generator().manual_seed(0))
    whole = read_idx(mnist_files(str(data_root))[0])[order[5000:]]
    plain = whole.unsqueeze(1).float().div_(255).sub_(0.1307).div_(0.3081)
    images, _ = everything(data.train)
    assert torch.equal(images, plain)
    assert torch.equal(data.train[17][0], plain[17])


def test_all_parts_are_bytes_of_the_same_file(data: Datasets) -> None:
    train, val, test = data
    assert train.tensors[0].data_ptr() == val.tensors[0].data_ptr()  # type: ignore[union-attr]
    assert {part.tensors[0].dtype for part in (train, val, test)} == {torch.uint8}  # type: ignore[union-attr]


KEPT = """
import sys
from recipes.mnist import mnist
data = mnist(sys.argv[1], mirrors=[])
assert len(data.train) == 55_000
print([name for name in ("torch", "torchvision") if name in sys.modules])
"""


def test_what_was_decoded_once_needs_neither_the_files_nor_torchvision(data_root: Path, tmp_path: Path) -> None:
    for path in mnist_files(str(data_root)):
        (tmp_path / path.name).symlink_to(path)
    first = everything(mnist(str(tmp_path), mirrors=[]).test)
    for path in tmp_path.glob("*.gz"):
        path.unlink()
    again = everything(mnist(str(tmp_path), mirrors=[]).test)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    found = subprocess.run(
        [sys.executable, "-c", KEPT, str(tmp_path)], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True
    )
    assert found.stdout == "['torch']\n"


@pytest.mark.parametrize("val_size", [-1, 60_000])
def test_a_validation_part_that_leaves_nothing_is_refused(data_root: Path, val_size: int) -> None:
    with pytest.raises(ConfigError, match=rf"val_size={val_size}: must be from 0 to 59999"):
        mnist(str(data_root), val_size=val_size)


def test_without_validation(data_root: Path) -> None:
    whole = mnist(str(data_root), val_size=0)
    assert (len(whole.train), whole.val) == (60_000, None)  # type: ignore[arg-type]


@pytest.mark.multiproc
@pytest.mark.usefixtures("own_state")
@pytest.mark.parametrize("procs", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_a_short_training_learns_on_one_and_on_two_processes(train, data_root: Path, procs: int) -> None:
    run_dir = train(
        *("recipe=mnist", f"data.root={data_root}", "logger=jsonl", f"topology.procs_per_node={procs}"),
        *("data.global_batch_size=32", "optimizer.lr=0.05", "optimizer.momentum=0.9", "trainer.max_epochs=1"),
        *("trainer.limit_train_batches=120", f"trainer.limit_val_batches={4 // procs}"),
        f"trainer.limit_test_batches={4 // procs}",
    )
    found = results.results(run_dir)
    assert found["steps"] == 120
    assert found["last"]["metrics"]["val/accuracy"] > 0.8
    assert found["test"]["metrics"]["test/accuracy"] > 0.8


# Files that are damaged or missing


def test_a_truncated_file_is_named(data_root: Path, tmp_path: Path) -> None:
    for path in mnist_files(str(data_root)):
        (tmp_path / path.name).symlink_to(path)
    bad = tmp_path / FIRST
    content = bad.read_bytes()
    bad.unlink()
    bad.write_bytes(content[:-1000])
    with pytest.raises(DataError) as caught:
        mnist(str(tmp_path), mirrors=[])
    assert str(caught.value).splitlines() == [
        f"{bad} is truncated: it has 9,911,422 bytes instead of 9,912,422.",
        "Put a good file there, or delete this one: then it is downloaded again.",
    ]


@pytest.mark.multiproc
def test_a_damaged_file_ends_all_ranks_with_one_answer(tmp_path: Path) -> None:
    raw = tmp_path / "my data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    bad = raw / FIRST
    with bad.open("wb") as file:
        file.truncate(9_912_422)
    result = run_framework(
        *("recipe=mnist", "data.root=my data", "data.mirrors=[]", "trainer.gpus=0", "topology.procs_per_node=2"),
        cwd=tmp_path,
    )
    assert result.returncode == 2, result.stderr
    lines = [line.strip() for line in result.stderr.splitlines()]
    assert sum(f"{bad} is damaged: its MD5 is" in line for line in lines) == 1
    assert "Put a good file there, or delete this one: then it is downloaded again." in lines
    assert "Traceback" not in result.stderr


def test_missing_files_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        mirror = f"http://127.0.0.1:{nobody.getsockname()[1]}/mnist/"
        result = run_framework("recipe=mnist", f"data.mirrors=[{mirror}]", "trainer.gpus=0", cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert result.stderr.splitlines()[:4] == [
        f"{FIRST} and 3 more can't be downloaded: tried {mirror}{FIRST} (Connection refused).",
        f"Put the files, packed or unpacked, into {tmp_path / 'data/MNIST/raw'}, "
        "or set data.root to the folder that has them.",
        "Or set data.mirrors=[URL] to another place to download from; the file's name is added to it.",
        "recipe=digits needs none of these files.",
    ]
    assert "Traceback" not in result.stderr


def test_torchvisions_mirrors_are_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_state: None) -> None:
    from torchvision.datasets import MNIST

    monkeypatch.setattr(MNIST, "mirrors", ["nowhere:/mirror/"])
    with pytest.raises(DataError, match=rf"tried nowhere:/mirror/{FIRST} \(unknown url type"):
        mnist(str(tmp_path))

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from framework import cached_tensors
from framework.data import cache


def made() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(256, (100, 1, 7, 5), generator=generator, dtype=torch.uint8),
        torch.randn(3, 2, generator=generator).T,
        torch.arange(5),
        torch.zeros(0, 4, dtype=torch.bfloat16),
        torch.tensor(2.5, dtype=torch.float64),
    ]


def refuse() -> list[Tensor]:
    raise AssertionError("it is there already")


def assert_equal(given: list[Tensor], wanted: list[Tensor]) -> None:
    assert [(one.dtype, one.shape) for one in given] == [(other.dtype, other.shape) for other in wanted]
    assert all(torch.equal(one, other) for one, other in zip(given, wanted, strict=True))


def test_what_was_made_once_is_mapped_afterwards(tmp_path):
    first = cached_tensors(tmp_path / "new", "some", key="1", make=made)
    again = cached_tensors(tmp_path / "new", "some", key="1", make=refuse)
    assert_equal(first, made())
    assert_equal(again, made())
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [".some.tensors.lock", "some.tensors"]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in again if tensor.numel())


def test_what_is_written_to_the_tensors_stays_in_the_process(tmp_path):
    first = cached_tensors(tmp_path, "some", key="1", make=made)
    first[0].zero_()
    assert_equal(cached_tensors(tmp_path, "some", key="1", make=refuse), made())


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:], "is damaged"),
        (lambda data: data[:-200], "is truncated"),
        (lambda data: b"\x00" + data[1:], "is damaged"),
        (lambda _: b"", "is damaged"),
        (lambda data: data.replace(b'"format": 2', b'"format": 0'), "was made from something else"),
        (lambda data: data.replace(b"int64", b"int65"), "is damaged"),
        (lambda data: data.replace(b'"shape"', b'"shapf"'), "is damaged"),
        (lambda data: data.replace(b'"offset"', b'"offses"'), "is damaged"),
    ],
)
def test_a_bad_file_is_made_anew_and_that_is_told(tmp_path, caplog, harm, words):
    cached_tensors(tmp_path, "some", key="1", make=made)
    file = tmp_path / "some.tensors"
    good = file.read_bytes()
    file.write_bytes(harm(good))
    with caplog.at_level(logging.WARNING, logger="framework"):
        assert_equal(cached_tensors(tmp_path, "some", key="1", make=made), made())
    assert [record.getMessage() for record in caplog.records] == [f"{file} {words}: it is made anew"]
    assert file.read_bytes() == good


def test_another_key_makes_it_anew(tmp_path, caplog):
    cached_tensors(tmp_path, "some", key="1", make=made)
    with caplog.at_level(logging.WARNING, logger="framework"):
        (other,) = cached_tensors(tmp_path, "some", key="2", make=lambda: [torch.ones(2)])
    assert other.tolist() == [1, 1]
    assert "was made from something else" in caplog.text


def test_what_making_raises_passes_and_leaves_no_file(tmp_path):
    def fail() -> list[Tensor]:
        raise ValueError("no such data")

    with pytest.raises(ValueError, match="no such data"):
        cached_tensors(tmp_path, "some", key="1", make=fail)
    assert not (tmp_path / "some.tensors").exists()


def test_a_folder_that_cannot_be_made_means_no_cache(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for _ in range(2):
        assert_equal(cached_tensors(tmp_path / "file" / "below", "some", key="1", make=made), made())


def test_a_disk_that_refuses_means_no_cache_and_that_is_told(tmp_path, caplog, monkeypatch):
    def full(_file: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with caplog.at_level(logging.WARNING, logger="framework"):
        assert_equal(cached_tensors(tmp_path, "some", key="1", make=made), made())
    assert "can't be kept: [Errno 28] No space left on device" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [".some.tensors.lock"]


def test_a_killed_process_leaves_nothing_for_good(tmp_path):
    left = tmp_path / ".some.tensors.123.tmp"
    left.write_bytes(b"half")
    cached_tensors(tmp_path, "some", key="1", make=made)
    assert not left.exists()


ONE_OF_SEVERAL = """
import sys, time
from pathlib import Path
import torch
from framework import cached_tensors

def make():
    Path(sys.argv[1], f"made_by_{sys.argv[2]}").touch()
    time.sleep(0.5)
    return [torch.arange(1000)]

(tensor,) = cached_tensors(Path(sys.argv[1]) / "kept", "some", key="1", make=make)
assert tensor.sum() == 499500
"""


@pytest.mark.multiproc
def test_one_of_several_processes_makes_it(tmp_path):
    root = Path(__file__).parents[3]
    several = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_OF_SEVERAL, str(tmp_path), str(number)],
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        for number in range(3)
    ]
    assert [process.wait(timeout=60) for process in several] == [0, 0, 0]
    assert len(list(tmp_path.glob("made_by_*"))) == 1


def test_who_waits_for_too_long_goes_on_without(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(cache, "_WAIT_S", 0.1)
    file = tmp_path / "some.tensors"
    with cache._held(file) as is_held, caplog.at_level(logging.WARNING, logger="framework"):
        assert is_held
        assert_equal(cached_tensors(tmp_path, "some", key="1", make=made), made())
    assert "this one goes on without" in caplog.text
    assert not file.exists()


def test_nothing_is_kept_where_that_is_forbidden(tmp_path, monkeypatch):
    def forbidden(event: str, *_: object) -> None:
        if event == "framework.keep":
            raise PermissionError("not here")

    monkeypatch.setattr(sys, "audit", forbidden)
    folder = tmp_path / "none"
    assert_equal(cached_tensors(folder, "some", key="1", make=made), made())
    assert not folder.exists()

from __future__ import annotations

import errno
import mmap
import os
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.checkpoint import files
from framework.checkpoint.files import BLOCK_BYTES, ChecksummedFile

CONTENT = os.urandom(3 << 20)


def aligned(content: bytes) -> memoryview:
    mapped = mmap.mmap(-1, max(len(content), 1))
    mapped.write(content)
    return memoryview(mapped)[: len(content)].toreadonly()


def write(path: Path, pieces: list[bytes | memoryview]) -> None:
    with ChecksummedFile(path) as file:
        for piece in pieces:
            assert file.write(piece) == len(piece)
        facts = file.finish()
    content = b"".join(bytes(piece) for piece in pieces)
    assert path.read_bytes() == content
    assert (facts.size_bytes, facts.crc32) == (len(content), f"{zlib.crc32(content):08x}")


SIZES = st.one_of(
    st.integers(0, 3 * BLOCK_BYTES), st.sampled_from([BLOCK_BYTES, 16 * BLOCK_BYTES, 1 << 20, (1 << 20) + 1, 3 << 20])
)


@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.tuples(SIZES, st.booleans()), max_size=6))
def test_any_pieces_come_out_as_they_went_in(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[int, bool]]
) -> None:
    path = tmp_path_factory.mktemp("files") / "file"
    write(path, [aligned(CONTENT[:size]) if in_blocks else CONTENT[1 : size + 1] for size, in_blocks in pieces])


@pytest.mark.parametrize("refused_by", ["open", "write", "nobody"])
def test_where_nothing_passes_the_page_cache_it_is_written_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused_by: str
) -> None:
    real_open, real_pwrite = os.open, os.pwrite
    refusals = []

    def refusing_open(path: str, flags: int, *rest: int) -> int:
        if flags & files._DIRECT:
            refusals.append("open")
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *rest)

    def refusing_pwrite(descriptor: int, data: bytes, offset: int) -> int:
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & files._DIRECT:
            refusals.append("write")
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_pwrite(descriptor, data, offset)

    if refused_by == "open":
        monkeypatch.setattr(os, "open", refusing_open)
    elif refused_by == "write":
        monkeypatch.setattr(os, "pwrite", refusing_pwrite)
    write(tmp_path / "file", [CONTENT[:100], aligned(CONTENT), CONTENT[:5000]])
    assert refusals in ([refused_by], [])  # none where the file system of the test has no O_DIRECT either
    assert refusals or refused_by == "nobody" or not is_direct(tmp_path)


def is_direct(folder: Path) -> bool:
    with ChecksummedFile(folder / "probe") as file:
        return file._is_direct


def test_data_that_lies_right_is_handed_to_the_disk_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zip headers of `torch.save` are padded so that the tensors are."""
    seen, real = [], os.pwrite

    def noted(descriptor: int, view: memoryview, at: int) -> int:
        seen.append(len(view))
        return real(descriptor, view, at)

    monkeypatch.setattr(os, "pwrite", noted)
    write(tmp_path / "file", [CONTENT[:BLOCK_BYTES], aligned(CONTENT), CONTENT[:10]])
    assert seen[:2] == [BLOCK_BYTES, len(CONTENT)]


def test_an_error_of_the_disk_is_raised_by_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with ChecksummedFile(tmp_path / "file") as file:
        monkeypatch.setattr(os, "pwrite", full)
        assert file.write(CONTENT) == len(CONTENT)
        file.write(b"more")
        with pytest.raises(OSError, match="No space left"):
            file.finish()

"""Files written past the page cache where the file system lets us: what comes out is what went in."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.checkpoint.files import BLOCK_BYTES, ChecksummedFile

CONTENT = os.urandom(3 << 20)
DIRECT = getattr(os, "O_DIRECT", 0)


def aligned(content: bytes) -> memoryview:
    mapped = mmap.mmap(-1, max(len(content), 1))
    mapped.write(content)
    return memoryview(mapped)[: len(content)].toreadonly()


def assert_written(path: Path, pieces: Sequence[bytes | memoryview]) -> None:
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


@settings(max_examples=40, deadline=None)
@given(pieces=st.lists(st.tuples(SIZES, st.booleans()), max_size=6))
def test_any_pieces_come_out_as_they_went_in(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[int, bool]]
) -> None:
    path = tmp_path_factory.mktemp("files") / "file"
    assert_written(
        path, [aligned(CONTENT[:size]) if in_blocks else CONTENT[1 : size + 1] for size, in_blocks in pieces]
    )


@pytest.mark.parametrize("refused_by", ["open", "write"])
def test_a_file_system_without_direct_writes_is_written_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused_by: str
) -> None:
    real_open, real_pwrite = os.open, os.pwrite

    def refusing_open(path: str, flags: int, *rest: int) -> int:
        if flags & DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *rest)

    def refusing_pwrite(descriptor: int, data: bytes, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, *(("open", refusing_open) if refused_by == "open" else ("pwrite", refusing_pwrite)))
    assert_written(tmp_path / "file", [CONTENT[:100], aligned(CONTENT), CONTENT[:5000]])

"""Lines appended whole on a disk that is full for a while. A limit on a file's size stands for the disk's."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from framework import appending
from framework.appending import Appender
from tests.helpers.disks import full_at


@pytest.fixture(autouse=True)
def _prints_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    """Else what is printed goes to a file of pytest's, which the limit counts for, too."""


def line(number: int) -> bytes:
    return f"line {number:04d}\n".encode()  # 10 bytes


def test_each_piece_is_with_the_kernel_at_once_and_comes_after_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before\n")
    with closing(Appender(path)) as file:
        for number in range(3):
            file.write(line(number))
            assert path.read_bytes() == b"before\n" + b"".join(map(line, range(number + 1)))
    file.close()


def test_a_piece_that_does_not_fit_waits_whole_and_is_written_first_once_there_is_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    with closing(Appender(path)) as file:
        with full_at(25):
            for number in range(5):
                file.write(line(number))
                assert path.read_bytes() == b"".join(map(line, range(min(number + 1, 2))))
        file.write(line(5))
        assert path.read_bytes() == b"".join(map(line, range(6)))
    expected = [
        f"{path} can't be written: File too large. It waits in memory; training goes on",
        f"{path} is written again",
    ]
    assert capsys.readouterr().out.splitlines() == expected  # each once
    assert [record.getMessage() for record in caplog.records] == expected


@pytest.mark.parametrize("how", ["flush", "close"])
def test_flushing_and_closing_try_again(tmp_path: Path, how: str) -> None:
    path = tmp_path / "file"
    with closing(Appender(path)) as file:
        with full_at(5):
            file.write(line(1))
        getattr(file, how)()
        assert path.read_bytes() == line(1)


def test_what_never_fits_is_counted_when_it_is_closed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with full_at(15):
        file = Appender(tmp_path / "file")
        for number in range(4):
            file.write(line(number))
        file.close()
        file.close()
    assert (tmp_path / "file").read_bytes() == line(0)
    assert capsys.readouterr().out.count("file lacks 3 entries that the disk didn't take") == 1


def test_what_waits_has_a_limit_and_the_newest_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appending, "_KEPT_BYTES", 35)
    with closing(Appender(tmp_path / "file")) as file:
        with full_at(15):
            for number in range(9):
                file.write(line(number))
        file.flush()
    assert (tmp_path / "file").read_bytes() == line(0) + line(6) + line(7) + line(8)


def test_a_file_that_can_not_be_made_yet_is_made_later(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    with closing(Appender(path)) as file:
        file.write(line(1))
        path.parent.mkdir()
        file.write(line(2))
    assert path.read_bytes() == line(1) + line(2)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(st.tuples(st.integers(1, 40), st.one_of(st.none(), st.integers(0, 300))), max_size=12))
def test_whenever_it_is_full_no_piece_is_torn_and_none_is_out_of_order(
    tmp_path: Path, events: list[tuple[int, int | None]]
) -> None:
    """(size of a piece, what is free for the file or None for enough)."""
    path = tmp_path / "file"
    path.unlink(missing_ok=True)
    written = b""
    with closing(Appender(path)) as file:
        for number, (size, limit) in enumerate(events):
            piece = bytes([number]) * size
            with full_at(10**6 if limit is None else limit):
                file.write(piece)
            written += piece
            content = path.read_bytes()
            assert written.startswith(content)
            assert content == written or content.count(written[len(content)]) == 0  # the next one, whole, waits
        file.flush()
        assert path.read_bytes() == written
    os.truncate(path, 0)

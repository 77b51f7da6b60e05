"""Lines appended whole on a disk that is full for a while. A limit on a file's size stands for the disk's."""

from __future__ import annotations

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


def test_pieces_come_after_what_was_there_also_in_a_folder_that_is_made_later(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    with closing(Appender(path)) as file:
        file.write(line(0))
        path.parent.mkdir()
        path.write_bytes(b"before\n")
        for number in range(1, 4):
            file.write(line(number))
            assert path.read_bytes() == b"before\n" + b"".join(map(line, range(number + 1)))
    file.close()


def test_a_refusal_and_its_end_are_each_reported_once_and_so_is_what_was_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    file = Appender(path)
    with full_at(25):
        for number in range(5):
            file.write(line(number))
            assert path.read_bytes() == b"".join(map(line, range(min(number + 1, 2))))
    file.write(line(5))
    assert path.read_bytes() == b"".join(map(line, range(6)))
    with full_at(65):
        file.write(line(6))
        file.close()
    printed = capsys.readouterr().out.splitlines()
    assert [record.getMessage() for record in caplog.records] == printed
    refused, again, refused_again, lost = printed
    for text in (refused, refused_again):
        assert text.startswith(f"{path} can't be written: File too large")
    assert again == f"{path} is written again"
    assert "lacks 1 entries" in lost


@pytest.mark.parametrize("how", ["flush", "close"])
def test_flushing_and_closing_try_again_and_the_newest_entries_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(appending, "_KEPT_BYTES", 35)
    with closing(Appender(tmp_path / "file")) as file:
        with full_at(15):
            for number in range(9):
                file.write(line(number))
        getattr(file, how)()
        assert (tmp_path / "file").read_bytes() == line(0) + line(6) + line(7) + line(8)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(st.tuples(st.integers(1, 40), st.one_of(st.none(), st.integers(0, 300))), max_size=12))
def test_no_piece_is_torn_and_none_is_out_of_order(tmp_path: Path, events: list[tuple[int, int | None]]) -> None:
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

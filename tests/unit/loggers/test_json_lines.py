"""Rows appended whole on a disk that is full for a while. A limit on a file's size stands for the disk's."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.disks import full_at
from tests.helpers.internals import JsonLines, metrics_fault
from tests.helpers.records import read_rows

ROW_BYTES = len('{"step": 1}\n')


@pytest.fixture(autouse=True)
def _prints_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    """Else what is printed goes to a file of pytest's, which the limit counts for, too."""


def opened(path: Path) -> JsonLines:
    return JsonLines(path, root=path.parent, last_step=None)


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read_rows(path)]


def test_refusal_recovery_and_loss_are_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    file = opened(path)
    with full_at(2 * ROW_BYTES + 5):
        for step in range(5):
            file.write({"step": step})
            assert steps(path) == [0, 1][: step + 1]
    file.write({"step": 5})
    assert steps(path) == [*range(6)]
    with full_at(6 * ROW_BYTES + 5):
        file.write({"step": 6})
        file.close()
    file.close()
    printed = capsys.readouterr().out.splitlines()
    assert [record.getMessage() for record in caplog.records] == printed
    refused, again, refused_again, lost = printed
    for text in (refused, refused_again):
        assert text.startswith(f"{path} can't be written: File too large")
    assert again == f"{path} is writable again"
    assert "lacks 1 rows" in lost


def test_closing_tries_again(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "file")) as file, full_at(ROW_BYTES + 5):
        for step in range(9):
            file.write({"step": step})
    assert steps(tmp_path / "file") == [*range(9)]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(st.tuples(st.integers(1, 40), st.one_of(st.none(), st.integers(0, 500))), max_size=12))
def test_rows_are_whole_and_in_order(tmp_path: Path, events: list[tuple[int, int | None]]) -> None:
    """(length of a text in a row, what is free for the file or None for enough)."""
    path = tmp_path / "file"
    path.unlink(missing_ok=True)
    with closing(opened(path)) as file:
        for step, (size, limit) in enumerate(events):
            with full_at(10**6 if limit is None else limit):
                file.write({"step": step, "text": "x" * size})
            text = path.read_text()
            assert text == "" or text.endswith("\n")
            assert steps(path) == [*range(text.count("\n"))]
        file.flush()
        assert steps(path) == [*range(len(events))]


# A file that was damaged

ROWS = [b'{"step": %d, "loss": 0.%d}\n' % (step, step) for step in range(1, 9)]


def reopened(path: Path, *, last_step: int | None = None) -> list[int]:
    """Return the steps that are left."""
    JsonLines(path, root=path.parent, last_step=last_step, check=metrics_fault).close()
    return steps(path)


@pytest.mark.parametrize(
    ("damaged", "named"),
    [
        (b"garbage\n", "line 4"),
        (b'{"step": 4, \x0c"loss": 0.\x0c4}\n', "line 4"),
        (b'{"step": 4, "loss": \xff}\n', "line 4"),
        (b'{"step": 4, "loss": NaN}\n', "JSON has no NaN"),
        (b'{"step": 4, "loss": "0.4"}\n', "loss isn't a finite number"),
        (b'{"step": "4", "loss": 0.4}\n', "line 4"),
        (b"[4]\n", "line 4"),
        (b"[" * 100_000 + b"\n", "nested"),
        (b'{"step": 4, "lo\nss": 0.4}\n', "line 5"),
        (b"\n", "line 4"),
        (b"\x00" * 30 + b"\n", "line 4"),
    ],
)
def test_a_damaged_line_costs_itself_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damaged: bytes, named: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join([*ROWS[:3], damaged, *ROWS[4:]]))
    assert reopened(path) == [1, 2, 3, 5, 6, 7, 8]
    printed = capsys.readouterr().out
    assert named in printed
    assert str(path) in printed
    assert reopened(path, last_step=6) == [1, 2, 3, 5, 6]
    assert capsys.readouterr().out == ""


def test_a_damaged_newline_costs_no_row(tmp_path: Path) -> None:
    content = b"".join(ROWS)
    at = len(ROWS[0]) + len(ROWS[1]) - 1
    for byte in (b"\x0b", b"\x8a", b" "):
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(content[:at] + byte + content[at + 1 :])
        assert reopened(path) == [*range(1, 9)]


@pytest.mark.parametrize("left", [b"", b"}", b'{"step": 9, "lo'])
def test_whole_rows_before_a_cut_are_kept(tmp_path: Path, left: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(ROWS) + left)
    assert reopened(path) == [*range(1, 9)]
    path.write_bytes(b"".join(ROWS)[:-1])
    assert reopened(path) == [*range(1, 9)]
    assert path.read_bytes() == b"".join(ROWS)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bit=st.integers(0, 8 * len(b"".join(ROWS)) - 1))
def test_any_flipped_bit_costs_one_row_at_most(tmp_path: Path, bit: int) -> None:
    path = tmp_path / "metrics.jsonl"
    content = bytearray(b"".join(ROWS))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    line = content[: bit // 8].count(b"\n") + 1
    others = {step for step in range(1, 9) if step not in (line, line - 1)}
    kept = reopened(path)
    assert others <= set(kept)
    assert len(kept) >= len(ROWS) - 1


def written(path: Path, *, root: Path) -> None:
    """Resume from step 4 and write further rows."""
    with closing(JsonLines(path, root=root, last_step=4, check=metrics_fault)) as file:
        file.write({"step": 5})
        file.flush()
        file.write({"step": 6})


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path.name)])
def test_what_cannot_be_read_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], None]
) -> None:
    path = tmp_path / "metrics.jsonl"
    make(path)
    written(path, root=tmp_path)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{path} can't be read: ")
    assert path.is_symlink() or not path.is_file()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trackers").write_text("")
    path = tmp_path / "trackers" / "fake" / "journal.jsonl"
    written(path, root=tmp_path)
    refused, lost = capsys.readouterr().out.splitlines()
    assert refused == f"{path} can't be written: Not a directory. Its rows wait in memory"
    assert lost == f"{path} lacks 2 rows that the disk refused"


def test_a_full_disk_delays_the_removal_of_later_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(ROWS))
    with full_at(10):
        file = JsonLines(path, root=path.parent, last_step=4, check=metrics_fault)
        file.write({"step": 5})
    assert steps(path) == [*range(1, 9)]
    file.close()
    assert steps(path) == [*range(1, 6)]

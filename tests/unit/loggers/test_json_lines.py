"""Rows appended whole on a disk that is full for a while. A limit on a file's size stands for the disk's."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from framework.loggers.jsonl import JsonLines
from tests.helpers.disks import full_at
from tests.helpers.records import read_rows

ROW_BYTES = len('{"step": 1}\n')


@pytest.fixture(autouse=True)
def _prints_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    """Else what is printed goes to a file of pytest's, which the limit counts for, too."""


def opened(path: Path) -> JsonLines:
    return JsonLines(path, last_step=None)


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read_rows(path)]


def test_a_refusal_and_its_end_are_each_reported_once_and_so_is_what_was_lost(
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
    assert again == f"{path} is written again"
    assert "lacks 1 rows" in lost


def test_closing_tries_again(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "file")) as file, full_at(ROW_BYTES + 5):
        for step in range(9):
            file.write({"step": step})
    assert steps(tmp_path / "file") == [*range(9)]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(st.tuples(st.integers(1, 40), st.one_of(st.none(), st.integers(0, 500))), max_size=12))
def test_no_row_is_torn_and_none_is_out_of_order(tmp_path: Path, events: list[tuple[int, int | None]]) -> None:
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

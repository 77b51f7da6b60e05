"""Standard output and error that never raise."""

from __future__ import annotations

import errno
import io
import sys

import pytest

from tests.helpers.internals import OutputError, ReaderGoneError, TolerantStream, answer, tolerant_output

TEXT = "2 × 3 ÷ 4 – 5 → 6 µs é α"


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("utf-8", TEXT),
        ("latin-1", r"2 × 3 ÷ 4 - 5 -> 6 µs é \u03b1"),
        ("ascii", r"2 x 3 / 4 - 5 -> 6 us \xe9 \u03b1"),
    ],
)
@pytest.mark.parametrize("errors", ["strict", "backslashreplace"])
def test_every_encoding_gets_readable_text(encoding: str, errors: str, shown: str) -> None:
    raw = io.BytesIO()
    stream = TolerantStream(io.TextIOWrapper(raw, encoding=encoding, errors=errors))
    print(TEXT, file=stream, flush=True)
    assert raw.getvalue().decode(encoding) == f"{shown}\n"


class Refusing(io.StringIO):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, "refused")


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, OutputError), (errno.EPIPE, ReaderGoneError)])
def test_only_a_lost_answer_raises(monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]) -> None:
    monkeypatch.setattr(sys, "stdout", Refusing(number))
    with tolerant_output():
        print("progress")
        with pytest.raises(error):
            answer("what was asked for")


def test_a_stream_that_was_closed_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    stream.close()
    with tolerant_output():
        print("progress", flush=True)
    assert sys.stdout is stream

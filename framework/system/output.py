"""Standard output and error that never raise: no full disk, closed pipe or narrow encoding ends a run. No torch.

What is printed for its own sake goes through `answer`, which reports that it couldn't be written.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO, final

from framework.errors import RunError

# Control sequences of a terminal: https://en.wikipedia.org/wiki/ANSI_escape_code#CSIsection
ERASE_BELOW = "\x1b[J"
ERASE_LINE = "\x1b[K"
HIDE_CURSOR = "\x1b[?25l"
SHOW_CURSOR = "\x1b[?25h"
# What is printed of these characters where the encoding has none of them; others become escapes such as \u03b1.
_PLAIN = {
    "–": "-",
    "×": "x",
    "÷": "/",
    "→": "->",
    "…": "...",
    "·": "-",
    "µ": "u",
}


class OutputError(RunError):
    """What the command was asked to print couldn't be written."""


class ReaderGoneError(Exception):
    """Nobody reads what the command was asked to print, as after `| head`. It ends without a message."""


@final
class TolerantStream(io.TextIOBase):
    """A text stream that otherwise behaves as the one it writes to. What that refuses is lost, or written later."""

    def __init__(self, stream: TextIO, *, answers: TolerantStream | None = None) -> None:
        self.stream = stream
        # Where `answer` writes; None: to this stream, as everything else.
        self.answers = answers
        # The first one since this was made.
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        try:
            self.stream.write(encodable(text, self.encoding))
        except OSError as error:
            self._note(error)
        except ValueError:
            # The user's code has closed the stream.
            pass
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            self._note(error)
        except ValueError:
            # The user's code has closed the stream.
            pass

    def _note(self, error: OSError) -> None:
        if self.error is None:
            # Its traceback would keep what the frames hold.
            self.error = error.with_traceback(None)

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]  # settable in the base class
        # A stream in memory has none.
        return self.stream.encoding or "utf-8"

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self.stream.errors

    def __getattr__(self, name: str) -> Any:
        """Return what else the stream has, such as `buffer`."""
        return getattr(self.stream, name)


def encodable(text: str, encoding: str) -> str:
    """Return the text with a replacement for each character that the encoding doesn't have."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return "".join(_encodable(character, encoding) for character in text)
    return text


def _encodable(character: str, encoding: str) -> str:
    try:
        character.encode(encoding)
    except UnicodeEncodeError:
        return _PLAIN.get(character) or character.encode("ascii", "backslashreplace").decode()
    return character


@contextmanager
def tolerant_output() -> Iterator[None]:
    """Have nothing raise that is printed while this is entered."""
    _open_missing_streams()
    stdout = sys.stdout
    stderr = sys.stderr
    sys.stdout = tolerant(stdout)
    sys.stderr = tolerant(stderr)
    try:
        yield
    finally:
        sys.stdout = stdout
        sys.stderr = stderr


def tolerant(stream: Any) -> TolerantStream:
    """Return a text stream that writes to this one and never raises."""
    return stream if isinstance(stream, TolerantStream) else TolerantStream(stream)


def _open_missing_streams() -> None:
    """Open the null device for streams that the shell closed (`>&-`), before a file gets their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # It gets the lowest free number, which is this stream's.
            null = os.open(os.devnull, os.O_RDWR)
            # The fork server inherits it.
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, "r" if number == 0 else "w", closefd=False))


@contextmanager
def only_answers_on_stdout() -> Iterator[None]:
    """Send to stderr what this process and those that it starts print to stdout, apart from what `answer` prints.

    Enter it inside of `tolerant_output`.
    """
    stdout = sys.stdout
    stdout.flush()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = TolerantStream(sys.stderr, answers=tolerant(answers))
    try:
        yield
    finally:
        os.dup2(answers.fileno(), 1)
        sys.stdout = stdout
        # What it refuses, `answer` has reported.
        with suppress(OSError):
            answers.close()


def answer(text: str) -> None:
    """Print what the command was asked for. Raises OutputError or ReaderGoneError if it can't be written."""
    print(text, file=_answers())
    check_answered()


def answer_json(content: Any) -> None:
    """Print what the command was asked for as one JSON document; raises as `answer` does."""
    answer(json_text(content))


def json_text(content: Any) -> str:
    """Return JSON in which numbers that aren't finite are null, and every control character is escaped."""
    # `json` itself leaves DEL.
    return json.dumps(_finite(content), indent=2, allow_nan=False).replace("\x7f", "\\u007f")


def _finite(content: Any) -> Any:
    if isinstance(content, float) and not math.isfinite(content):
        return None
    if isinstance(content, Mapping):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return content


def _answers() -> TextIO | TolerantStream:
    """Return the stream of answers."""
    stdout: Any = sys.stdout
    if isinstance(stdout, TolerantStream) and stdout.answers is not None:
        return stdout.answers
    return stdout  # type: ignore[no-any-return]


def check_answered() -> None:
    """Raise OutputError or ReaderGoneError if what was printed so far can't be written."""
    stream = _answers()
    stream.flush()
    error = stream.error if isinstance(stream, TolerantStream) else None
    if isinstance(error, BrokenPipeError):
        raise ReaderGoneError
    if error is not None:
        raise OutputError(f"The output can't be written: {error.strerror or error}.")

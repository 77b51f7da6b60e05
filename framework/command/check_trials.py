"""All trials of a sweep are composed and checked before the first one starts."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import final

from framework.command.job import load_swept_job
from framework.command.request import Request
from framework.config.source import files_unchanged
from framework.errors import ConfigError, RequestError
from framework.sweeps.table import distinguishing
from framework.system.formatting import format_count
from framework.system.output import ERASE_LINE

# Nothing is printed before.
_SILENT_S = 1.0
_REDRAW_S = 0.1


def check_trials(
    combinations: Sequence[Sequence[str]], *, request_of: Callable[[int, Sequence[str]], Request]
) -> list[Request]:
    """Return the checked request of each trial, in order. Standard error shows progress if it takes long.

    Args:
        combinations: the overrides of each trial.
        request_of: composes, parses and checks what a trial is given by its position and its overrides.

    Raises:
        FrameworkError: the mistakes of the first trial that has any, and which one it is.
    """
    requests = []
    with files_unchanged(), _progress(len(combinations)) as progress:
        for position, overrides in enumerate(combinations):
            progress.show(position)
            try:
                request = request_of(position, overrides)
                load_swept_job(request.config.job).check(request)
            except RequestError as error:
                if len(combinations) == 1:
                    raise
                label = distinguishing(combinations)[position]
                raise ConfigError(f"{error}\nFound in the trial {label}. No trial was started.") from error
            requests.append(request)
    return requests


@contextmanager
def _progress(total: int) -> Iterator[_Progress]:
    progress = _Progress(total)
    try:
        yield progress
    finally:
        progress.close()


@final
class _Progress:
    """A line that is replaced on a terminal; elsewhere one that is printed once."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._is_terminal = sys.stderr.isatty()
        self._is_shown = False
        self._next_s = monotonic() + _SILENT_S

    def show(self, num_checked: int) -> None:
        """Show how many trials have been checked, if it is time."""
        if monotonic() < self._next_s:
            return
        text = f"Checking {format_count(self._total, 'trial')}"
        if self._is_terminal:
            print(f"\r{text}: {num_checked} done{ERASE_LINE}", end="", file=sys.stderr, flush=True)
            self._next_s = monotonic() + _REDRAW_S
        else:
            print(text, file=sys.stderr, flush=True)
            self._next_s = math.inf
        self._is_shown = True

    def close(self) -> None:
        """Take the line off the terminal."""
        if self._is_shown and self._is_terminal:
            print(f"\r{ERASE_LINE}", end="", file=sys.stderr, flush=True)

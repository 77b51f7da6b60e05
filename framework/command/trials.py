"""The trials that a worker has yet to run: all of a grid's (`GridTrials`), or those that a search asks for."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol, final

from framework.command.request import Request
from framework.errors import RequestError
from framework.sweeps.claims import Claims
from framework.sweeps.folder import SweepFolder, Trial, config_hash
from framework.sweeps.results import REFUSED, TrialResult, read_results
from framework.sweeps.search import Asked, End, Search

PRUNED = "pruned"
"""The status of a trial that a search has stopped early."""

_FAILED = ("failed", "crashed", "damaged", REFUSED)


def has_failed(result: TrialResult) -> bool:
    """Return True for a trial that has ended without being asked to."""
    return result.status in _FAILED


def needs_work(result: TrialResult, *, retries_failed: bool) -> bool:
    """Return True if a command that continues the sweep has something left to do in this trial.

    retries_failed: trials that have failed are started again, too.
    """
    if result.status == "failed":
        return retries_failed
    return result.status not in ("finished", PRUNED)


class Trials(Protocol):
    """The trials of a sweep that a worker has yet to run."""

    def next(self) -> Trial | None:
        """Return a trial to run, claimed for this worker; None if there is none at the moment.

        Raises FrameworkError if the sweep's files can't be read or written.
        """

    def is_complete(self) -> bool:
        """Return True if no worker has anything left to do."""

    def report(self, trial: Trial, *, step: int, value: float) -> bool:
        """Take what a validation gave; return True if the trial is to be stopped early.

        step: the number of the validation in the trial, from 0.
        """

    def ended(self, trial: Trial, result: TrialResult) -> bool:
        """Take how a trial ended; return True if it is to be started again at once."""


@final
class GridTrials:
    """The trials that sweep.json lists.

    Args:
        trials: all trials of the sweep.
        retries: how often a trial that fails is started again.
        retries_failed: trials that failed before this command are started again, too.
    """

    def __init__(
        self, folder: SweepFolder, trials: Sequence[Trial], *, claims: Claims, retries: int, retries_failed: bool
    ) -> None:
        self._folder = folder
        self._claims = claims
        self._retries = retries
        self._failures: Counter[int] = Counter()
        # The trials in which there may be something left to do.
        self._open: dict[int, Trial] = {}
        # Those that had failed before, and are to be started again.
        self._failed_before: set[int] = set()
        for trial, result in zip(trials, read_results(folder, trials), strict=True):
            if needs_work(result, retries_failed=retries_failed):
                self._open[trial.number] = trial
                if result.status == "failed":
                    self._failed_before.add(trial.number)
        self._running: set[int] = set()
        self.num_left = len(self._open)

    def next(self) -> Trial | None:
        for number, trial in list(self._open.items()):
            if number in self._running or self._claims.take(number) is None:
                continue
            # Another worker may have run it since.
            (result,) = read_results(self._folder, [trial])
            if not needs_work(result, retries_failed=number in self._failed_before):
                self._claims.release(number)
                del self._open[number]
                continue
            self._failed_before.discard(number)
            self._running.add(number)
            return trial
        return None

    def is_complete(self) -> bool:
        return not self._open

    def report(self, trial: Trial, *, step: int, value: float) -> bool:
        return False

    def ended(self, trial: Trial, result: TrialResult) -> bool:
        self._running.discard(trial.number)
        if not has_failed(result):
            # One that was stopped is left for the command that continues the sweep.
            del self._open[trial.number]
            return False
        self._failures[trial.number] += 1
        if self._failures[trial.number] <= self._retries:
            return True
        del self._open[trial.number]
        return False


@dataclass(eq=False)
class _Row:
    """A choice of the search: its trials differ in the keys of `sweep.over` only."""

    index: int
    # What each trial runs, in the order in which they start.
    requests: list[Request]
    # Those that have been started, by the position of their request.
    trials: dict[int, Trial]
    # Of the trials that have ended with one.
    scores: list[float]


@final
class SearchTrials:
    """The trials that a search asks for.

    The first trial of each row may be pruned. The others, with other seeds, start if it survives, and the search is
    told the mean.

    Args:
        compose: returns the requests of a row, given the overrides that the search has chosen.
        retries: how often a trial that fails is started again.
        reopened: the rows whose trials that failed before this command are started again, too.
    """

    def __init__(
        self,
        folder: SweepFolder,
        search: Search,
        *,
        claims: Claims,
        compose: Callable[[Sequence[str]], list[Request]],
        retries: int,
        reopened: Collection[int] = (),
    ) -> None:
        self._folder = folder
        self._search = search
        self._reopened = reopened
        self._claims = claims
        self._compose = compose
        self._retries = retries
        self._failures: Counter[int] = Counter()
        # The rows that this worker runs, by their index.
        self._rows: dict[int, _Row] = {}
        # The rows of which a trial was stopped, for the command that continues the sweep.
        self._stopped: set[int] = set()
        # Trials that have yet to be started: rows, and positions in them.
        self._waiting: list[tuple[_Row, int]] = []
        # The rows of the trials that run, by the number of the trial.
        self._row_of: dict[int, _Row] = {}
        self._is_exhausted = False
        # If any trial was started and wasn't refused.
        self._has_run = False
        self.requests: dict[int, Request] = {}

    def next(self) -> Trial | None:
        trial = self._next_waiting()
        while trial is None and self._take_row():
            trial = self._next_waiting()
        return trial

    def is_complete(self) -> bool:
        if not self._is_exhausted or self._rows:
            return False
        return all(asked.index in self._stopped for asked in self._search.open_trials())

    def report(self, trial: Trial, *, step: int, value: float) -> bool:
        row = self._row_of[trial.number]
        if row.trials.get(0) != trial:
            return False
        return self._search.report(row.index, step=step, value=value)

    def ended(self, trial: Trial, result: TrialResult) -> bool:
        row = self._row_of.pop(trial.number)
        self._has_run |= result.status != REFUSED
        if result.status == REFUSED and not self._has_run:
            # All others would be refused for the same reason, such as a metric that no validation computes.
            self._is_exhausted = True
        if has_failed(result):
            self._failures[trial.number] += 1
            if self._failures[trial.number] <= self._retries:
                (position,) = [position for position, started in row.trials.items() if started == trial]
                self._waiting.insert(0, (row, position))
                return True
        self._take_result(row, result)
        return False

    def _next_waiting(self) -> Trial | None:
        for row, position in list(self._waiting):
            self._waiting.remove((row, position))
            trial = self._trial_to_run(row, position)
            if trial is not None:
                return trial
        return None

    def _take_row(self) -> bool:
        """Begin another row, one that a worker has left or a new one; return False if there is none."""
        for asked in self._search.open_trials():
            if asked.index in self._rows or asked.index in self._stopped:
                continue
            if self._claims.take(_key_of(asked)) is not None:
                self._begin(asked)
                return True
        if self._is_exhausted:
            return False
        new = self._search.ask()
        if new is None:
            self._is_exhausted = True
            return False
        if self._claims.take(_key_of(new)) is None:
            # Another worker was faster.
            return self._take_row()
        self._begin(new)
        return True

    def _begin(self, asked: Asked) -> None:
        row = _Row(asked.index, [], trials={}, scores=[])
        self._rows[asked.index] = row
        try:
            row.requests = self._compose(asked.overrides)
        except RequestError as error:
            # Each value was checked alone, and these exclude each other.
            chosen = " ".join(asked.overrides)
            print(f"The search counts {chosen} as failed: {error}", file=sys.stderr, flush=True)
            self._tell(row, value=None, state="failed")
            return
        self._waiting.append((row, 0))

    def _trial_to_run(self, row: _Row, position: int) -> Trial | None:
        """Return a trial of a row to run; None if it runs or has run: a search may choose the same values again."""
        request = row.requests[position]
        blank = Trial(0, request.overrides, config_hash(request.raw))
        (trial,) = self._folder.add_trials([blank])
        row.trials[position] = trial
        (result,) = read_results(self._folder, [trial])
        is_retried = self._failures[trial.number] > 0 or row.index in self._reopened
        if not needs_work(result, retries_failed=is_retried):
            self._take_result(row, result)
            return None
        if self._claims.take(trial.number) is None:
            # In another row. Its result is this one's, too.
            self._waiting.append((row, position))
            return None
        self.requests[trial.number] = request
        self._row_of[trial.number] = row
        return trial

    def _take_result(self, row: _Row, result: TrialResult) -> None:
        """Note how a trial of a row has ended; tell the search if it was the last one."""
        if result.status in ("stopped", "interrupted"):
            # It is left for the command that continues the sweep.
            self._stopped.add(row.index)
            self._leave(row)
            return
        if result.final_score is None:
            state: End = "pruned" if result.status == PRUNED else "failed"
            self._tell(row, value=None, state=state)
            return

        row.scores.append(result.final_score)
        if len(row.scores) == len(row.requests):
            self._tell(row, value=fmean(row.scores), state="finished")
        elif len(row.scores) == 1 and row.index in self._rows:
            # The first trial has survived, so the others start.
            self._waiting += [(row, position) for position in range(1, len(row.requests))]

    def _tell(self, row: _Row, *, value: float | None, state: End) -> None:
        # Another trial of the row may have failed before.
        if row.index in self._rows:
            self._search.tell(row.index, value=value, state=state)
            self._leave(row)

    def _leave(self, row: _Row) -> None:
        if self._rows.pop(row.index, None) is not None:
            self._claims.release(_key_of(row))
        self._waiting = [(waiting, position) for waiting, position in self._waiting if waiting is not row]


def _key_of(row: Asked | _Row) -> str:
    """Return the name under which a worker claims a row."""
    return f"row_{row.index}"

"""What a sweep shows on the terminal: a line when a trial starts and ends, and below, those that run."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import final

from framework.command.trials import has_failed
from framework.config.schema import ProgressMode
from framework.config.secrets import masked_override
from framework.launch.plan import RunProgress
from framework.loggers.live_view import LiveView, Row, start_view
from framework.sweeps.folder import SweepFolder, Trial
from framework.sweeps.results import TrialResult
from framework.system.formatting import display_path, format_count
from framework.system.signals import shown_signal

_REDRAW_S = 0.2


@final
class TrialsView:
    """Prints what happens to trials. Call `close` at the end.

    Args:
        common: the overrides that all trials have, and that aren't shown.
        monitor: the metric by which trials are compared; None if there is none.
        mode: `min` or `max`, which values are better.
        results: of the trials that have ended before.
    """

    def __init__(
        self,
        folder: SweepFolder,
        *,
        common: Collection[str],
        monitor: str | None,
        mode: str,
        progress: ProgressMode,
        results: Sequence[TrialResult] = (),
    ) -> None:
        self._folder = folder
        self._common = common
        self._monitor = monitor or "best"
        self._mode = mode
        self._view: LiveView | None = start_view(progress)
        self._drawn_at = 0.0
        self._began: dict[int, float] = {}
        self._num_ended = 0
        self._best: TrialResult | None = None
        for result in results:
            self._note(result)

    def started(self, trial: Trial) -> None:
        self._began[trial.number] = time.monotonic()
        # On a terminal, the lines below show it.
        if self._view is None:
            self.say(self._line(trial, "running"))

    def ended(self, trial: Trial, result: TrialResult, *, is_restarted: bool) -> None:
        self._note(result)
        began = self._began.pop(trial.number, None)
        facts = [_described(result)]
        if result.score is not None:
            facts.append(f"{result.score:.4f}")
        if began is not None:
            facts.append(f"{time.monotonic() - began:.1f} s")
        if is_restarted:
            facts.append("restarting")
        if has_failed(result):
            facts.append(f"log: {display_path(self._log_of(trial))}")
        self.say(self._line(trial, *facts))

    def stopping(self, signal_number: int, *, num_running: int) -> None:
        trials = format_count(num_running, "trial")
        self.say(
            f"{shown_signal(signal_number)}: stopping {trials} as soon as all is saved. Ctrl-C again ends at once."
        )

    def show(self, running: Sequence[tuple[Trial, RunProgress | None]]) -> None:
        """Redraw the lines of the trials that run."""
        now = time.monotonic()
        if self._view is None or now - self._drawn_at < _REDRAW_S:
            return
        self._drawn_at = now
        rows = [self._row(trial, progress) for trial, progress in running]
        ended = format_count(self._num_ended, "trial") + " ended"
        if self._best is not None and self._best.score is not None:
            best = f"{self._monitor} {self._best.score:.4f} in [{self._best.number}]"
            rows.append(Row("best", [best, ended]))
        else:
            rows.append(Row("sweep", [ended]))
        self._view.show(rows)

    def say(self, text: str) -> None:
        """Print a line above those of the trials that run."""
        print(text, flush=True)

    def close(self) -> None:
        if self._view is not None:
            self._view.show([])
            self._view.stop()

    def _label_of(self, trial: Trial) -> str:
        return " ".join(masked_override(text) for text in trial.overrides if text not in self._common)

    def _line(self, trial: Trial, *facts: str) -> str:
        start = f"[{trial.number}] {self._label_of(trial)}".rstrip()
        return "  ".join([start, *facts])

    def _row(self, trial: Trial, progress: RunProgress | None) -> Row:
        items = []
        label = self._label_of(trial)
        if label:
            items.append(label)
        if progress is None:
            items.append("starting")
            return Row(f"[{trial.number}]", items)
        step = f"step {progress.step}"
        if progress.total_steps:
            step = f"step {progress.step}/{progress.total_steps}"
        items.append(step)
        if progress.validations:
            items.append(f"{self._monitor} {progress.validated_value:.4f}")
        return Row(f"[{trial.number}]", items, done=progress.step, of=progress.total_steps or None)

    def _note(self, result: TrialResult) -> None:
        """Count a trial that has ended, and keep the best one."""
        self._num_ended += 1
        if result.score is None:
            return
        if self._best is None or self._best.score is None:
            self._best = result
            return
        is_lower = result.score < self._best.score
        is_better = is_lower if self._mode == "min" else result.score > self._best.score
        if is_better:
            self._best = result

    def _log_of(self, trial: Trial) -> Path:
        """Return the log of the trial's rank 0; that of its command if no rank has opened one."""
        log = self._folder.trial(trial.number).rank_log(0)
        return log if log.exists() else self._folder.trial_log(trial.number)


def _described(result: TrialResult) -> str:
    if not has_failed(result):
        return result.status
    return f"FAILED ({result.cause or result.status})"

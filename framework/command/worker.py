"""The worker of a sweep: it starts trials while there are slots and trials, and follows them until all have ended.

It trains nothing itself, and needs no torch. Several workers, on several machines, may work on one sweep.
"""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from framework.command.request import Request
from framework.command.slots import Slot
from framework.command.trial import Progress, start_trial
from framework.command.trials import PRUNED, Trials, has_failed
from framework.errors import (
    EXIT_INTERRUPTED,
    EXIT_RUN_FAILED,
    EXIT_STOPPED,
    EXIT_WRONG_REQUEST,
    FrameworkError,
)
from framework.launch.fork_server import ForkServer, running_fork_server
from framework.launch.run_server import RunServer
from framework.sweeps.claims import Claims
from framework.sweeps.folder import SweepFolder, Trial
from framework.sweeps.results import REFUSED, TrialResult, read_results
from framework.system.files import read_text
from framework.system.run_dir import write_atomically
from framework.system.shown_text import shown
from framework.system.signals import STOP_SIGNALS, Signals, catching_signals

if TYPE_CHECKING:
    from framework.command.trials_view import TrialsView

# What trials import while they train, 280 modules: once for all of them, rather than in each.
_PRELOAD = (
    "framework.command.trial",
    "torch.utils.tensorboard",
    "torch.utils.flop_counter",
    "framework.tasks.pictures",
    "PIL.PngImagePlugin",
)
# How often the worker looks for trials that another one has left, and shows that it is alive.
_BEAT_S = 2.0
# How the process of a trial ends that was told to stop, also before it could see to the signal.
_STOPPED = (EXIT_STOPPED, EXIT_INTERRUPTED, *(-number for number in STOP_SIGNALS))


@dataclass
class _Running:
    """A trial that runs."""

    trial: Trial
    slot: Slot
    key: str
    progress: Progress
    started: float
    is_pruned: bool = False


@final
class Worker:
    """Runs trials until none is left, all at once as slots allow. Call `run` once.

    Args:
        trials: those of the sweep.
        request_of: returns what a trial's process runs. Raises FrameworkError.
        slots: the places for trials on this machine.
        view: shows what happens.
        after_trial: called once a trial has ended.
        fail_fast: stop all trials once one has failed.
    """

    def __init__(
        self,
        folder: SweepFolder,
        trials: Trials,
        *,
        request_of: Callable[[Trial], Request],
        slots: Sequence[Slot],
        claims: Claims,
        view: TrialsView,
        after_trial: Callable[[], None],
        fail_fast: bool,
    ) -> None:
        self._folder = folder
        self._trials = trials
        self._request_of = request_of
        self._free = list(slots)
        self._claims = claims
        self._view = view
        self._after_trial = after_trial
        self._fail_fast = fail_fast
        self._running: dict[str, _Running] = {}
        self._has_failed = False
        # If a trial was stopped, so that there is something to resume.
        self._has_stopped = False
        # The signal that stopped the sweep; 0 for none.
        self._stop_signal = 0
        # True once no more trials are started.
        self._is_stopping = False

    def run(self, fork_server: ForkServer | None) -> int:
        """Run trials; return 0, EXIT_RUN_FAILED if one failed, or EXIT_STOPPED.

        Raises KeyboardInterrupt on a second Ctrl-C. No trial runs afterwards.
        """
        with (
            catching_signals() as signals,
            running_fork_server(fork_server) as server,
            closing(server.fork()) as parent,
        ):
            server.load(_PRELOAD)
            try:
                self._loop(signals, server=server, parent=parent)
            finally:
                parent.await_end()
                for running in self._running.values():
                    self._claims.release(running.trial.number)
        if self._stop_signal:
            return EXIT_STOPPED
        status = EXIT_RUN_FAILED if self._has_failed else 0
        if status == 0 and self._has_stopped:
            return EXIT_STOPPED
        return status

    def _loop(self, signals: Signals, *, server: ForkServer, parent: RunServer) -> None:
        next_beat = time.monotonic() + _BEAT_S
        while True:
            self._start_trials(server, parent)
            if not self._running and (self._is_stopping or self._trials.is_complete()):
                return
            pipes = [running.progress for running in self._running.values() if running.progress.is_open]
            sources: list[Any] = [signals, parent, *pipes]
            readable, _, _ = select.select(sources, [], [], max(0.0, next_beat - time.monotonic()))
            for source in readable:
                if source is signals:
                    self._on_signals(signals, parent)
                elif source is parent:
                    self._on_end(parent)
                elif source.is_open:
                    # It is closed if the trial's end came with it.
                    self._on_progress(source, parent)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + _BEAT_S
                self._beat(parent)
            self._view.show([(running.trial, running.progress.latest) for running in self._running.values()])

    def _start_trials(self, server: ForkServer, parent: RunServer) -> None:
        while self._free and not self._is_stopping:
            trial = self._trials.next()
            if trial is None:
                return
            try:
                self._start(trial, server=server, parent=parent)
            except FrameworkError as error:
                self._ended(trial, self._refused(trial, str(error)), parent=parent)

    def _start(self, trial: Trial, *, server: ForkServer, parent: RunServer) -> None:
        request = self._request_of(trial)
        log = self._folder.trial_log(trial.number)
        log.parent.mkdir(exist_ok=True)
        self._folder.refusal(trial.number).unlink(missing_ok=True)
        slot = self._free[0]
        key, progress = start_trial(request, slot=slot, log=log, parent=parent, fork_server=server)
        # Not before: the place stays free if the trial can't be started.
        del self._free[0]
        self._running[key] = _Running(trial, slot, key=key, progress=progress, started=time.monotonic())
        self._view.started(trial)

    # Events

    def _on_progress(self, progress: Progress, parent: RunServer) -> None:
        is_validated = progress.take()
        if not is_validated or progress.latest is None:
            return
        (running,) = [running for running in self._running.values() if running.progress is progress]
        latest = progress.latest
        is_hopeless = self._trials.report(running.trial, step=latest.validations - 1, value=latest.validated_value)
        if is_hopeless and not running.is_pruned and not self._is_stopping:
            running.is_pruned = True
            parent.kill(running.key, signal_number=signal.SIGTERM)

    def _on_end(self, parent: RunServer) -> None:
        event = parent.next_event()
        running = self._running.pop(event["key"])
        running.progress.close()
        self._free.append(running.slot)
        trial = running.trial
        (result,) = read_results(self._folder, [trial])
        # It may have finished before it was told to stop; or it was about to, and has recorded no end.
        if running.is_pruned and result.status in ("stopped", "interrupted", "crashed"):
            self._folder.trial(trial.number).update_run({"status": PRUNED})
            result = replace(result, status=PRUNED)
        if result.status in ("waiting", "crashed") and event["status"] in _STOPPED:
            # It was stopped before it had recorded anything.
            result = replace(result, status="stopped")
        elif result.status == "waiting" and event["status"] == EXIT_WRONG_REQUEST:
            result = self._refused(trial, read_text(self._folder.trial_log(trial.number)).rstrip())
        elif result.status == "waiting":
            # It was killed, or failed, before it had a run directory.
            result = replace(result, status="crashed")
        self._ended(trial, result, parent=parent)

    def _refused(self, trial: Trial, message: str) -> TrialResult:
        """Show why a trial couldn't be started, and keep it for whoever reads the results later."""
        self._view.say(shown(message))
        file = self._folder.refusal(trial.number)
        with suppress(OSError):
            file.parent.mkdir(exist_ok=True)
            write_atomically(file, message)
        (result,) = read_results(self._folder, [trial])
        return replace(result, status=REFUSED)

    def _ended(self, trial: Trial, result: TrialResult, *, parent: RunServer) -> None:
        """Show how a trial ended, and go on with the sweep or not."""
        is_restarted = self._trials.ended(trial, result) and not self._is_stopping
        self._claims.release(trial.number)
        self._view.ended(trial, result, is_restarted=is_restarted)
        self._after_trial()
        if result.status in ("stopped", "interrupted"):
            self._has_stopped = True
        if not has_failed(result) or is_restarted:
            return
        self._has_failed = True
        if self._fail_fast and not self._is_stopping:
            self._view.say(f"Trial {trial.number} failed, so the others are stopped (sweep.fail_fast=true).")
            self._stop_all(parent, signal.SIGTERM)

    def _on_signals(self, signals: Signals, parent: RunServer) -> None:
        for number in signals.take():
            if not self._stop_signal:
                self._stop_signal = number
                self._view.stopping(number, num_running=len(self._running))
                self._stop_all(parent, number)
            elif number == signal.SIGINT:
                raise KeyboardInterrupt

    def _stop_all(self, parent: RunServer, signal_number: int) -> None:
        self._is_stopping = True
        for running in self._running.values():
            parent.kill(running.key, signal_number=signal_number)

    def _beat(self, parent: RunServer) -> None:
        """Show other workers that this one is alive; end trials that another one has taken over meanwhile."""
        trouble = self._claims.beat()
        if trouble is not None:
            self._view.say(trouble)
        for running in self._running.values():
            if self._claims.is_lost(running.trial.number):
                parent.kill(running.key)

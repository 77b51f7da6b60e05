"""Contestants run in processes of their own, take turns, and are compared round by round.

A contestant is a Python command. It runs in an empty folder, at a terminal that nobody reads, so that progress bars are
drawn as for a user, and leaves its figures as `benchmarks.marks` says. In every round each runs once, and each round
begins with another one.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import math
import os
import pty
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.marks import FOLDER, GO_ON

ROOT = Path(__file__).resolve().parents[1]
_TIMEOUT_S = 600.0
_END_TIMEOUT_S = 10.0
_MAX_OUTPUT_CHARS = 3000
"""Characters of a contestant's output that are shown if it fails."""


class ContestError(Exception):
    """A contestant ended otherwise than it should."""


@dataclass(frozen=True)
class Contestant:
    """A Python command that is measured."""

    name: str
    # Python's arguments.
    arguments: tuple[str, ...]
    # A package that may be missing.
    needs: str | None = None
    # Environment variables with their values.
    environment: tuple[tuple[str, str], ...] = ()
    # Its figures count even if it fails after it has left them.
    may_abort: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a contestant left."""

    # The figures of each process that left some.
    reports: tuple[Mapping[str, Any], ...]
    # When the command was started, by `time.time`.
    begun: float
    # Until the command had ended.
    seconds: float

    def worst(self, key: str) -> float:
        """The largest figure of that name: ranks wait for the last. Raises ContestError where one hasn't got it."""
        if not all(key in report for report in self.reports):
            raise ContestError(f"no {key} in {self.reports}")
        return max(float(report[key]) for report in self.reports)


@dataclass
class Contest:
    """The figures of all contestants."""

    # Contestant → one figure for each round.
    figures: dict[str, list[float]] = field(default_factory=dict)
    # Contestant → why it has none.
    absent: dict[str, str] = field(default_factory=dict)


def ours(name: str, *overrides: str) -> Contestant:
    """The framework's command, all defaults on but for what `overrides` say; on the CPU unless they name GPUs."""
    arguments = ["-m", "framework"]
    if not any(text.startswith("trainer.gpus=") for text in overrides):
        arguments.append("trainer.gpus=0")
    return Contestant(name, (*arguments, *overrides))


def callback(name: str, **settings: float) -> tuple[str, ...]:
    """Overrides that add a class of `benchmarks.marks` to the callbacks."""
    keys = [f"+callbacks.benchmark.{key}={value}" for key, value in settings.items()]
    return (f"+callbacks.benchmark._target_=benchmarks.marks.{name}", *keys)


def peer(
    name: str,
    module: str,
    *arguments: str,
    needs: str | None = None,
    torchrun: int | None = None,
    may_abort: bool = False,
) -> Contestant:
    """A module of `benchmarks.peers`. torchrun: started by it with so many processes."""
    command = ("-m", f"benchmarks.peers.{module}", *arguments)
    if torchrun is not None:
        command = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}", *command)
    return Contestant(name, command, needs, may_abort=may_abort)


def run(
    contestant: Contestant,
    *,
    timeout_s: float = _TIMEOUT_S,
    reports: bool = True,
    at_hold: Callable[[int, list[int]], None] | None = None,
    holding: int = 0,
) -> Outcome:
    """Run it until it ends. Raises ContestError, with what it printed last, if it fails or leaves no report.

    reports: whether it leaves any. at_hold: called once `holding` processes hold still, with the pid of the command
    and of those.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark_", ignore_cleanup_errors=True) as name:
        folder = Path(name, "reports")
        folder.mkdir()
        master, slave = _terminal()
        printed: deque[str] = deque(maxlen=50)
        reader = threading.Thread(target=_drain, args=(master, printed), daemon=True)
        begun = time.time()
        began_s = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *contestant.arguments],
            cwd=name,
            env={**_environment(folder), **dict(contestant.environment)},
            stdin=subprocess.DEVNULL,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        reader.start()
        # Not the time-out of `wait`, which looks only every 50 ms whether the process has ended.
        watchdog = threading.Timer(timeout_s, _end, [process])
        watchdog.start()
        try:
            if at_hold is not None:
                _look(process, folder, at_hold=at_hold, holding=holding)
            status = process.wait()
            seconds = time.perf_counter() - began_s
        finally:
            watchdog.cancel()
            if process.poll() is None:
                _end(process)
            reader.join(timeout=1.0)
            if not reader.is_alive():
                os.close(master)
        figures = tuple(json.loads(file.read_text()) for file in sorted(folder.glob("*.json")))
    has_aborted = status != 0 and not (contestant.may_abort and figures)
    if has_aborted or (reports and not figures):
        text = "".join(printed)[-_MAX_OUTPUT_CHARS:]
        raise ContestError(f"{contestant.name}: exit status {status}, {len(figures)} reports\n{text}")
    return Outcome(figures, begun, seconds)


def take_turns(
    contestants: Sequence[Contestant],
    rounds: int,
    measure: Callable[[Contestant], Mapping[str, float]],
    *,
    until: float = math.inf,
) -> dict[str, Contest]:
    """Let each run once a round, in an order that is rotated; gives a contest for each figure of `measure`.

    until: of `time.monotonic`; after the first round none is begun that would last longer than that.
    One whose package is missing is left out, and so is one that has failed, from then on and with all its figures.
    """
    absent: dict[str, str] = {}
    for contestant in contestants:
        if contestant.needs is not None and importlib.util.find_spec(contestant.needs) is None:
            absent[contestant.name] = "not installed"

    contests: dict[str, Contest] = {}
    round_s = 0.0
    for number in range(rounds):
        began = time.monotonic()
        if number and began + round_s > until:
            break
        first = number % len(contestants)
        for contestant in (*contestants[first:], *contestants[:first]):
            name = contestant.name
            if name in absent:
                continue
            try:
                figures = measure(contestant)
            except ContestError as error:
                print(error, file=sys.stderr, flush=True)
                absent[name] = "failed"
                continue
            shown = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
            print(f"  round {number + 1} of {rounds}: {name}: {shown}", file=sys.stderr, flush=True)
            for key, value in figures.items():
                contests.setdefault(key, Contest()).figures.setdefault(name, []).append(value)
        round_s = time.monotonic() - began
    for contest in contests.values():
        contest.absent = absent
        contest.figures = {name: values for name, values in contest.figures.items() if name not in absent}
    return contests


@dataclass(frozen=True)
class Target:
    """What a ratio must not pass: not above `limit`, or, `at_least`, not below it."""

    limit: float
    at_least: bool = False

    def is_reached(self, ratio: float) -> bool:
        if self.at_least:
            return ratio >= self.limit
        return ratio <= self.limit

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        return f"{sign} {self.limit:.2f}"


@dataclass(frozen=True)
class Unit:
    """How figures are shown: times `factor`, with so many decimals."""

    name: str
    factor: float = 1.0
    decimals: int = 2

    def show(self, values: Sequence[float]) -> str:
        """The median, and the range where there are several."""
        middle = self._show(statistics.median(values))
        if len(values) == 1:
            return f"{middle} {self.name}"
        return f"{middle} ({self._show(min(values))}–{self._show(max(values))}) {self.name}"

    def _show(self, value: float) -> str:
        return f"{value * self.factor:,.{self.decimals}f}"


@dataclass(frozen=True)
class Row:
    """A line of the table. target: "–" where nothing is promised."""

    part: str
    claim: str
    ours: str
    theirs: str
    ratio: str = "–"
    target: str = "–"
    reached: str = "–"

    def __str__(self) -> str:
        cells = (self.part, self.claim, self.ours, self.theirs, self.ratio, self.target, self.reached)
        return f"| {' | '.join(cells)} |"


def compare(
    part: str, claim: str, contest: Contest | None, names: tuple[str, str], *, unit: Unit, target: Target | None = None
) -> Row:
    """Ours against theirs (`names`): the median and range of the rounds' own ratios, ours ÷ theirs.

    Each round's two figures were taken near each other, so that what else the machine does is in both.
    """
    goal = "–" if target is None else str(target)
    if contest is None:
        return Row(part, claim, "failed", "failed", target=goal)
    cells = []
    for name in names:
        if name in contest.figures:
            cells.append(unit.show(contest.figures[name]))
        else:
            cells.append(contest.absent.get(name, "–"))
    ours_cell, theirs_cell = cells
    if not all(name in contest.figures for name in names):
        return Row(part, claim, ours_cell, theirs_cell, target=goal)

    our_figures = contest.figures[names[0]]
    their_figures = contest.figures[names[1]]
    ratios = [our / their for our, their in zip(our_figures, their_figures, strict=True)]
    ratio = statistics.median(ratios)
    spread = "" if len(ratios) == 1 else f" ({min(ratios):.2f}–{max(ratios):.2f})"
    reached = "–"
    if target is not None:
        reached = "yes" if target.is_reached(ratio) else "no"
    return Row(part, claim, ours_cell, theirs_cell, f"{ratio:.2f}{spread}", goal, reached)


@dataclass(frozen=True)
class Asked:
    """What the command was asked for."""

    # None: each part has its own number of rounds.
    rounds: int | None
    # The folder of MNIST's files.
    data_root: Path

    def rounds_or(self, default: int) -> int:
        return default if self.rounds is None else self.rounds


def _look(
    process: subprocess.Popen[bytes], reports: Path, *, at_hold: Callable[[int, list[int]], None], holding: int
) -> None:
    """Wait until so many hold still, look at them, and let them go on; return early where the command has ended."""
    files = list(reports.glob("*.json"))
    while len(files) < holding:
        if process.poll() is not None:
            return
        time.sleep(0.05)
        files = list(reports.glob("*.json"))
    at_hold(process.pid, [int(file.stem) for file in files])
    (reports / GO_ON).touch()


def _environment(reports: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "TERM": "xterm-256color", FOLDER: str(reports)}


def _terminal() -> tuple[int, int]:
    """Both ends of a terminal of 40 lines and 120 columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    return master, slave


def _drain(master: int, printed: deque[str]) -> None:
    # The kernel answers with an error once nobody has the other end any more.
    with suppress(OSError):
        while data := os.read(master, 65536):
            printed.append(data.decode(errors="replace"))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command and what it has started: launchers pass the first signal on, and get some time to."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_END_TIMEOUT_S)

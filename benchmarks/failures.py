"""Random kills, stops, hangs and delays of a rank: does the report name the right one, soon, and is nothing left?

    python -m benchmarks.failures --runs 100 --seed 0 [--processes 2-8] [--workers 2] [--only SIGKILL] [--timeout 8]

Each run trains a small model with the framework's command. One rank, drawn at random like everything else, causes
the fault in the drawn phase of the drawn step, and notes the time before. Then `failure.json` must name that rank, its
pid, what happened, the phase and the step (give or take one), at most 10 s after a death, or 10 s past the time-out
where the others had to wait; the exit status must be 1; and no process may be left. A rank that is late by less than
the time-out must do no harm, and be named if it was later than `launcher.late_after`.

Seconds are from the fault to the report, less the time-out where the others had to wait. A run that went wrong is
listed with the options that repeat it.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers import trouble
from tests.helpers.command import started_framework
from tests.helpers.trouble import EVERY, PHASES, Fault

ALLOWED_S = 10.0
LATE_AFTER_S = 1.0
# For a run without trouble: many ranks may share few cores.
_START_S = 240.0
_GONE_S = 5.0


class Expected(NamedTuple):
    """What `failure.json` must say of a fault."""

    kind: str
    signal: str | None = None
    # A part of the exception's text.
    exception: str | None = None
    # The others notice it only by the time-out.
    waits: bool = False


FAULTS = {
    "SIGKILL": Expected("signal", signal="SIGKILL"),
    "SIGSEGV": Expected("signal", signal="SIGSEGV"),
    "raise": Expected("exception", exception="the fault was raised"),
    "sys.exit": Expected("exception", exception="SystemExit: 3"),
    "os._exit": Expected("exit"),
    "sleep": Expected("hung", waits=True),
    "SIGSTOP": Expected("stopped", waits=True),
    "delay": Expected("none"),
}


@dataclass(frozen=True)
class Case:
    """One run."""

    seed: int
    num_processes: int
    fault: Fault
    # backend.timeout.
    timeout_s: float

    def __str__(self) -> str:
        fault = self.fault
        seconds = f" {fault.seconds:.1f} s" if fault.what == "delay" else ""
        where = f"rank {fault.rank} of {self.num_processes} in {fault.phase} of step {fault.step}"
        return f"seed {self.seed}: {fault.what}{seconds}, {where}"


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    case: Case
    # One line for each thing that wasn't as it must be.
    wrong: tuple[str, ...]
    # From the fault to the report; None if there was none.
    latency_s: float | None


def draw(seed: int, *, processes: tuple[int, int], whats: Sequence[str], timeout_s: float) -> Case:
    """Return the case of a seed: always the same one."""
    choose = random.Random(seed)
    num_processes = choose.randint(*processes)
    phase = choose.choice(PHASES)
    if phase in ("evaluate", "checkpoint"):
        step = choose.choice((EVERY, 2 * EVERY))
    else:
        # From 3 on: before the first step, the samples of two steps are loaded to check the data.
        step = choose.randint(3, 3 * EVERY - 1)
    what = choose.choice(list(whats))
    rank = choose.randrange(num_processes)
    seconds = 600.0
    if what == "delay":
        seconds = choose.uniform(0.3, 0.6) * timeout_s
    return Case(seed, num_processes, Fault(what, rank=rank, phase=phase, step=step, seconds=seconds), timeout_s)


def run(case: Case) -> Result:
    """Do it in a folder of its own, and judge it."""
    with tempfile.TemporaryDirectory(prefix="failures_", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        trouble.write_recipe(folder, case.fault)
        overrides = [
            "recipe=trouble",
            "launcher=local",
            f"topology.procs_per_node={case.num_processes}",
            f"backend.timeout={case.timeout_s}",
            f"launcher.late_after={LATE_AFTER_S}",
        ]
        with started_framework(*overrides, cwd=folder) as started:
            try:
                status = started.wait(timeout=_START_S + case.timeout_s + ALLOWED_S)
                wrong, latency_s = _judge(case, folder, status=status, printed=started.stderr())
                started.assert_all_gone(within_s=_GONE_S)
            # It is still running, or something is left.
            except AssertionError as error:
                return Result(case, (str(error),), None)
            if wrong:
                wrong.append(started.printed())
            return Result(case, tuple(wrong), latency_s)


def _judge(case: Case, folder: Path, *, status: int, printed: str) -> tuple[list[str], float | None]:
    done = trouble.done(folder)
    if done is None:
        return ["the rank never reached its fault"], None
    file = trouble.run_dir(folder) / "failure.json"
    if FAULTS[case.fault.what].kind == "none":
        return list(_wrong_without_failure(case, status=status, report=file, printed=printed)), None
    if not file.exists():
        return [f"exit status {status} and no failure.json"], None
    latency_s = file.stat().st_mtime - done["time"]
    if FAULTS[case.fault.what].waits:
        latency_s -= case.timeout_s
    wrong = list(wrong_in_report(case, json.loads(file.read_text())["first"], done=done))
    if status != 1:
        wrong.append(f"exit status {status}")
    if latency_s > ALLOWED_S:
        wrong.append(f"the report came after {latency_s:.1f} s")
    return wrong, latency_s


def _wrong_without_failure(case: Case, *, status: int, report: Path, printed: str) -> Iterator[str]:
    if status != 0:
        yield f"exit status {status}"
    if report.exists():
        yield f"a report: {report.read_text()}"
    is_told = re.search(rf"Rank {case.fault.rank} \(pid \d+\) is late", printed) is not None
    if not is_told and case.fault.seconds > LATE_AFTER_S + 1.0:
        yield f"nobody said that it was {case.fault.seconds:.1f} s late"


def wrong_in_report(case: Case, first: dict[str, Any], *, done: dict[str, Any]) -> Iterator[str]:
    """A line for everything in a report's `first` that differs from the fault. done: what the rank noted before it."""
    expected = FAULTS[case.fault.what]
    wanted = {
        "rank": done["rank"],
        "pid": done["pid"],
        "node": 0,
        "local_rank": done["rank"],
        "kind": expected.kind,
        "signal": expected.signal,
        "phase": case.fault.phase,
    }
    for key, value in wanted.items():
        if first[key] != value:
            yield f"{key} is {first[key]!r}, not {value!r}"
    if abs(first["step"] - case.fault.step) > 1:
        yield f"step is {first['step']}, not {case.fault.step}"
    if expected.exception is not None and expected.exception not in (first["exception"] or ""):
        yield f"exception is {first['exception']!r}"
    if expected.waits and not first["stacks"]:
        yield "no Python stacks of the rank, which lived"


def run_all(cases: Sequence[Case], *, workers: int) -> Iterator[Result]:
    """The results, in the order of the cases, each as soon as it can be had."""
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(run, cases)


def table(results: Sequence[Result]) -> str:
    """Markdown: for every fault how many were right, and how long the slowest report took."""
    lines = ["| what one rank does | runs | right | slowest report, s |", "|---|---|---|---|"]
    for what in [*FAULTS, "all"]:
        some = list(results)
        if what != "all":
            some = [result for result in results if result.case.fault.what == what]
        if some:
            right = sum(not result.wrong for result in some)
            latencies_s = [result.latency_s for result in some if result.latency_s is not None]
            slowest = f"{max(latencies_s):.1f}" if latencies_s else "–"
            lines.append(f"| {what} | {len(some)} | {right} | {slowest} |")
    return "\n".join(lines)


def main() -> int:
    """Exit status 1 if any run was wrong."""
    asked = _arguments()
    whats = [asked.only] if asked.only else list(FAULTS)
    seeds = range(asked.seed, asked.seed + asked.runs)
    cases = [draw(seed, processes=asked.processes, whats=whats, timeout_s=asked.timeout) for seed in seeds]
    results = []
    for result in run_all(cases, workers=asked.workers):
        results.append(result)
        took = "" if result.latency_s is None else f" {result.latency_s:.1f} s"
        word = "WRONG" if result.wrong else "right"
        print(f"{word} {result.case}{took}", flush=True)
        for line in result.wrong:
            print(f"  {line}", flush=True)
    print(table(results))
    same = f"--processes {'-'.join(map(str, asked.processes))} --timeout {asked.timeout:g}"
    if asked.only:
        same += f" --only {asked.only}"
    wrong = [result.case for result in results if result.wrong]
    for case in wrong:
        print(f"wrong: {case}: python -m benchmarks.failures --runs 1 --seed {case.seed} {same}")
    return 1 if wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next one has the next number")
    parser.add_argument("--processes", type=_range, default=(2, 8), help="how many ranks, from-to")
    parser.add_argument("--workers", type=int, default=1, help="runs at the same time")
    parser.add_argument("--only", choices=FAULTS, help="one kind of fault")
    parser.add_argument("--timeout", type=float, default=8.0, help="backend.timeout in seconds")
    return parser.parse_args()


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last or first)


if __name__ == "__main__":
    sys.exit(main())

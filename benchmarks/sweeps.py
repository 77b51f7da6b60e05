"""Sweeps of 24 toy trials on the CPU: trials at a time, the CPU time of a trial, and how long 200 trials are checked.

    python -m benchmarks.sweeps [--rounds 3]

A trial is `recipe=toy` with its defaults. CPU time is that of the command and all its processes, user and system. It
is taken of three commands, so that the differences tell where it goes: `job=plan`, which composes and checks all trials
and starts nothing; a sweep of one trial, which also starts the server and imports torch; and the whole sweep.
"""

from __future__ import annotations

import resource
import statistics
import sys

from benchmarks.contest import Asked, Contest, Contestant, Row, Target, Unit, compare, ours, run, take_turns

ROUNDS = 3
TRIALS = 24
MANY_TRIALS = 200
TARGET_MANY_S = 10.0
TARGET_CPU_S = 0.8
_SECONDS = Unit("s")

_TWO = "two at a time"
_ONE = "one at a time"
_PLANNED = f"{TRIALS} planned"
_SINGLE = "a single one"
_MANY = f"{MANY_TRIALS} planned"


def sweep(name: str, trials: int, *overrides: str) -> Contestant:
    return ours(name, "-m", "recipe=toy", f"seed=range({trials})", *overrides)


def contestants() -> list[Contestant]:
    return [
        sweep(_TWO, TRIALS, "sweep.jobs=2"),
        sweep(_ONE, TRIALS, "sweep.jobs=1"),
        sweep(_PLANNED, TRIALS, "job=plan"),
        sweep(_SINGLE, 1, "sweep.jobs=1"),
        sweep(_MANY, MANY_TRIALS, "job=plan"),
    ]


def measure(contestant: Contestant) -> dict[str, float]:
    before_s = _cpu_s()
    outcome = run(contestant, reports=False)
    return {"wall": outcome.seconds, "cpu": _cpu_s() - before_s}


def rows(asked: Asked) -> list[Row]:
    contests = take_turns(contestants(), asked.rounds_or(ROUNDS), measure)
    wall = contests.get("wall")
    claim = f"{TRIALS} toy trials, {_TWO} ÷ {_ONE}"
    table = [compare("sweeps", claim, wall, (_TWO, _ONE), unit=_SECONDS, target=Target(0.58))]

    seconds = wall.figures.get(_MANY, []) if wall is not None else []
    table.append(_limited(f"{MANY_TRIALS} toy trials composed and checked", seconds, limit_s=TARGET_MANY_S))
    return table + _cpu_rows(contests.get("cpu"))


def _cpu_rows(cpu: Contest | None) -> list[Row]:
    """Return the CPU time of a trial in the whole sweep, and its parts."""
    if cpu is None or not {_TWO, _PLANNED, _SINGLE} <= cpu.figures.keys():
        return [Row("sweeps", "CPU time of a toy trial", "failed", "–")]
    whole = cpu.figures[_TWO]
    planned = cpu.figures[_PLANNED]
    single = cpu.figures[_SINGLE]
    of_a_trial = [seconds / TRIALS for seconds in whole]
    composing = [seconds / TRIALS for seconds in planned]
    # Both have started a server, and composed a trial.
    training = [(all_s - one_s) / (TRIALS - 1) for all_s, one_s in zip(whole, single, strict=True)]
    return [
        _limited("CPU time of a toy trial", of_a_trial, limit_s=TARGET_CPU_S),
        _limited("… of which starting the command, composing and checking all", composing),
        _limited("… of each trial but the first", training),
        _limited("CPU time of a sweep of one trial", single),
    ]


def _limited(claim: str, seconds: list[float], *, limit_s: float | None = None) -> Row:
    """Return the row of a figure that is compared with a limit, not with another contestant."""
    if not seconds:
        return Row("sweeps", claim, "failed", "–")
    shown = _SECONDS.show(seconds)
    if limit_s is None:
        return Row("sweeps", claim, shown, "–")
    reached = "yes" if statistics.median(seconds) <= limit_s else "no"
    return Row("sweeps", claim, shown, "–", target=f"≤ {limit_s:g} s", reached=reached)


def _cpu_s() -> float:
    """Return the CPU time of all processes that this one has started and waited for, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["--only", "sweeps", "--print", *sys.argv[1:]]))

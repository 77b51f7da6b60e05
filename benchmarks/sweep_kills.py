"""Random kills of a whole sweep: does one that is killed and resumed, time and again, end as if it never had been?

    python -m benchmarks.sweep_kills [--kills 10] [--seed 0] [--only grid,search]

A sweep of 12 toy trials, two at a time, is started. At a random moment all of its processes get SIGKILL at once, and
`-m resume=SWEEP` continues it, until it was killed so often; then it runs to its end. A grid must end with the table of
one that wasn't disturbed, run durations apart. A search must end with as many trials as asked for, each of them told to
Optuna once, and with the results that finished trials had before each kill. After each kill, its journal also gets the
start of a line, as if it had been killed while it wrote that. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import csv
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import optuna

from benchmarks.arguments import some_of
from framework.sweeps.journal import open_storage
from tests.helpers.command import Started, started_framework

TRIALS = 12
_TIMEOUT_S = 300.0
# The command is killed so long after its start, at least and at most.
_KILL_AFTER_S = (0.5, 12.0)
_TORN_LINE = '{"op_code": 5, "worker_id": "'

_TOY = ("-m", "recipe=toy", "trainer.gpus=0", "trainer.max_epochs=40", "checkpoint.every_n_epochs=1", "sweep.jobs=2")
SWEEPS = {
    "grid": (*_TOY, f"optimizer.lr={','.join(str(round(0.002 * 1.4**i, 5)) for i in range(TRIALS))}"),
    "search": (
        *_TOY,
        "optimizer.lr=tag(log,interval(1e-4,0.1))",
        "sweep=optuna",
        f"sweep.n_trials={TRIALS}",
        "sweep.sampler._target_=optuna.samplers.RandomSampler",
        "sweep.pruner=null",
    ),
}


def table(sweep: Path) -> list[dict[str, str]]:
    """Return the lines of results.csv, without how long trials took."""
    with (sweep / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    for line in lines:
        del line["seconds"], line["run"]
    return lines


def finished(lines: Sequence[dict[str, str]]) -> dict[str, dict[str, str]]:
    return {line["trial"]: line for line in lines if line["status"] == "finished"}


def mistakes(kind: str, undisturbed: Path, killed: Path, *, before: Sequence[dict[str, dict[str, str]]]) -> list[str]:
    """Return what is wrong with a sweep that was killed. before: the finished trials at each kill."""
    end = table(killed)
    found = []
    if [line["status"] for line in end] != ["finished"] * TRIALS:
        found.append(f"statuses: {[line['status'] for line in end]}")
    for known in before:
        for trial, line in known.items():
            if finished(end).get(trial) != line:
                found.append(f"trial {trial} was {line} before a kill, and is {finished(end).get(trial)}")
    if kind == "grid" and end != table(undisturbed):
        found.append(f"the table differs: {end}\nundisturbed: {table(undisturbed)}")
    if kind == "search":
        study = optuna.load_study(study_name=None, storage=open_storage(killed / "study.log", lock=None))
        states = [trial.state.name for trial in study.get_trials()]
        if states != ["COMPLETE"] * TRIALS:
            found.append(f"Optuna was told: {states}")
    return found


def tear(journal: Path) -> None:
    """Append the start of a line to the journal of a search, if it is there and whole."""
    if journal.exists() and journal.read_bytes().endswith(b"\n"):
        with journal.open("a") as file:
            file.write(_TORN_LINE)


def run_to_end(arguments: Sequence[str], folder: Path) -> None:
    with started_framework(*arguments, cwd=folder) as started:
        status = started.wait(timeout=_TIMEOUT_S)
        if status != 0:
            raise RuntimeError(f"exit status {status}\n{started.printed()}")


def kill_all(started: Started) -> None:
    """Kill the command and all that it has started, at once."""
    for process in started.processes():
        process.send_signal(signal.SIGKILL)
    started.assert_all_gone(within_s=20.0)


def sweep_in(folder: Path) -> Path | None:
    """Return the sweep in an outputs folder, once it has its plan."""
    plans = list(folder.glob("outputs/multirun/*/sweep.json"))
    return plans[0].parent if plans else None


def check(kind: str, *, kills: int, moments: random.Random) -> list[str]:
    """Run a sweep undisturbed, and one that is killed; return what is wrong with that one."""
    with tempfile.TemporaryDirectory(prefix="sweep_kills_") as name:
        undisturbed = Path(name, "undisturbed")
        disturbed = Path(name, "disturbed")
        undisturbed.mkdir()
        disturbed.mkdir()
        run_to_end(SWEEPS[kind], undisturbed)
        whole = sweep_in(undisturbed)
        assert whole is not None

        before: list[dict[str, dict[str, str]]] = []
        for number in range(kills):
            sweep = sweep_in(disturbed)
            # It may have been killed before it was there.
            arguments = SWEEPS[kind] if sweep is None else ("-m", f"resume={sweep}")
            with started_framework(*arguments, cwd=disturbed) as started:
                after_s = moments.uniform(*_KILL_AFTER_S)
                time.sleep(after_s)
                kill_all(started)
            sweep = sweep_in(disturbed)
            known = {}
            if sweep is not None:
                tear(sweep / "study.log")
                if (sweep / "results.csv").exists():
                    known = finished(table(sweep))
            before.append(known)
            print(f"  kill {number + 1} after {after_s:.1f} s: {len(known)} of {TRIALS} in the table", flush=True)
        sweep = sweep_in(disturbed)
        run_to_end(SWEEPS[kind] if sweep is None else ("-m", f"resume={sweep}"), disturbed)
        sweep = sweep_in(disturbed)
        assert sweep is not None
        return mistakes(kind, whole, sweep, before=before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=some_of(tuple(SWEEPS)), default=list(SWEEPS))
    asked = parser.parse_args()
    has_failed = False
    for kind in asked.only:
        print(kind, flush=True)
        found = check(kind, kills=asked.kills, moments=random.Random(f"{asked.seed} {kind}"))
        has_failed |= bool(found)
        print("\n".join(found) or f"{kind}: as if it had never been killed, {asked.kills} kills", flush=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())

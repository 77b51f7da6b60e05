"""Random kills: does a run that is killed at any moment, and started again, end as if it never had been?

    python -m benchmarks.resume --kills 200 --seed 0 [--recipes toy,digits,mnist] [--processes 1-4] [--workers 1]
    python -m benchmarks.resume compare RUN OTHER_RUN

Each case trains a few steps with the framework's command and `resume=auto`. Its recipe, number of processes, set-up and
moments are drawn: at any time from the command's start on, once training is under way, or while a checkpoint is being
written. Then every process of it gets SIGKILL at once, and the same command is started again; half of the cases are
killed a second time. What is there at the end is compared with a run that wasn't interrupted, bit for bit: the last
checkpoint (weights, optimizer, schedule, callbacks, progress, every rank's generators), every logged number in
metrics.jsonl and TensorBoard, and which checkpoints are kept.

`compare` tells the first difference of two runs with +callbacks.recorder._target_=tests.helpers.recorder.Recorder.
MNIST's files are looked for in --data-root, by default the folder that FRAMEWORK_TEST_DATA names; without either they
are downloaded.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from benchmarks.arguments import some_of
from tests.helpers import exact
from tests.helpers.command import Started, started_framework
from tests.helpers.records import compare

# For one command: many ranks may share few cores.
_TIMEOUT_S = 300.0
_GONE_S = 10.0
_POLL_S = 0.002

EVERY = 3
"""Steps between two checkpoints."""

COMMON = ("trainer.gpus=0", "logger=[jsonl,tensorboard]", "resume=auto", f"checkpoint.every_n_steps={EVERY}")
RECIPES = {
    "toy": ("trainer.max_steps=90", "trainer.log_every_n_steps=7", "trainer.val_check_interval=20"),
    "digits": ("trainer.max_steps=14", "trainer.log_every_n_steps=4", "trainer.val_check_interval=5"),
    "mnist": ("trainer.max_steps=14", "trainer.log_every_n_steps=4", "trainer.val_check_interval=5"),
}
SETUPS = {
    "plain": (),
    "averaged": ("optimizer=adam", "trainer.accumulate_grad_batches=2", "callbacks=[ema]", "scheduler=cosine"),
    "workers": ("optimizer=sgd_momentum", "data.num_workers=2", "scheduler=plateau", "callbacks=[early_stopping]"),
}
SHORT = ("data.global_batch_size=48", "trainer.limit_val_batches=2", "trainer.limit_test_batches=2")
# With the toy's own learning rate, momentum would let its loss overflow.
LEARNING_RATE = "optimizer.lr=0.001"
MOMENTS = ("any time", "training", "saving")


@dataclass(frozen=True)
class Setup:
    """What is trained; runs of equal ones must end equal."""

    recipe: str
    num_processes: int
    name: str

    def overrides(self, data_root: Path | None) -> list[str]:
        processes = (f"topology.procs_per_node={self.num_processes}",)
        own = [*SETUPS[self.name], LEARNING_RATE, *RECIPES[self.recipe], *SHORT, *COMMON, *processes]
        root = [f"data.root={data_root}"] if self.recipe == "mnist" and data_root is not None else []
        return [f"recipe={self.recipe}", *own, *root]

    def __str__(self) -> str:
        return f"{self.recipe} ({self.name}) on {self.num_processes}"


@dataclass(frozen=True)
class Kill:
    """moment: one of MOMENTS. share: how far into the run, from 0 to 1."""

    moment: str
    share: float


@dataclass(frozen=True)
class Case:
    """One run that is killed once or more."""

    seed: int
    setup: Setup
    kills: tuple[Kill, ...]

    def __str__(self) -> str:
        kills = ", then ".join(f"{kill.moment} {kill.share:.2f}" for kill in self.kills)
        return f"seed {self.seed}: {self.setup}, killed: {kills}"


@dataclass(frozen=True)
class Result:
    """wrong: a line for each thing that wasn't as in the uninterrupted run. kills: how many came before the end."""

    case: Case
    wrong: tuple[str, ...]
    kills: int


def draw(seed: int, *, recipes: Sequence[str], processes: tuple[int, int]) -> Case:
    """The case of a seed: always the same one."""
    choose = random.Random(seed)
    setup = Setup(choose.choice(list(recipes)), choose.randint(*processes), choose.choice(list(SETUPS)))
    num_kills = choose.choice((1, 2))
    kills = [Kill(choose.choice(MOMENTS), choose.random()) for _ in range(num_kills)]
    return Case(seed, setup, tuple(kills))


@dataclass(frozen=True)
class Whole:
    """An uninterrupted run. seconds: what its command took."""

    run_dir: Path
    seconds: float
    steps: int


@final
@dataclass
class Wholes:
    """The uninterrupted run of every set-up, made when it is first asked for; for several threads."""

    folder: Path
    data_root: Path | None
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _locks: dict[Setup, threading.Lock] = field(default_factory=dict)
    _done: dict[Setup, Whole] = field(default_factory=dict)

    def of(self, setup: Setup) -> Whole:
        with self._guard:
            lock = self._locks.setdefault(setup, threading.Lock())
        with lock:
            if setup not in self._done:
                self._done[setup] = self._train(setup)
            return self._done[setup]

    def _train(self, setup: Setup) -> Whole:
        folder = self.folder / f"{setup.recipe}_{setup.name}_{setup.num_processes}"
        folder.mkdir()
        began = time.monotonic()
        with started_framework(*setup.overrides(self.data_root), cwd=folder) as started:
            status = started.wait(timeout=_TIMEOUT_S)
            if status != 0:
                raise AssertionError(f"the uninterrupted run of {setup} ended with {status}\n{started.printed()}")
        seconds = time.monotonic() - began
        return Whole(_run_dir(folder), seconds, steps=_last_checkpoint(folder))


def run(case: Case, wholes: Wholes) -> Result:
    """Do it in a folder of its own, and judge it."""
    kills = 0
    try:
        whole = wholes.of(case.setup)
        with tempfile.TemporaryDirectory(prefix="resume_", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            for kill in case.kills:
                kills += _kill(case.setup, kill, whole, folder=folder, data_root=wholes.data_root)
            # If all kills came too late, it has finished, and another command would be another run.
            if not _is_finished(folder):
                with started_framework(*case.setup.overrides(wholes.data_root), cwd=folder) as started:
                    status = started.wait(timeout=_TIMEOUT_S)
                    if status != 0:
                        return Result(case, (f"exit status {status}", started.printed()), kills)
            wrong = differences(whole.run_dir, _run_dir(folder))
            return Result(case, tuple(wrong), kills)
    # Whatever it is, the other cases still have to be run.
    except Exception as error:
        return Result(case, (f"{type(error).__name__}: {error}",), kills)


def differences(one: Path, other: Path) -> Iterator[str]:
    """A line for everything in which two finished runs differ."""
    yield from exact.differences(one, other)
    kept = [_kept(run_dir) for run_dir in (one, other)]
    if kept[0] != kept[1]:
        yield f"checkpoints: {kept[0]} and {kept[1]}"


def _kill(setup: Setup, kill: Kill, whole: Whole, *, folder: Path, data_root: Path | None) -> bool:
    """Start the command and kill all of it at the moment; gives whether it was still there."""
    if _is_finished(folder):
        return False
    with started_framework(*setup.overrides(data_root), cwd=folder) as started:
        if kill.moment == "any time":
            _wait(started, until=_after(kill.share * whole.seconds))
        else:
            step = round(kill.share * (whole.steps - 2 * EVERY))
            _wait(started, until=lambda: _last_checkpoint(folder) >= max(step, EVERY))
            if kill.moment == "saving":
                _wait(started, until=lambda: any(folder.glob("outputs/*/*/checkpoints/.saving_step*")))
            else:
                # Anywhere between two checkpoints.
                time.sleep(kill.share % 0.1)
        was_there = started.process.poll() is None
        if was_there:
            # The command leads a session and a group of its own.
            os.killpg(started.process.pid, signal.SIGKILL)
            started.process.wait()
        started.assert_all_gone(within_s=_GONE_S)
        return was_there


def _wait(started: Started, *, until: Callable[[], bool]) -> None:
    """Return when it is so, or the command has ended."""
    deadline = time.monotonic() + _TIMEOUT_S
    while not until() and started.process.poll() is None:
        if time.monotonic() > deadline:
            raise AssertionError(f"still running after {_TIMEOUT_S} s\n{started.printed()}")
        time.sleep(_POLL_S)


def _after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def _last_checkpoint(folder: Path) -> int:
    """The step of the last one; 0 before the first."""
    found = folder.glob("outputs/*/*/checkpoints/step_*")
    return max((int(path.name.partition("_")[2]) for path in found), default=0)


def _is_finished(folder: Path) -> bool:
    return any('"status": "finished"' in file.read_text() for file in folder.glob("outputs/*/*/run.json"))


def _run_dir(folder: Path) -> Path:
    """The one run there is with a result; a beginning that was killed before it could be resumed has none."""
    (run_dir,) = {file.parent for file in folder.glob("outputs/*/*/run.json") if '"finished"' in file.read_text()}
    return run_dir


def _kept(run_dir: Path) -> dict[str, str]:
    """Name of each checkpoint and pointer → what a pointer names. What a kill left under a hidden name isn't one."""
    entries = (run_dir / "checkpoints").iterdir()
    kept: dict[str, str] = {}
    for path in sorted(entries):
        if not path.name.startswith("."):
            target = ""
            if path.is_symlink():
                target = str(path.readlink())
            kept[path.name] = target
    return kept


def table(results: Sequence[Result]) -> str:
    """Markdown: for every recipe and number of processes how many cases there were and how many ended equal."""
    groups: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        setup = result.case.setup
        groups.setdefault((setup.recipe, setup.num_processes), []).append(result)

    lines = ["| recipe | processes | runs | kills | identical |", "|---|---|---|---|---|"]
    for (recipe, num_processes), group in sorted(groups.items()):
        lines.append(_line(recipe, str(num_processes), group))
    lines.append(_line("all", "", results))
    return "\n".join(lines)


def _line(recipe: str, processes: str, results: Sequence[Result]) -> str:
    kills = sum(result.kills for result in results)
    same = sum(not result.wrong for result in results)
    return f"| {recipe} | {processes} | {len(results)} | {kills} | {same} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 if any run ended otherwise."""
    asked = _arguments(argv)
    if asked.runs:
        difference = compare(*asked.runs)
        print(difference or "The records agree.")
        return 0 if difference is None else 1
    seeds = range(asked.seed, asked.seed + asked.kills)
    cases = [draw(seed, recipes=asked.recipes, processes=asked.processes) for seed in seeds]
    results = []
    with tempfile.TemporaryDirectory(prefix="resume_whole_") as name:
        wholes = Wholes(Path(name), asked.data_root)
        with ThreadPoolExecutor(asked.workers) as pool:
            for result in pool.map(lambda case: run(case, wholes), cases):
                results.append(result)
                word = "WRONG" if result.wrong else "same "
                print(f"{word} {result.case}", flush=True)
                for line in result.wrong:
                    print(f"  {line}", flush=True)
    print(table(results))
    same = f"--recipes {','.join(asked.recipes)} --processes {'-'.join(map(str, asked.processes))}"
    wrong = [result.case for result in results if result.wrong]
    for case in wrong:
        print(f"wrong: {case}: python -m benchmarks.resume --kills 1 --seed {case.seed} {same}")
    return 1 if wrong else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    if given[:1] == ["compare"]:
        parser.add_argument("runs", type=Path, nargs=2, metavar="RUN")
        return parser.parse_args(given[1:])
    known = os.environ.get("FRAMEWORK_TEST_DATA")
    parser.add_argument("--kills", type=int, default=200, help="runs that are killed, each at least once")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next one has the next number")
    parser.add_argument(
        "--recipes", type=some_of(RECIPES), default=list(RECIPES), help="drawn from these: toy,digits,mnist"
    )
    parser.add_argument("--processes", type=_range, default=(1, 4), help="how many ranks, from-to")
    parser.add_argument("--workers", type=int, default=1, help="runs at the same time")
    parser.add_argument("--data-root", type=Path, default=Path(known).resolve() if known else None)
    parser.set_defaults(runs=[])
    return parser.parse_args(given)


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last or first)


if __name__ == "__main__":
    sys.exit(main())

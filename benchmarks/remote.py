"""Kills in the middle of an upload: does the run, resumed by its URL on a machine that has nothing of it, end the same?

    python -m benchmarks.remote --kills 100 --seed 0
    python -m benchmarks.remote --step-times 10

Each run trains the toy recipe with `path.outputs` in a bucket of an S3 server on this machine (moto's), which answers
every upload a little later, as a distant one would. The first files of a checkpoint are waited for: of the first,
second or third one that the command uploads, as drawn. Then, after a random part of the time that its upload takes, the
command gets SIGKILL; it trains in its own process. The kill is counted if the bucket has a checkpoint without its
manifest by then, or the cache one that isn't in the bucket. The run is resumed by its URL, with an empty cache; that is
killed, too, and so on, four times.

The last command trains to the end. Its last checkpoint (weights, optimizer, schedule, callbacks, progress, generators)
and every logged number must be those of a run that wasn't interrupted, bit for bit, and the bucket must have that
checkpoint. A test that is logged twice, with the same numbers, counts once.

`--step-times` compares steps per second of the digits recipe with and without the mirror, in interleaved runs, with the
ranks in processes of their own and in the command's.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any, final
from uuid import uuid4

from tests.helpers import exact
from tests.helpers.results import saved
from tests.helpers.s3 import S3, s3_server

_TIMEOUT_S = 300.0
_POLL_S = 0.05
# By which the server answers an upload later.
_DELAY_S = 0.05
# Of one run.
_KILLS = 4
# Of a checkpoint: its files, the records beside it, and its manifest.
_UPLOADS = 10

TRAINING = (
    "recipe=toy",
    "launcher=in_process",
    "trainer.gpus=0",
    "logger=jsonl",
    "trainer.max_steps=100",
    "trainer.log_every_n_steps=7",
    "trainer.val_check_interval=40",
    "trainer.limit_val_batches=2",
    "trainer.limit_test_batches=2",
    "checkpoint.every_n_steps=20",
    "optimizer=adam",
    "callbacks=[ema]",
    "+callbacks.slow._target_=recipes.slow.Slow",
)
# Long enough for the mirror to look several times.
LONG = (
    "recipe=digits",
    "trainer.gpus=0",
    "logger=jsonl",
    "trainer.max_steps=4000",
    "trainer.max_epochs=null",
    "trainer.log_every_n_steps=200",
    "trainer.limit_val_batches=0",
    "trainer.limit_test_batches=0",
    "trainer.progress=false",
    "checkpoint.every_n_steps=500",
)
# As slow as training is, compared with the time between two looks of the mirror.
SLOW = """
import time
import framework


class Slow(framework.Callback):
    def on_train_step_end(self, info):
        time.sleep(0.06)
"""


@dataclass(frozen=True)
class Kill:
    # It comes while the checkpoint with this number is uploaded, counted from 1 in this command.
    checkpoint: int
    # After this part of the time that its upload takes.
    share: float


@dataclass(frozen=True)
class Case:
    """One run that is killed several times."""

    seed: int
    kills: tuple[Kill, ...]

    def __str__(self) -> str:
        kills = ", ".join(f"{kill.checkpoint} at {kill.share:.2f}" for kill in self.kills)
        return f"seed {self.seed}, killed in checkpoints {kills}"


@dataclass(frozen=True)
class Result:
    case: Case
    # A line for each thing that wasn't as in the uninterrupted run.
    wrong: tuple[str, ...]
    # How many kills came while a checkpoint was being uploaded, and how many after that.
    num_counted: int
    num_late: int


def draw(seed: int) -> Case:
    """Return the case of a seed, always the same one."""
    choose = random.Random(seed)
    kills = [Kill(choose.choice((1, 2, 3)), choose.random()) for _ in range(_KILLS)]
    return Case(seed, tuple(kills))


@final
class Remote:
    """The server, and the run that isn't interrupted."""

    def __init__(self, s3: S3, folder: Path) -> None:
        self._s3 = s3
        self._folder = folder
        (folder / "recipes").mkdir()
        (folder / "recipes" / "slow.py").write_text(SLOW)
        _train(*TRAINING, "path.outputs=whole", cwd=folder, s3=s3)
        self._whole = _run_in(folder / "whole")
        s3.set_fault(requests="^PUT", delay_s=_DELAY_S)

    def run(self, case: Case) -> Result:
        """Do a case, and judge it."""
        bucket = self._s3.new_bucket()
        url = f"s3://{bucket}/runs"
        counted = []
        with tempfile.TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True) as name:
            start: tuple[str, ...] = (*TRAINING, f"path.outputs={url}")
            for number, kill in enumerate(case.kills):
                cache = Path(name, f"machine_{number}")
                self._kill(kill, bucket, (*start, f"path.cache={cache}"))
                run = _run_in(cache / "s3" / bucket / "runs")
                here = {path.name for path in (run / "checkpoints").glob("step_*")}
                complete = self._complete(bucket)
                counted.append(bool((self._present(bucket) | here) - complete))
                start = (f"resume={url}/toy/{run.name}", "trust=true")

            cache = Path(name, "last_machine")
            _train(*start, f"path.cache={cache}", cwd=self._folder, s3=self._s3)
            run = _run_in(cache / "s3" / bucket / "runs")
            wrong = exact.tree_differences(saved(self._whole), saved(run))
            if _numbers(run) != _numbers(self._whole):
                wrong.append(f"other numbers were logged: {_numbers(run)} instead of {_numbers(self._whole)}")
            last = (run / "checkpoints" / "last").resolve().name
            if last not in self._complete(bucket):
                wrong.append(f"the bucket lacks {last}")
            return Result(case, tuple(wrong), num_counted=sum(counted), num_late=counted.count(False))

    def _kill(self, kill: Kill, bucket: str, arguments: Sequence[str]) -> None:
        before = self._present(bucket)
        begun: set[str] = set()

        def is_uploading() -> bool:
            begun.update(self._present(bucket) - before)
            return len(begun) >= kill.checkpoint

        with _started(arguments, cwd=self._folder, s3=self._s3) as command:
            _wait(command, until=is_uploading)
            time.sleep(kill.share * _UPLOADS * _DELAY_S)

    def _names(self, bucket: str) -> list[str]:
        names: list[str] = self._s3.filesystem().find(bucket)
        return names

    def _present(self, bucket: str) -> set[str]:
        """Return the checkpoints of which the bucket has something."""
        return {Path(name).parent.name for name in self._names(bucket) if "/checkpoints/step_" in name}

    def _complete(self, bucket: str) -> set[str]:
        return {Path(name).parent.name for name in self._names(bucket) if name.endswith("/manifest.json")}


@contextmanager
def _started(arguments: Sequence[str], *, cwd: Path, s3: S3) -> Iterator[BaseProcess]:
    """Run a command, in a process that has torch already; at the end, SIGKILL all of it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["framework.engine.train", "framework.command.compose", "s3fs"])
    log = cwd / f"{uuid4().hex}.log"
    command = context.Process(target=_command, args=(list(arguments), str(cwd), str(log), dict(s3.env)))
    command.start()
    try:
        yield command
    except AssertionError as error:
        raise AssertionError(f"{error}\n{log.read_text()}") from error
    finally:
        assert command.pid is not None
        # It may have ended, or not have begun.
        with suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGKILL)
        command.kill()
        command.join()


def _command(arguments: list[str], folder: str, log: str, env: dict[str, str]) -> None:
    """Do what `python -m framework` does in this folder."""
    os.setsid()
    os.environ.update(env)
    os.chdir(folder)
    sys.path.insert(0, folder)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    from framework.command import compose

    sys.exit(compose.main(arguments))


def _train(*arguments: str, cwd: Path, s3: S3) -> None:
    with _started(arguments, cwd=cwd, s3=s3) as command:
        command.join(_TIMEOUT_S)
        if command.exitcode != 0:
            raise AssertionError(f"exit status {command.exitcode}")


def _wait(command: BaseProcess, *, until: Callable[[], bool]) -> None:
    """Return when it is so, or the command has ended."""
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not until() and command.is_alive():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"still running after {_TIMEOUT_S} s")
        time.sleep(_POLL_S)


def _numbers(run: Path) -> list[dict[str, Any]]:
    """Return the logged numbers. What is killed between its test and the record of it tests again: that counts once."""
    rows: list[dict[str, Any]] = []
    for row in exact.numbers(run):
        is_of_test = any(name.startswith("test/") for name in row)
        if not is_of_test or row not in rows:
            rows.append(row)
    return rows


def _run_in(outputs: Path) -> Path:
    (run,) = (outputs / "toy").glob("[!.]*")
    return run


def table(results: Sequence[Result]) -> str:
    """Return Markdown: how many runs ended the same, and how many kills they had."""
    num_counted = sum(result.num_counted for result in results)
    num_late = sum(result.num_late for result in results)
    num_same = sum(not result.wrong for result in results)
    lines = [
        "| runs | killed in an upload | killed after it | identical runs |",
        "|---|---|---|---|",
        f"| {len(results)} | {num_counted} | {num_late} | {num_same} |",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 if any run ended otherwise."""
    asked = _arguments(argv)
    if asked.step_times:
        with s3_server() as s3, tempfile.TemporaryDirectory(prefix="remote_") as name:
            print(step_times(s3, Path(name), rounds=asked.step_times))
        return 0
    seeds = range(asked.seed, asked.seed + math.ceil(asked.kills / _KILLS))
    results: list[Result] = []
    with s3_server() as s3, tempfile.TemporaryDirectory(prefix="remote_") as name:
        remote = Remote(s3, Path(name))
        with ThreadPoolExecutor(asked.workers) as pool:
            for result in pool.map(lambda seed: _judged(remote, draw(seed)), seeds):
                results.append(result)
                word = "WRONG" if result.wrong else "same "
                print(f"{word} {result.case}; {result.num_counted} in an upload", flush=True)
                for line in result.wrong:
                    print(f"  {line}", flush=True)
    print(table(results))
    return 1 if any(result.wrong for result in results) else 0


def step_times(s3: S3, folder: Path, *, rounds: int) -> str:
    """Return Markdown: steps per second with and without the mirror, the medians of runs that take turns."""
    lines = [
        "| launcher | without the mirror, steps/s | with it | median ratio of the pairs |",
        "|---|---|---|---|",
    ]
    for launcher in ("local", "in_process"):
        without: list[float] = []
        mirrored: list[float] = []
        for number in range(rounds):
            arguments = (*LONG, f"launcher={launcher}", f"path.cache={folder / 'cache'}")
            outputs = folder / f"{launcher}_{number}"
            _train(*arguments, f"path.outputs={outputs}", cwd=folder, s3=s3)
            without.append(_speed(outputs))
            bucket = s3.new_bucket()
            _train(*arguments, f"path.outputs=s3://{bucket}/runs", cwd=folder, s3=s3)
            mirrored.append(_speed(folder / "cache" / "s3" / bucket / "runs"))
        ratio = median(there / here for here, there in zip(without, mirrored, strict=True))
        lines.append(f"| {launcher} | {median(without):.0f} | {median(mirrored):.0f} | {ratio:.3f} |")
    return "\n".join(lines)


def _speed(outputs: Path) -> float:
    """Return the steps per second of the one run in a folder; the first rows have the start of training."""
    (file,) = outputs.glob("digits/[!.]*/metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    speeds = [row["train/steps_per_s"] for row in rows if "train/steps_per_s" in row]
    return median(speeds[2:])


def _judged(remote: Remote, case: Case) -> Result:
    try:
        return remote.run(case)
    # Whatever it is, the other cases still have to be run.
    except Exception as error:
        return Result(case, (f"{type(error).__name__}: {error}",), num_counted=0, num_late=0)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help=f"{_KILLS} of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next one has the next number")
    parser.add_argument("--step-times", type=int, metavar="ROUNDS", help="compare step times instead")
    parser.add_argument("--workers", type=int, default=1, help="runs at the same time")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

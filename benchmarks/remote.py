"""Kills in the middle of an upload: does the run, resumed by its URL on a machine that has nothing of it, end the same?

    python -m benchmarks.remote --kills 100 --seed 0

Each case trains the toy recipe with `path.outputs` in a bucket of an S3 server on this machine (moto's), which answers
every upload a little later, as a distant one would. A checkpoint's first files are waited for: its first, second or
third one, as drawn. Then, after a random part of the time that its upload takes, every process of the command gets
SIGKILL at once. The case counts if the bucket has a checkpoint without its manifest by then, or the cache one that
isn't in the bucket.

The run is then resumed by its URL with an empty cache, to its end. Its last checkpoint (weights, optimizer, schedule,
callbacks, progress, generators) and every logged number must be those of a run that wasn't interrupted, bit for bit,
and the bucket must have that checkpoint.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from tests.helpers import exact
from tests.helpers.command import Started, started_framework
from tests.helpers.s3 import S3, s3_server

_TIMEOUT_S = 300.0
_GONE_S = 10.0
_POLL_S = 0.01
# By which the server answers an upload later.
_DELAY_S = 0.05
# Of a checkpoint: its files, the records beside it, and its manifest.
_UPLOADS = 10

TRAINING = (
    "recipe=toy",
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
# As slow as training is, compared with the time between two looks of the mirror.
SLOW = """
import time
import framework


class Slow(framework.Callback):
    def on_train_step_end(self, info):
        time.sleep(0.06)
"""


@dataclass(frozen=True)
class Case:
    """One run that is killed."""

    seed: int
    # The kill comes while the checkpoint with this number is uploaded, counted from 1.
    checkpoint: int
    # After this part of the time that its upload takes.
    share: float

    def __str__(self) -> str:
        return f"seed {self.seed}: killed in checkpoint {self.checkpoint}, at {self.share:.2f} of its upload"


@dataclass(frozen=True)
class Result:
    case: Case
    # A line for each thing that wasn't as in the uninterrupted run.
    wrong: tuple[str, ...]
    # True if it was killed while a checkpoint was being uploaded.
    counts: bool
    # Complete checkpoints in the bucket after the kill.
    num_complete: int


def draw(seed: int) -> Case:
    """Return the case of a seed, always the same one."""
    choose = random.Random(seed)
    return Case(seed, checkpoint=choose.choice((1, 2, 3)), share=choose.random())


@final
class Remote:
    """The server, and the run that isn't interrupted."""

    def __init__(self, s3: S3, folder: Path) -> None:
        self._s3 = s3
        self._folder = folder
        # Bucket → the checkpoints of which it had something at any time.
        self._seen: dict[str, set[str]] = {}
        (folder / "recipes").mkdir()
        (folder / "recipes" / "slow.py").write_text(SLOW)
        _train(*TRAINING, "path.outputs=whole", cwd=folder, s3=s3)
        self._whole = _run_in(folder / "whole")
        s3.set_fault(requests="^PUT", delay_s=_DELAY_S)

    def run(self, case: Case) -> Result:
        """Do a case, and judge it."""
        bucket = self._s3.new_bucket()
        url = f"s3://{bucket}/runs"
        with tempfile.TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True) as name:
            killed = Path(name, "killed")
            resumed = Path(name, "resumed")
            self._kill(case, bucket, url=url, cache=killed)
            incomplete, num_complete = self._checkpoints(bucket)
            run = _run_in(killed / "s3" / bucket / "runs")
            here = {path.name for path in (run / "checkpoints").glob("step_*")}
            complete_there = self._complete(bucket)
            counts = bool(incomplete or here - complete_there)

            _train(f"resume={url}/toy/{run.name}", f"path.cache={resumed}", "trust=true", cwd=self._folder, s3=self._s3)
            run = _run_in(resumed / "s3" / bucket / "runs")
            wrong = list(exact.differences(self._whole, run))
            last = (run / "checkpoints" / "last").resolve().name
            if last not in self._complete(bucket):
                wrong.append(f"the bucket lacks {last}")
            return Result(case, tuple(wrong), counts=counts, num_complete=num_complete)

    def _kill(self, case: Case, bucket: str, *, url: str, cache: Path) -> None:
        arguments = (*TRAINING, f"path.outputs={url}", f"path.cache={cache}")
        with started_framework(*arguments, cwd=self._folder, env=dict(self._s3.env)) as started:
            _wait(started, until=lambda: len(self._begun(bucket)) >= case.checkpoint)
            time.sleep(case.share * _UPLOADS * _DELAY_S)
            if started.process.poll() is None:
                # The command leads a session and a group of its own.
                os.killpg(started.process.pid, signal.SIGKILL)
                started.process.wait()
            started.assert_all_gone(within_s=_GONE_S)

    def _names(self, bucket: str) -> list[str]:
        names: list[str] = self._s3.filesystem().find(bucket)
        return names

    def _begun(self, bucket: str) -> set[str]:
        """Return the checkpoints of which the bucket has something, or had."""
        steps = self._seen.setdefault(bucket, set())
        for name in self._names(bucket):
            if "/checkpoints/step_" in name:
                steps.add(Path(name).parent.name)
        return steps

    def _complete(self, bucket: str) -> set[str]:
        return {Path(name).parent.name for name in self._names(bucket) if name.endswith("/manifest.json")}

    def _checkpoints(self, bucket: str) -> tuple[set[str], int]:
        """Return the checkpoints without a manifest, and how many have one."""
        names = [Path(name) for name in self._names(bucket)]
        begun = {name.parent.name for name in names if "/checkpoints/step_" in str(name)}
        complete = self._complete(bucket)
        return begun - complete, len(complete)


def _train(*arguments: str, cwd: Path, s3: S3) -> None:
    with started_framework(*arguments, cwd=cwd, env=dict(s3.env)) as started:
        status = started.wait(timeout=_TIMEOUT_S)
        if status != 0:
            raise AssertionError(f"exit status {status}\n{started.printed()}")


def _wait(started: Started, *, until: Callable[[], bool]) -> None:
    """Return when it is so, or the command has ended."""
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not until() and started.process.poll() is None:
        if time.monotonic() > deadline_s:
            raise AssertionError(f"still running after {_TIMEOUT_S} s\n{started.printed()}")
        time.sleep(_POLL_S)


def _run_in(outputs: Path) -> Path:
    (run,) = (outputs / "toy").iterdir()
    return run


def table(results: Sequence[Result]) -> str:
    """Return Markdown: by the number of complete checkpoints at the kill, how many runs ended the same."""
    lines = ["| complete checkpoints in the bucket | kills in an upload | identical |", "|---|---|---|"]
    counted = [result for result in results if result.counts]
    for number in sorted({result.num_complete for result in counted}):
        group = [result for result in counted if result.num_complete == number]
        lines.append(_line(str(number), group))
    lines.append(_line("all", counted))
    return "\n".join(lines)


def _line(name: str, results: Sequence[Result]) -> str:
    num_same = sum(not result.wrong for result in results)
    return f"| {name} | {len(results)} | {num_same} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 if any run ended otherwise."""
    asked = _arguments(argv)
    results: list[Result] = []
    with s3_server() as s3, tempfile.TemporaryDirectory(prefix="remote_") as name:
        remote = Remote(s3, Path(name))
        seed = asked.seed
        while sum(result.counts for result in results) < asked.kills:
            case = draw(seed)
            seed += 1
            result = _judged(remote, case)
            results.append(result)
            word = "WRONG" if result.wrong else "same "
            note = "" if result.counts else " (after the upload: not counted)"
            print(f"{word} {case}; {result.num_complete} complete{note}", flush=True)
            for line in result.wrong:
                print(f"  {line}", flush=True)
    print(table(results))
    return 1 if any(result.wrong for result in results) else 0


def _judged(remote: Remote, case: Case) -> Result:
    try:
        return remote.run(case)
    # Whatever it is, the other cases still have to be run.
    except Exception as error:
        return Result(case, (f"{type(error).__name__}: {error}",), counts=True, num_complete=0)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="that come in the middle of an upload")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the next one has the next number")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

"""A sweep: jobs run one after another from one fork server; a line when each ends, a table when all have."""

from __future__ import annotations

import importlib
import shutil
import sys
import textwrap
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from framework.config.saved import resume_argument
from framework.errors import EXIT_RUN_FAILED, EXIT_STOPPED, ConfigError, FrameworkError
from framework.jobs.request import JobResult, Request, SubRun
from framework.jobs.summary import display_path, tensorboard_command
from framework.system.formatting import format_count, format_facts, format_table
from framework.system.run_dir import RunDir

_NO_SCORE = "–"


def run_sweep(requests: Sequence[Request]) -> int:
    """Check all jobs, then run each, also after one has failed; return 1 if any failed, else 0.

    Raises FrameworkError for a mistake in any job; KeyboardInterrupt ends the sweep, after the table.
    """
    if not requests:
        raise ConfigError("The sweep has no jobs: one of its ranges is empty.")
    for request in requests:
        importlib.import_module(f"framework.jobs.{request.config.job}").check(request)
    outputs = [request.config.predict.output for request in requests if request.config.job == "predict"]
    if len(set(outputs)) < len(outputs):
        raise ConfigError(f"predict.output={outputs[0]} is that of several jobs. Give each its own.")
    print(f"{format_count(len(requests), 'job')} in {display_path(_sub_run(requests[0]).folder)}", flush=True)
    sweep = Sweep()
    labels = distinguishing([each.overrides for each in requests])
    for number, (request, label) in enumerate(zip(requests, labels, strict=True)):
        try:
            sweep.run(request, label=label)
        except KeyboardInterrupt:
            print(f"\nInterrupted in job {number}; {len(requests) - number - 1} more were not started.")
            sweep.close()
            raise
    return sweep.close()


def _sub_run(request: Request) -> SubRun:
    assert request.sub_run is not None
    return request.sub_run


@dataclass(frozen=True)
class _EndedJob:
    request: Request
    result: JobResult
    seconds: float

    @property
    def number(self) -> str:
        return str(_sub_run(self.request).number)

    @property
    def status(self) -> str:
        status = self.result.status
        return {0: "finished", EXIT_STOPPED: "stopped"}.get(status, f"FAILED ({status})")

    @property
    def score(self) -> str:
        return _NO_SCORE if self.result.score is None else f"{self.result.score:.4f}"

    def line(self, label: str) -> str:
        parts = [f"[{self.number}] {label}", self.status, self.score, f"{self.seconds:.1f} s"]
        run_dir = self.result.run_dir
        if self.result.status == EXIT_STOPPED and run_dir is not None:
            parts.append(resume_argument(display_path(run_dir.path)))
        elif self.result.status != 0 and run_dir is not None:
            log = run_dir.rank_log(0)
            parts.append(f"log: {display_path(log if log.exists() else run_dir.path)}")
        return "  ".join(part for part in parts if part != _NO_SCORE)


@final
class Sweep:
    """The jobs run so far. `run` prints how each ended, `close` prints the table."""

    def __init__(self) -> None:
        self._ended: list[_EndedJob] = []

    def run(self, request: Request, *, label: str) -> JobResult:
        """Run one job. An exception is printed and makes the job a failed one.

        KeyboardInterrupt is passed on, and raised after a job that was stopped on request, which ends the sweep.
        """
        start, status, run_dir = time.perf_counter(), EXIT_RUN_FAILED, RunDir(_sub_run(request).path)
        try:
            result: JobResult = importlib.import_module(f"framework.jobs.{request.config.job}").main(request)
        except Exception as error:
            if isinstance(error, FrameworkError):
                status = error.exit_status
                print(error, file=sys.stderr, flush=True)
            else:
                traceback.print_exc()
            result = JobResult(status, run_dir if run_dir.path.is_dir() else None)
        ended = _EndedJob(request, result, seconds=time.perf_counter() - start)
        self._ended.append(ended)
        print(ended.line(label), flush=True)
        if result.status == EXIT_STOPPED:
            raise KeyboardInterrupt
        return result

    def close(self, *, sweeper_files: Sequence[Path] = ()) -> int:
        """Print the table and return the exit status. What a sweeper has written is moved to the sweep's folder."""
        ended = self._ended
        if not ended:
            return EXIT_RUN_FAILED
        print(f"\n{_table(ended)}")
        failed = [job.number for job in ended if job.result.status not in (0, EXIT_STOPPED)]
        if failed:
            print(f"\n{len(failed)} of {len(ended)} jobs failed: {', '.join(failed)}")
        folder = _sub_run(ended[0].request).folder
        if folder.is_dir():  # there is none if every job was refused
            files = sorted(shutil.move(file, folder) for file in sweeper_files)
            facts = [("sweeper", display_path(Path(file))) for file in files]
            print(f"\n{format_facts([*facts, ('curves', tensorboard_command(folder))])}", flush=True)
        return EXIT_RUN_FAILED if failed else 0


def distinguishing(overrides: Sequence[Sequence[str]]) -> list[str]:
    """Return for each job the overrides that not all jobs have, as one text."""
    common = set.intersection(*(set(each) for each in overrides)) if len(overrides) > 1 else set()
    return [" ".join(text for text in each if text not in common) for each in overrides]


def _table(ended: Sequence[_EndedJob]) -> str:
    monitors = {job.request.config.checkpoint.monitor for job in ended}
    best = " ".join(["best", *filter(None, monitors)]) if len(monitors) == 1 else "best"
    labels = distinguishing([job.request.overrides for job in ended])
    rows = [("job", "overrides", "status", best, "s")]
    rows += [
        (job.number, label, job.status, job.score, f"{job.seconds:.1f}")
        for job, label in zip(ended, labels, strict=True)
    ]
    return textwrap.dedent(format_table(rows))

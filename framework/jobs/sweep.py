"""A sweep: jobs one after another from one warm fork server, a line when each ends, a table when all have."""

from __future__ import annotations

import importlib
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from framework.config.saved import resume_argument
from framework.errors import EXIT_RUN_FAILED, EXIT_STOPPED, ConfigError, FrameworkError
from framework.jobs.request import JobResult, Request
from framework.jobs.summary import look, short
from framework.run_dir import RunDir

_NO_SCORE = "–"


@dataclass(frozen=True)
class Finished:
    """A job that ended, one way or the other."""

    request: Request
    result: JobResult
    seconds: float


def run_sweep(requests: Sequence[Request]) -> int:
    """Run every job, also after one has failed; gives 1 if any did, else 0.

    All are checked before the first is run. Raises FrameworkError for what that finds; KeyboardInterrupt ends them all,
    after the table of those that ended.
    """
    for request in requests:
        importlib.import_module(f"framework.jobs.{request.config.job}").check(request)
    outputs = [request.config.predict.output for request in requests if request.config.job == "predict"]
    if len(set(outputs)) < len(outputs):
        raise ConfigError(f"predict.output={outputs[0]} is that of several jobs. Give each its own.")
    print(f"{len(requests)} job{'s' if len(requests) > 1 else ''} in {_folder_of(requests[0])}", flush=True)
    sweep = Sweep()
    try:
        for request, label in zip(requests, distinguishing([each.overrides for each in requests]), strict=True):
            sweep.run(request, label=label)
    except KeyboardInterrupt:
        sweep.close(not_ended=len(requests))
        raise
    return sweep.close()


@final
class Sweep:
    """Jobs that were run so far. `run` says how each ended, `close` shows them all."""

    def __init__(self) -> None:
        self._finished: list[Finished] = []

    def run(self, request: Request, *, label: str) -> JobResult:
        """One job. What it raises is shown and makes it a failed one.

        KeyboardInterrupt passes, and is raised after a job that was stopped on request: that is meant for all.
        """
        finished = _run_job(request)
        self._finished.append(finished)
        print(_line(finished, label=label), flush=True)
        if finished.result.status == EXIT_STOPPED:
            raise KeyboardInterrupt
        return finished.result

    def close(self, *, not_ended: int = 0) -> int:
        """The table; gives the exit status of the whole. not_ended: the number of all jobs, after an interrupt."""
        finished = self._finished
        if not_ended:
            # A job that was stopped on request has ended well, one that was interrupted isn't among these.
            started = len(finished) + int(not _was_stopped(finished))
            print(f"\nInterrupted in job {started - 1}; {not_ended - started} more were not started.")
        if not finished:
            return EXIT_RUN_FAILED
        print(table(finished))
        failed = [_name(job) for job in finished if job.result.status not in (0, EXIT_STOPPED)]
        if failed:
            print(f"\n{len(failed)} of {len(finished)} jobs failed: {', '.join(failed)}")
        place = finished[0].request.place
        if place is not None and place.folder.is_dir():  # not if every job was refused
            files = [short(path) for path in sorted(place.folder.glob("*")) if path.is_file()]
            rows = [*(f"  sweeper      {file}" for file in files), f"  look         {look(place.folder)}"]
            print("", *rows, sep="\n", flush=True)
        return EXIT_RUN_FAILED if failed else 0


def _run_job(request: Request) -> Finished:
    start = time.perf_counter()
    job = importlib.import_module(f"framework.jobs.{request.config.job}")
    try:
        result: JobResult = job.main(request)
    except FrameworkError as error:
        print(error, file=sys.stderr, flush=True)
        result = JobResult(error.exit_status, _run_dir(request))
    except Exception:
        traceback.print_exc()
        result = JobResult(EXIT_RUN_FAILED, _run_dir(request))
    return Finished(request, result, seconds=time.perf_counter() - start)


def distinguishing(overrides: Sequence[Sequence[str]]) -> list[str]:
    """For each job the overrides that not all jobs have, as one text."""
    common = set.intersection(*(set(each) for each in overrides)) if len(overrides) > 1 else set()
    return [" ".join(text for text in each if text not in common) for each in overrides]


def table(finished: Sequence[Finished]) -> str:
    """One row a job, the columns aligned."""
    labels = distinguishing([job.request.overrides for job in finished])
    monitors = {job.request.config.checkpoint.monitor for job in finished}
    score = next(iter(monitors)) if len(monitors) == 1 else None
    rows = [("job", "overrides", "status", f"best {score}" if score else "best", "s")]
    for job, label in zip(finished, labels, strict=True):
        rows.append((_name(job), label, _status(job), _score(job), f"{job.seconds:.1f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(["", *lines])


def _line(job: Finished, *, label: str) -> str:
    parts = [f"[{_name(job)}] {label}", _status(job), _score(job), f"{job.seconds:.1f} s"]
    run_dir = job.result.run_dir
    if job.result.status == EXIT_STOPPED and run_dir is not None:
        parts.append(resume_argument(short(run_dir.path)))
    elif job.result.status != 0 and run_dir is not None:
        log = run_dir.rank_log(0)
        parts.append(f"log: {short(log if log.exists() else run_dir.path)}")
    return "  ".join(part for part in parts if part != _NO_SCORE)


def _status(job: Finished) -> str:
    status = job.result.status
    return {0: "finished", EXIT_STOPPED: "stopped"}.get(status, f"FAILED ({status})")


def _was_stopped(finished: Sequence[Finished]) -> bool:
    return bool(finished) and finished[-1].result.status == EXIT_STOPPED


def _score(job: Finished) -> str:
    return _NO_SCORE if job.result.score is None else f"{job.result.score:.4f}"


def _name(job: Finished) -> str:
    return "?" if job.request.place is None else str(job.request.place.number)


def _run_dir(request: Request) -> RunDir | None:
    place = request.place
    run_dir = None if place is None else RunDir(place.folder / str(place.number))
    return run_dir if run_dir is not None and run_dir.path.is_dir() else None


def _folder_of(request: Request) -> str:
    place = request.place
    return "" if place is None else short(place.folder)

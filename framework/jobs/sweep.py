"""A sweep: jobs run one after another from one fork server; a line when each ends, a table when all have."""

from __future__ import annotations

import sys
import textwrap
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import final

from framework.config.saved import resume_argument
from framework.config.secrets import masked_override
from framework.errors import EXIT_RUN_FAILED, EXIT_STOPPED, ConfigError, FrameworkError
from framework.jobs.request import JobResult, Request, job_module
from framework.jobs.summary import display_path, tensorboard_command
from framework.system.formatting import format_count, format_facts, format_table
from framework.system.run_dir import RunDir
from framework.system.shown_text import shown

_NOT_SWEPT = ("compare", "export", "parity", "plan", "report", "runs", "tune")


def run_sweep(requests: Sequence[Request]) -> int:
    """Check all jobs, then run each, also after one has failed; return 1 if any failed, else 0.

    Raises FrameworkError for a mistake in any job; KeyboardInterrupt ends the sweep, after the table.
    """
    if not requests:
        raise ConfigError("The sweep has no jobs: one of its ranges is empty.")
    for request in requests:
        _job(request).check(request)
    outputs = [request.config.predict.output for request in requests if request.config.job == "predict"]
    if len(set(outputs)) < len(outputs):
        raise ConfigError(f"predict.output={outputs[0]} is that of several jobs. Give each its own.")
    print(f"{format_count(len(requests), 'job')} in {display_path(_sub_run(requests[0]).parent)}", flush=True)
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


def _sub_run(request: Request) -> Path:
    assert request.sub_run is not None
    return request.sub_run


def _job(request: Request) -> ModuleType:
    """Return the job's module. Raises ConfigError for a job that answers for one run."""
    name = request.config.job
    if name in _NOT_SWEPT:
        raise ConfigError(f"job={name} is about one run, so it can't go with a sweep (-m). Choose one of its jobs.")
    module: ModuleType = job_module(name)
    return module


@final
class Sweep:
    """The jobs run so far. `run` prints how each ended, `close` prints the table."""

    def __init__(self) -> None:
        self._ended: list[Request] = []
        self._rows: list[tuple[str, ...]] = []  # of the table, without labels
        self._failed: list[str] = []

    def run(self, request: Request, *, label: str) -> JobResult:
        """Run one job. An exception is printed and makes the job a failed one.

        KeyboardInterrupt is passed on, and raised after a job that was stopped on request, which ends the sweep.
        """
        start, run_dir = time.perf_counter(), RunDir(_sub_run(request))
        number = run_dir.path.name
        try:
            result: JobResult = _job(request).main(request)
        except FrameworkError as error:
            print(shown(str(error)), file=sys.stderr, flush=True)
            result = JobResult(error.exit_status)
        except Exception:
            traceback.print_exc()
            result = JobResult(EXIT_RUN_FAILED)
        status, score = result.status, "–" if result.score is None else f"{result.score:.4f}"
        how = {0: "finished", EXIT_STOPPED: "stopped"}.get(status, f"FAILED ({status})")
        seconds = f"{time.perf_counter() - start:.1f}"
        self._ended.append(request)
        self._rows.append((number, how, score, seconds))
        self._failed += [] if status in (0, EXIT_STOPPED) else [number]
        where = ""
        if status == EXIT_STOPPED:
            where = resume_argument(display_path(run_dir.path))
        elif status != 0 and run_dir.path.is_dir():
            log = run_dir.rank_log(0)
            where = f"log: {display_path(log if log.exists() else run_dir.path)}"
        print("  ".join([f"[{number}] {label}", how, score, f"{seconds} s", where]).rstrip(), flush=True)
        if status == EXIT_STOPPED:
            raise KeyboardInterrupt
        return result

    def close(self) -> int:
        """Print the table and return the exit status."""
        ended = self._ended
        if not ended:
            return EXIT_RUN_FAILED
        monitors = {request.config.checkpoint.monitor or "" for request in ended}
        best = f"best {monitors.pop()}".rstrip() if len(monitors) == 1 else "best"
        labels = distinguishing([request.overrides for request in ended])
        rows = [(number, label, *cells) for (number, *cells), label in zip(self._rows, labels, strict=True)]
        print(f"\n{textwrap.dedent(format_table([('job', 'overrides', 'status', best, 's'), *rows]))}")
        if self._failed:
            print(f"\n{len(self._failed)} of {len(ended)} jobs failed: {', '.join(self._failed)}")
        folder = _sub_run(ended[0]).parent
        if folder.is_dir():  # there is none if every job was refused
            print(f"\n{format_facts([('curves', tensorboard_command(folder))])}", flush=True)
        return EXIT_RUN_FAILED if self._failed else 0


def distinguishing(overrides: Sequence[Sequence[str]]) -> list[str]:
    """Return for each job the overrides that not all jobs have, as one text."""
    common = set.intersection(*(set(each) for each in overrides)) if len(overrides) > 1 else set()
    return [" ".join(masked_override(text) for text in each if text not in common) for each in overrides]

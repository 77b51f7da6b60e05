"""A sweep: jobs run one after another from one fork server; a line when each ends, a table when all have."""

from __future__ import annotations

import sys
import textwrap
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, final

from framework.command.messages import resume_arguments, tensorboard_command
from framework.command.request import JobResult, Request, job_module
from framework.config.secrets import masked_override
from framework.errors import EXIT_RUN_FAILED, EXIT_STOPPED, ConfigError, FrameworkError
from framework.system.formatting import display_path, format_count, format_facts, format_table
from framework.system.run_dir import RunDir
from framework.system.shown_text import shown

# Where Hydra's sweepers have the direction of their search, with its value for each `checkpoint.mode`.
_DIRECTIONS = {
    "direction": {"min": "minimize", "max": "maximize"},  # Optuna's
    "optim.maximize": {"min": "false", "max": "true"},  # Nevergrad's
    "ax_config.experiment.minimize": {"min": "true", "max": "false"},  # Ax's
    "ax_config.early_stop.minimize": {"min": "true", "max": "false"},
}
_BETTER = {"min": "lower", "max": "higher"}
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


def sweeper_direction(sweeper: Mapping[str, Any], *, typed: Sequence[str], mode: str, monitor: str | None) -> list[str]:
    """Return the overrides that make a sweeper look for what `checkpoint.mode` calls better; none if it does already.

    sweeper: the composed section `hydra.sweeper`, plain values. typed: the command's overrides. Raises ConfigError if
    the two contradict each other, or if the jobs have no single score.
    """
    if monitor is None:
        raise ConfigError(
            "A sweeper that chooses by results needs one: set checkpoint.monitor to a metric of the validation, and "
            "checkpoint.mode to min or max."
        )
    overrides: list[str] = []
    for key, by_mode in _DIRECTIONS.items():
        value: Any = sweeper
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        if len(values) != 1:
            raise ConfigError(
                f"hydra.sweeper.{key} has {len(values)} directions, and a job has one score: the best {monitor}. "
                f"Use hydra.sweeper.{key}={by_mode[mode]}, or leave it out."
            )
        name = str(values[0]).lower()
        if name == by_mode[mode]:
            continue
        # Every sweeper minimizes by default, so a `min` in a file may be this default; `max` was set by the user.
        is_typed = any(text.lstrip("+").startswith(f"hydra.sweeper.{key}=") for text in typed)
        if is_typed or mode == "min":
            raise ConfigError(
                f"hydra.sweeper.{key}={name} contradicts checkpoint.mode={mode}: {monitor} is better if it is "
                f"{_BETTER[mode]}.\nLeave hydra.sweeper.{key} out: it follows from checkpoint.mode."
            )
        override = f"hydra.sweeper.{key}={by_mode[mode]}"
        print(f"{override}, from checkpoint.mode={mode}", flush=True)
        overrides.append(override)
    return overrides


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
            where = resume_arguments(run_dir)
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

"""A sweep: jobs run one after another from one fork server; a line when each ends, a table when all have.

`grid` makes the runs of all combinations of values, which `run_sweep` runs. Another sweeper, such as Optuna's, chooses
each run by the results of those before: `run_chosen`.
"""

from __future__ import annotations

import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from framework.command.hydra_compose import resolved, split_sweep
from framework.command.job import load_swept_job
from framework.command.messages import resume_arguments, tensorboard_command
from framework.command.request import JobResult, Request
from framework.errors import EXIT_RUN_FAILED, EXIT_STOPPED, ConfigError, FrameworkError, RunError, StoppedBySignalError
from framework.sweeps.table import distinguishing
from framework.system.formatting import display_path, format_count, format_facts, format_table
from framework.system.run_dir import RunDir
from framework.system.shown_text import shown

if TYPE_CHECKING:
    from framework.launch.handshake import ExternalRanks

# Where Hydra's sweepers have the direction of their search, with its value for each `checkpoint.mode`.
_DIRECTIONS = {
    # Optuna's.
    "direction": {"min": "minimize", "max": "maximize"},
    # Nevergrad's.
    "optim.maximize": {"min": "false", "max": "true"},
    # Ax's.
    "ax_config.experiment.minimize": {"min": "true", "max": "false"},
    "ax_config.early_stop.minimize": {"min": "true", "max": "false"},
}
_BETTER = {"min": "lower", "max": "higher"}


def check_sweep(settings: DictConfig, *, external_ranks: ExternalRanks | None) -> None:
    """Raise ConfigError for a sweep that can't be run here. settings: Hydra's section of the configuration."""
    if external_ranks is not None:
        raise ConfigError(
            f"-m makes several runs, and {external_ranks.cluster.starter} has started these processes for one.\n"
            "Leave -m out, or type launcher=local and start the command once."
        )
    # Other launchers pickle jobs.
    if not settings.launcher._target_.endswith(".BasicLauncher"):
        raise ConfigError(
            f"hydra/launcher={settings.runtime.choices['hydra/launcher']} can't be used: a sweep runs its jobs "
            "one after another. Use hydra/launcher=basic; to run jobs at the same time, start a command for each."
        )


def grid(overrides: Sequence[str], settings: DictConfig) -> list[list[str]]:
    """Return the overrides of each job of a sweep over all combinations of values, without Hydra's own overrides.

    settings: Hydra's section of the configuration, where a file may have values to sweep over.
    """
    params = [f"{key}={value}" for key, value in (settings.sweeper.params or {}).items()]
    return split_sweep([*params, *overrides])


def run_sweep(requests: Sequence[Request]) -> int:
    """Run each job, also after one has failed; return 1 if any failed, else 0.

    A job that is stopped on request ends the sweep with EXIT_STOPPED, and KeyboardInterrupt ends it, both after the
    table. Raises ConfigError for jobs that can't go together.
    """
    if not requests:
        raise ConfigError("The sweep has no jobs: one of its ranges is empty.")
    outputs = [request.config.predict.output for request in requests if request.config.job == "predict"]
    if len(set(outputs)) < len(outputs):
        raise ConfigError(f"predict.output={outputs[0]} is that of several jobs. Give each its own.")

    print(f"{format_count(len(requests), 'job')} in {display_path(_sub_run(requests[0]).parent)}", flush=True)
    sweep = Sweep()
    labels = distinguishing([request.overrides for request in requests])
    for number, (request, label) in enumerate(zip(requests, labels, strict=True)):
        try:
            sweep.run(request, label=label)
        except KeyboardInterrupt as interrupt:
            how = "Stopped" if isinstance(interrupt, (StoppedBySignalError, _JobStoppedError)) else "Interrupted"
            print(f"\n{how} in job {number}; {len(requests) - number - 1} more were not started.")
            sweep.close()
            if isinstance(interrupt, _JobStoppedError):
                return EXIT_STOPPED
            raise
    return sweep.close()


def run_chosen(
    config: DictConfig,
    *,
    typed: Sequence[str],
    request_of: Callable[..., Request],
    run_all: Callable[[Callable[[DictConfig], float | None], list[str]], None],
) -> int:
    """Run the jobs as a sweeper such as Optuna's chooses them, by their results; return the exit status.

    Args:
        config: composed without the values to sweep over.
        typed: the command's overrides.
        request_of: returns the request of a job, given what `resolved` returns and its number.
        run_all: has the sweeper call a function with the configuration of each job, given further overrides.
    """
    checkpoint = config.checkpoint
    sweeper: Any = OmegaConf.to_container(config.hydra.sweeper, enum_to_str=True)
    direction = sweeper_direction(sweeper, typed=typed, mode=checkpoint.mode, monitor=checkpoint.monitor)
    sweep = Sweep()

    def run_one(job_config: DictConfig) -> float | None:
        raw, overrides = resolved(job_config)
        request = request_of(raw, overrides, number=HydraConfig.get().job.num)
        settings = request.config.checkpoint
        if settings.monitor != checkpoint.monitor or settings.mode != checkpoint.mode:
            raise ConfigError(
                "checkpoint.monitor and checkpoint.mode say what the sweeper looks for, so they must be the same "
                "in all jobs. Don't sweep over them."
            )
        label = " ".join(request.overrides)
        result = sweep.run(request, label=label)
        if result.status != 0:
            raise RunError(f"The job {label} failed with exit status {result.status}.")
        return result.score

    try:
        run_all(run_one, direction)
    except _JobStoppedError:
        return EXIT_STOPPED
    finally:
        status = sweep.close()
    return status


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
        wanted = by_mode[mode]
        value = _value_at(sweeper, key)
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        if len(values) != 1:
            raise ConfigError(
                f"hydra.sweeper.{key} has {len(values)} directions, and a job has one score: the best {monitor}. "
                f"Use hydra.sweeper.{key}={wanted}, or leave it out."
            )
        name = str(values[0]).lower()
        if name == wanted:
            continue
        # Every sweeper minimizes by default, so a `min` in a file may be this default; `max` was set by the user.
        is_typed = any(text.lstrip("+").startswith(f"hydra.sweeper.{key}=") for text in typed)
        if is_typed or mode == "min":
            raise ConfigError(
                f"hydra.sweeper.{key}={name} contradicts checkpoint.mode={mode}: {monitor} is better if it is "
                f"{_BETTER[mode]}.\nLeave hydra.sweeper.{key} out: it follows from checkpoint.mode."
            )
        override = f"hydra.sweeper.{key}={wanted}"
        print(f"{override}, from checkpoint.mode={mode}", flush=True)
        overrides.append(override)
    return overrides


def _value_at(node: Any, key: str) -> Any:
    """Return the value of a dotted key; None if there is none."""
    for part in key.split("."):
        if not isinstance(node, Mapping):
            return None
        node = node.get(part)
    return node


def _sub_run(request: Request) -> Path:
    assert request.sub_run is not None
    return request.sub_run


@final
class Sweep:
    """The jobs run so far. `run` prints how each ended, `close` prints the table."""

    def __init__(self) -> None:
        self._ended: list[Request] = []
        # The rows of the table, without labels.
        self._rows: list[tuple[str, ...]] = []
        # The numbers of the jobs that failed.
        self._failed: list[str] = []

    def run(self, request: Request, *, label: str) -> JobResult:
        """Run one job. An exception is printed and makes the job a failed one.

        KeyboardInterrupt is passed on; a job that was stopped on request raises one that ends the sweep.
        """
        run_dir = RunDir(_sub_run(request))
        number = run_dir.path.name
        print("  ".join([f"[{number}] {label}".rstrip(), "running"]), flush=True)
        start = time.perf_counter()
        result = _run_caught(request)
        seconds = f"{time.perf_counter() - start:.1f}"

        where = ""
        if result.status == 0:
            how = "finished"
        elif result.status == EXIT_STOPPED:
            how = "stopped"
            where = resume_arguments(run_dir)
        else:
            how = f"FAILED ({result.status})"
            where = _log_of(run_dir)
            self._failed.append(number)
        score = "–"
        if result.score is not None:
            score = f"{result.score:.4f}"
        self._ended.append(request)
        self._rows.append((number, how, score, seconds))
        print("  ".join([f"[{number}] {label}".rstrip(), how, score, f"{seconds} s", where]).rstrip(), flush=True)
        if result.status == EXIT_STOPPED:
            raise _JobStoppedError
        return result

    def close(self) -> int:
        """Print the table and return the exit status."""
        if not self._ended:
            return EXIT_RUN_FAILED
        monitors = {request.config.checkpoint.monitor or "" for request in self._ended}
        score_title = "best"
        if len(monitors) == 1:
            score_title = f"best {monitors.pop()}".rstrip()
        rows: list[tuple[str, ...]] = [("job", "overrides", "status", score_title, "s")]
        labels = distinguishing([request.overrides for request in self._ended])
        for (number, *cells), label in zip(self._rows, labels, strict=True):
            rows.append((number, label, *cells))
        print(f"\n{textwrap.dedent(format_table(rows))}")
        if self._failed:
            print(f"\n{len(self._failed)} of {len(self._ended)} jobs failed: {', '.join(self._failed)}")

        folder = _sub_run(self._ended[0]).parent
        # There is none if every job was refused.
        if folder.is_dir():
            print(f"\n{format_facts([('curves', tensorboard_command(folder))])}", flush=True)
        return EXIT_RUN_FAILED if self._failed else 0


class _JobStoppedError(KeyboardInterrupt):
    """A job was stopped on request. No sweeper catches it."""


def _run_caught(request: Request) -> JobResult:
    """Run a job and return how it ended. An exception is printed."""
    try:
        return load_swept_job(request.config.job).run(request)
    except FrameworkError as error:
        print(shown(str(error)), file=sys.stderr, flush=True)
        return JobResult(error.exit_status)
    except Exception:
        traceback.print_exc()
        return JobResult(EXIT_RUN_FAILED)


def _log_of(run_dir: RunDir) -> str:
    """Return where the log of a failed run is; empty if it has no directory."""
    if not run_dir.path.is_dir():
        return ""
    log = run_dir.rank_log(0)
    return f"log: {display_path(log if log.exists() else run_dir.path)}"

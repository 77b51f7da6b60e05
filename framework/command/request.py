"""What the command gives a job, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from framework.command.launcher import Placement, place
from framework.config.schema import Config
from framework.launch.external_ranks import ExternalRanks
from framework.launch.fork_server import ForkServer
from framework.launch.plan import RunProgress
from framework.monitoring.report import FailureReport
from framework.system.run_dir import RunDir


@dataclass(frozen=True)
class JobResult:
    """How a job ended."""

    status: int
    run_dir: RunDir | None = None
    # The best value of the monitored metric; None if nothing was monitored or no value was reached.
    score: float | None = None
    # Why the ranks failed; printed already, unless the job was called from Python.
    failure: FailureReport | None = None
    # What the rank raised, if it ran in this process.
    error: Exception | None = None
    # What the job found, as plain values for `format=json`; None: `results` in the run's record, if there is a run.
    results: Any = None


@dataclass(frozen=True)
class PythonCall:
    """A call of `framework.train`, or of a method of a run, in place of a typed command."""

    # Pickled: the objects by name that the configuration refers to; None if it refers to none.
    objects: bytes | None
    # Stands for the recipe's name in paths and titles; None: the recipe's own.
    name: str | None = None


@dataclass(frozen=True)
class Request:
    """One composed, parsed and checked configuration, and the means to run it."""

    config: Config
    # The resolved plain values that `config` was parsed from; written to `config.yaml`.
    raw: Mapping[str, Any]
    # Typed overrides without `resume`; those of a resumed run come first.
    overrides: tuple[str, ...]
    # The absolute places of `hydra.searchpath`, which are saved with the overrides.
    search_path: tuple[str, ...] = field(default=(), kw_only=True)
    # `python -m framework ARGUMENTS` starts this run again; in a sweep, only this job.
    arguments: tuple[str, ...] = ()
    # True: the answer is one JSON document.
    as_json: bool = False
    # Set if Python code made the request: a failure is returned, not printed.
    call: PythonCall | None = None
    # The fork server, if one was started.
    fork_server: ForkServer | None = None
    # The directory to make for one of several runs of a command, which prints nothing itself.
    sub_run: Path | None = None
    # A run directory that the job has made, for a run that begins with another one's checkpoint: see `branch_of`.
    own_dir: Path | None = None
    # For the run's record: `run`, `step` and more of the run that it branches off.
    branch_of: Mapping[str, Any] | None = None
    # Set on rank 0 of ranks that torchrun, srun or Kubernetes started: its connection to the others.
    external_ranks: ExternalRanks | None = None
    # True: a training doesn't evaluate the test part at its end, so that trials aren't chosen by it.
    skips_test: bool = False
    # Called a few times a second while the ranks run.
    on_progress: Callable[[RunProgress], None] | None = None
    # True: it runs on other machines, so neither `trainer.gpus` nor the rendezvous endpoint has to exist here.
    is_planned: bool = False
    # The run whose checkpoint is used; results go into a directory inside it. None: into `path.outputs`.
    parent_run: Path | None = None

    @cached_property
    def placement(self) -> Placement:
        """The launcher, topology and backend of the ranks: decided when first asked for, then carried.

        Raises FrameworkError for any mistake that can be found before anything starts.
        """
        return place(
            self.config,
            external_ranks=self.external_ranks,
            is_swept=self.sub_run is not None,
            is_planned=self.is_planned,
        )

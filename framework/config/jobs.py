"""The framework's jobs: the one place where each is registered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class RegisteredJob(NamedTuple):
    """Where a job's class is, a subclass of `framework.command.job.Job`."""

    # "module:Class", imported when the job is asked for.
    path: str
    # False: the command answers in its own process, so it starts no fork server, which imports torch. It is known here
    # because the fork server starts first: importing the job's module before would delay it by a tenth of a second.
    needs_torch: bool = True


JOBS: Mapping[str, RegisteredJob] = {
    "train": RegisteredJob("framework.jobs.train:Train"),
    "eval": RegisteredJob("framework.jobs.eval:Eval"),
    "predict": RegisteredJob("framework.jobs.predict:Predict"),
    "export": RegisteredJob("framework.jobs.export:Export"),
    "plan": RegisteredJob("framework.jobs.plan:Plan"),
    "preflight": RegisteredJob("framework.jobs.preflight:Preflight"),
    "parity": RegisteredJob("framework.jobs.parity:Parity"),
    "tune": RegisteredJob("framework.jobs.tune:Tune"),
    "replay": RegisteredJob("framework.jobs.replay:Replay"),
    "branch": RegisteredJob("framework.jobs.branch:Branch"),
    "why": RegisteredJob("framework.jobs.why:Why"),
    "submit": RegisteredJob("framework.jobs.submit:Submit"),
    "runs": RegisteredJob("framework.jobs.runs:Runs", needs_torch=False),
    "compare": RegisteredJob("framework.jobs.compare:Compare", needs_torch=False),
    "report": RegisteredJob("framework.jobs.report:Report", needs_torch=False),
    "upload": RegisteredJob("framework.jobs.upload:Upload", needs_torch=False),
    "schema": RegisteredJob("framework.jobs.schema:Schema", needs_torch=False),
}

FUNCTION = RegisteredJob("framework.jobs.function:Function")
"""What `job=package.module.function` runs: it calls a user's function with a trained model."""


def is_class_name(job: str) -> bool:
    """Return True if `job` names a class of the user's, as `package.module.MyJob`, not a function.

    The capital letter decides, so that the module of a function isn't imported in the command's process: it imports
    torch, which would delay the command by seconds.
    """
    return "." in job and job.rpartition(".")[2][:1].isupper()

"""`job=package.module.function checkpoint.path=CHECKPOINT`: a user's function with a trained model. No torch here."""

from __future__ import annotations

from functools import partial

from framework.command.messages import checkpoint_summary
from framework.command.request import JobResult, Request
from framework.command.request import checked_placement as check
from framework.command.run_ranks import run

__all__ = ["check", "main"]


def main(request: Request) -> JobResult:
    """Call the function on any number of processes. Raises FrameworkError for a request that can't be met."""
    name = request.config.job
    summary = partial(checkpoint_summary, f"{name} has returned")
    return run(request, entry="framework.jobs.inference:call_rank", title=f"Calling {name} with", summary=summary)

"""`job=eval checkpoint.path=CHECKPOINT`: the metrics of a trained model over one part of the data. No torch here."""

from __future__ import annotations

from framework.jobs.launcher_choice import checked_topology as check
from framework.jobs.request import JobResult, Request
from framework.jobs.run_ranks import run
from framework.jobs.summary import evaluation_summary

__all__ = ["check", "main"]


def main(request: Request) -> JobResult:
    """Evaluate on any number of processes. Raises FrameworkError for a request that can't be met."""
    return run(request, entry="framework.jobs.inference:evaluate_rank", title="Evaluating", summary=evaluation_summary)

"""`job=eval checkpoint.path=CHECKPOINT`: the metrics of a trained model over one part of the data. No torch here."""

from __future__ import annotations

from framework.command.messages import evaluation_summary
from framework.command.request import JobResult, Request
from framework.command.request import checked_placement as check
from framework.command.run_ranks import run

__all__ = ["check", "main"]


def main(request: Request) -> JobResult:
    """Evaluate on any number of processes. Raises FrameworkError for a request that can't be met."""
    return run(request, entry="framework.jobs.inference:evaluate_rank", title="Evaluating", summary=evaluation_summary)

"""`job=eval checkpoint.path=CHECKPOINT`: the metrics of a trained model over one part of the data. No torch here."""

from __future__ import annotations

from framework.jobs.request import JobResult, Request
from framework.jobs.running import Words, check, run
from framework.jobs.summary import closing_of_evaluation, interruption_without_trace

__all__ = ["check", "main"]


def main(request: Request) -> JobResult:
    """Evaluate as asked, on any number of processes. Raises FrameworkError for what can't be done as asked."""
    words = Words("Evaluating", closing_of_evaluation, interruption_without_trace)
    return run(request, entry="framework.inference:evaluate_rank", words=words)

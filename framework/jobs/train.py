"""`job=train`: train, evaluate, keep checkpoints. No torch here."""

from __future__ import annotations

from framework.jobs.request import JobResult, Request
from framework.jobs.running import Words, check, run
from framework.jobs.summary import closing_of_training, interruption

__all__ = ["check", "main"]


def main(request: Request) -> JobResult:
    """Train as asked, or go on with a run. Raises FrameworkError for what can't be done as asked."""
    doing = "Training" if request.config.resume is None else "Resuming"
    return run(request, entry="framework.engine:run_rank", words=Words(doing, closing_of_training, interruption))

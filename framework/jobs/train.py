"""`job=train`: train, evaluate and save checkpoints. No torch here."""

from __future__ import annotations

from framework.command.messages import training_summary
from framework.command.request import JobResult, Request
from framework.command.request import checked_placement as check
from framework.command.run_ranks import run
from framework.launch.plan import MonitorLink, RankArguments

__all__ = ["check", "main", "train_rank"]


def main(request: Request) -> JobResult:
    """Train, or resume a run. Raises FrameworkError for a request that can't be met."""
    title = "Training" if request.config.resume is None else "Resuming"
    return run(request, entry="framework.jobs.train:train_rank", title=title, summary=training_summary)


def train_rank(arguments: RankArguments, link: MonitorLink) -> int | None:
    """Train on one rank; with `preflight=true` check devices and links first. Return the rank's exit status."""
    from framework.engine.train import run_rank
    from framework.jobs.preflight.rank import before_training

    return run_rank(arguments, link, before_training=before_training)

"""`job=predict checkpoint.path=CHECKPOINT`: a trained model's predictions for every sample, in one file. No torch."""

from __future__ import annotations

from framework.command.launcher import Placement
from framework.command.messages import prediction_summary
from framework.command.request import JobResult, Request
from framework.command.run_ranks import run
from framework.system.files import checked_output


def main(request: Request) -> JobResult:
    """Predict on any number of processes. Raises ConfigError if `predict.output` exists or can't be written."""
    check(request)
    entry = "framework.jobs.inference:predict_rank"
    return run(request, entry=entry, title="Predicting with", summary=prediction_summary)


def check(request: Request) -> Placement:
    """Return the placement. Raises FrameworkError for any mistake that can be found before anything starts."""
    checked_output(request.config.predict.output, key="predict.output", suffixes=(".csv", ".pt"))
    return request.placement

"""`job=predict checkpoint.path=CHECKPOINT`: what a trained model says of every sample, in one file. No torch here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from framework.jobs.request import JobResult, Request
from framework.jobs.running import Words, run
from framework.jobs.running import check as check_run
from framework.jobs.summary import closing_of_prediction, interruption_without_trace
from framework.output_file import checked_output
from framework.topology import Topology

_SUFFIXES = (".csv", ".pt")


def main(request: Request) -> JobResult:
    """Predict as asked, on any number of processes.

    Raises ConfigError where `predict.output` can't be written or is there already: nothing is overwritten.
    """
    output = _output(request)
    raw = {**request.raw, "predict": {**request.raw["predict"], "output": str(output)}}
    config = replace(request.config, predict=replace(request.config.predict, output=str(output)))
    words = Words("Predicting with", closing_of_prediction, interruption_without_trace)
    return run(replace(request, raw=raw, config=config), entry="framework.inference:predict_rank", words=words)


def check(request: Request) -> Topology:
    """What can be found wrong before anything is made. Raises FrameworkError."""
    _output(request)
    return check_run(request)


def _output(request: Request) -> Path:
    """Where the predictions go, absolute. Raises ConfigError where they can't."""
    return checked_output(request.config.predict.output, key="predict.output", suffixes=_SUFFIXES)

"""`job=predict checkpoint.path=CHECKPOINT`: a trained model's predictions for every sample, in one file. No torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from framework.config.topology import Topology
from framework.jobs.launcher_choice import checked_topology
from framework.jobs.request import JobResult, Request
from framework.jobs.run_ranks import run
from framework.jobs.summary import prediction_summary
from framework.system.files import checked_output


def main(request: Request) -> JobResult:
    """Predict on any number of processes. Raises ConfigError if `predict.output` exists or can't be written."""
    output = str(_output(request))
    raw = {**request.raw, "predict": {**request.raw["predict"], "output": output}}
    config = replace(request.config, predict=replace(request.config.predict, output=output))
    request, entry = replace(request, raw=raw, config=config), "framework.jobs.inference:predict_rank"
    return run(request, entry=entry, title="Predicting with", summary=prediction_summary)


def check(request: Request) -> Topology:
    """Return the topology. Raises FrameworkError for any mistake that can be found before anything starts."""
    _output(request)
    return checked_topology(request)


def _output(request: Request) -> Path:
    """Return the file to write, as an absolute path."""
    return checked_output(request.config.predict.output, key="predict.output", suffixes=(".csv", ".pt"))

"""`job=predict checkpoint.path=CHECKPOINT`: what a trained model says of every sample, in one file. No torch here."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from framework.errors import ConfigError
from framework.jobs.request import JobResult, Request
from framework.jobs.running import Words, run
from framework.jobs.running import check as check_run
from framework.jobs.summary import closing_of_prediction, interruption_without_trace
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
    output = Path(request.config.predict.output).expanduser().absolute()
    if output.suffix not in _SUFFIXES:
        raise ConfigError(f"predict.output={output.name}: must end with one of {', '.join(_SUFFIXES)}.")
    if output.exists():
        raise ConfigError(f"predict.output={output} is there already. Choose another name, or remove it.")
    if not output.parent.is_dir():
        raise ConfigError(f"predict.output={output}: there is no folder {output.parent}. Make it, or choose another.")
    if not os.access(output.parent, os.W_OK):
        raise ConfigError(f"predict.output={output}: the folder can't be written. Choose another.")
    return output

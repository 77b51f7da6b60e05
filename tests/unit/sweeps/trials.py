"""Trials as a sweep leaves them on disk, and results as they are read from it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.helpers.internals import RunDir, Trial, TrialResult, save_config
from tests.unit.config.raw import raw_config


def plan(number: int, *overrides: str) -> Trial:
    return Trial(number, ("recipe=some", *overrides), config_hash=str(number))


def write_trial(sweep: Path, number: int, **facts: Any) -> RunDir:
    """Write the run directory of a trial that has finished, or what `facts` says of it."""
    run_dir = RunDir(sweep / str(number))
    run_dir.path.mkdir(parents=True)
    raw = raw_config({"seed": number, "checkpoint.monitor": "val/loss"})
    save_config(run_dir, raw=raw, overrides=["recipe=some", f"seed={number}"])
    known = {
        "status": "finished",
        "started": "2026-01-01T10:00:00.000+00:00",
        "ended": "2026-01-01T10:00:07.500+00:00",
        "recipe": "some",
        "job": "train",
        "monitor": "val/loss",
        "mode": "min",
        "overrides": ["recipe=some", f"seed={number}"],
    }
    run_dir.run_file.write_text(json.dumps(known | facts))
    return run_dir


def trained(score: float, *, step: int = 30, steps: int = 40) -> dict[str, Any]:
    """Return the results of a training in run.json."""
    return {
        "steps": steps,
        "epochs": 2,
        "seconds": 5.0,
        "score": score,
        "best": {"step": step, "metrics": {"val/loss": score}},
        "last": {"step": steps, "metrics": {"val/loss": score + 1}, "texts": {}},
    }


def result(number: int, *overrides: str, score: float | None = None, **others: Any) -> TrialResult:
    """Return a finished trial, or what `others` say of it."""
    known: dict[str, Any] = {"status": "finished", "run": Path(f"/sweep/{number}")}
    return TrialResult(number=number, overrides=("recipe=some", *overrides), score=score, **(known | others))


def repeated(scores: Mapping[str, Sequence[float]]) -> list[TrialResult]:
    """Return the results of settings with several seeds. scores: by the override of the setting, one for each seed."""
    results: list[TrialResult] = []
    for override, values in scores.items():
        for seed, score in enumerate(values):
            results.append(result(len(results), override, f"seed={seed}", score=score))
    return results

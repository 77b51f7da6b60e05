"""A sweep whose trials share a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import run_framework

pytestmark = pytest.mark.multiproc

RATES = (0.1, 0.05, 0.02, 0.01)


def records(sweep: Path) -> list[dict[str, Any]]:
    """Return the records of the trials, in their order."""
    return [json.loads((sweep / str(number) / "run.json").read_text()) for number in range(len(RATES))]


def test_two_trials_share_a_gpu(gpus: int, tmp_path: Path) -> None:
    slots = "sweep.share_gpus=2" if gpus else "sweep.jobs=2"
    rates = f"optimizer.lr={','.join(map(str, RATES))}"
    epochs = 40 if gpus else 10
    arguments = ("-m", "recipe=toy", f"trainer.gpus={gpus}", f"trainer.max_epochs={epochs}", slots, rates)
    done = run_framework(*arguments, cwd=tmp_path, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("outputs/multirun/*/sweep.json")
    sweep = file.parent
    first, second, *_ = trials = records(sweep)
    assert [trial["status"] for trial in trials] == ["finished"] * len(RATES)
    assert [trial["topology"]["gpus_per_node"] for trial in trials] == [gpus] * len(RATES)
    assert [len(trial["hardware"]["gpus"]) for trial in trials] == [gpus] * len(RATES)
    # They ran at the same time.
    assert second["started"] < first["ended"]
    assert first["started"] < second["ended"]

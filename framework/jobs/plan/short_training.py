"""Make a few steps of the training as configured, to see how long they take. No torch here.

    steps = time_steps(request, val_batches={"val": 12})
    steps.step_s, steps.validation_s

The training is an ordinary one in a temporary directory, without loggers and checkpoints. It has the processes of one
node; with several nodes, it gets the part of each global batch that one node trains on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from framework.command.request import PythonCall, Request
from framework.errors import RunError
from framework.jobs.replay.training import ReplayTraining, training_request
from framework.system.run_dir import read_object

# In the directory of the training; see `Stopwatch`.
STEPS_FILE = "steps.json"
_SECONDS = 3.0
_VALIDATION_BATCHES = 20


@dataclass(frozen=True)
class TimedSteps:
    """What a step takes, in seconds: the mean over the ranks."""

    # How many there were.
    steps: int
    # As `FitInfo.observe_phases` names them; together they are a step.
    parts: Mapping[str, float]
    # None if there was none.
    validation_s: float | None

    @property
    def step_s(self) -> float:
        return sum(self.parts.values())


def time_steps(request: Request, *, val_batches: Mapping[str, int]) -> TimedSteps:
    """Train for about three seconds, then validate.

    Args:
        val_batches: of each validation set. Only the first ones are evaluated, and the time of all is taken from that.

    Raises:
        RequestError: training would refuse the request, or it asks for devices that this machine doesn't have.
        RunError: the training failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        training = training_request(request, _training_config(request, val_batches=val_batches))
        objects = None
        if request.call is not None:
            objects = request.call.objects
        # Nothing is printed, not even a failure.
        training = replace(training, sub_run=Path(folder) / "steps", call=PythonCall(objects, name=None))
        result = ReplayTraining().run(training)
        if result.failure is not None:
            raise RunError(f"Rank {result.failure.first.rank} failed: {result.failure.first.cause}")
        content = None
        if result.run_dir is not None:
            content = read_object(result.run_dir.path / STEPS_FILE)
        if content is None:
            raise RunError(f"The training ended with status {result.status} before it had made a step.")
        steps = TimedSteps(**content)
        if steps.validation_s is None or not val_batches:
            return steps
        evaluated = sum(min(number, _VALIDATION_BATCHES) for number in val_batches.values())
        return replace(steps, validation_s=steps.validation_s * sum(val_batches.values()) / evaluated)


def _training_config(request: Request, *, val_batches: Mapping[str, int]) -> dict[str, Any]:
    raw: dict[str, Any] = deepcopy(dict(request.raw))
    # The user's code may ask for it.
    raw["job"] = "train"
    raw["resume"] = None
    # Other weights take the same time.
    raw["init_from"] = None
    raw["init"] = {**raw.get("init", {}), "training": False}
    raw["logger"] = {"jsonl": {"_target_": "framework.loggers.jsonl.JsonlLogger"}}
    raw["preflight"] = {**raw.get("preflight", {}), "enabled": False}
    raw["checkpoint"] |= {"enabled": False, "monitor": None, "every_n_steps": None, "every_n_epochs": None}
    # A fast_dev_run would leave out the callbacks.
    raw["trainer"] |= {"profiler": None, "progress": "off", "num_sanity_val_steps": 0, "fast_dev_run": False}
    if val_batches:
        raw["trainer"]["limit_val_batches"] = _VALIDATION_BATCHES
    nnodes = request.config.topology.nnodes
    if nnodes > 1 and raw["data"]["global_batch_size"] is not None:
        raw["data"]["global_batch_size"] = max(1, raw["data"]["global_batch_size"] // nnodes)
    raw["topology"] |= {"nnodes": 1, "node_rank": 0, "rdzv_endpoint": None}
    raw["launcher"] |= {"_target_": "framework.launch.local.LocalLauncher", "args": {}, "max_restarts": 0}
    stopwatch = {"_target_": "framework.jobs.plan.stopwatch.Stopwatch", "seconds": _SECONDS}
    raw["callbacks"] = {**raw["callbacks"], "plan_stopwatch": stopwatch}
    return raw

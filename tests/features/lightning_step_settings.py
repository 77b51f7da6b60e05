"""The modules of `lightning_steps`, for tests that don't import Lightning, which takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

STEPS = "tests.features.lightning_steps"

SETTINGS: dict[str, dict[str, Any]] = {
    "Hooked": {"accumulate_grad_batches": 2},
    "Skipping": {},
    "WithCallbacks": {},
    "Skipped": {},
    "Stopping": {"max_epochs": 6},
    "Averaged": {},
    "EpochsAveraged": {},
    "EpochSchedule": {"accumulate_grad_batches": 2},
    "LBFGS": {},
    "PlainLBFGS": {"gradient_clip_val": 2.0},
    "Gan": {},
    "NormedGan": {},
    "Accumulating": {},
    "Schedules": {},
    "WarmingUp": {},
}
"""The name of each module, and keys of the section `trainer`, which are Lightning's own."""


def recipe_of(name: str, folder: Path) -> dict[str, Any]:
    """Return the recipe that trains a module. folder: where it writes its notes."""
    return {
        "defaults": [{"override /task": "lightning"}, {"override /logger": "jsonl"}],
        "model": {"_target_": f"{STEPS}.{name}", "folder": str(folder)},
        "data": {
            "shuffle": False,
            "datasets": {
                "_target_": "framework.tasks.lightning.datamodule",
                "module": {"_target_": f"{STEPS}.Data"},
            },
        },
        "trainer": {"max_epochs": 3, "num_threads": 1, "log_every_n_steps": 1, **SETTINGS.get(name, {})},
    }

"""The modules of `lightning_steps`, for tests that don't import Lightning, which takes seconds."""

from __future__ import annotations

from typing import Any

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

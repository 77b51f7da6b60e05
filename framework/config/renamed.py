"""Earlier names in configurations, which keep working: those of `_target_`s and of launchers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TARGETS = {
    "framework.adapters.LightningTask": "framework.tasks.lightning.LightningTask",
    "framework.adapters.datamodule": "framework.tasks.lightning.datamodule",
    "framework.adapters.lightning.configure_optimizers": "framework.tasks.lightning.configure_optimizers",
    "framework.adapters.lightning.lr_scheduler": "framework.tasks.lightning.lr_scheduler",
    "framework.training.optimizer.cosine": "framework.optim.cosine",
}
LAUNCHERS = {"adopted": "external", "in_place": "in_process"}


def with_present_names(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration, which an earlier version may have saved, with the names of today."""
    present = {name: _present(value) for name, value in raw.items()}
    launcher = present.get("launcher")
    if isinstance(launcher, dict) and launcher.get("name") in LAUNCHERS:
        launcher["name"] = LAUNCHERS[launcher["name"]]
    return present


def _present(value: Any) -> Any:
    if isinstance(value, Mapping):
        present = {name: _present(item) for name, item in value.items()}
        target = present.get("_target_")
        if isinstance(target, str) and target in TARGETS:
            present["_target_"] = TARGETS[target]
        return present
    if isinstance(value, list):
        return [_present(item) for item in value]
    return value

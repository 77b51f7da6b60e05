"""Names and keys of earlier versions in saved configurations: renamed ones keep working, removed ones are dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TARGETS = {
    "framework.adapters.LightningTask": "framework.tasks.lightning.LightningTask",
    "framework.adapters.datamodule": "framework.tasks.lightning.datamodule",
    "framework.adapters.lightning.configure_optimizers": "framework.tasks.lightning.configure_optimizers",
    "framework.adapters.lightning.lr_scheduler": "framework.tasks.lightning.lr_scheduler",
    "framework.training.optimizer.cosine": "framework.optim.cosine",
}

# A launcher was named by `launcher.name` before it had a `_target_`.
_LAUNCHER_TARGETS = {
    "auto": "framework.launch.auto.AutoLauncher",
    "elastic": "framework.launch.elastic.ElasticLauncher",
    "external": "framework.launch.external.ExternalLauncher",
    "in_process": "framework.launch.in_process.InProcessLauncher",
    "local": "framework.launch.local.LocalLauncher",
}
_LAUNCHER_OPTIONS = {"adopted": "external", "in_place": "in_process"}

REMOVED: dict[str, Any] = {
    "trainer.cpu_affinity": False,
    "trainer.log_rank_losses": False,
    "collectives": {"backends": None, "delay": "1s"},
}
"""Keys that no longer exist, with the default that they had."""

# Runs of earlier versions that used it go on in `metrics.jsonl`, which has the same numbers.
_REMOVED_LOGGER = "framework.loggers.CSVLogger"
_JSONL_LOGGER = "framework.loggers.JsonlLogger"


def with_present_names(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration, which an earlier version may have saved, with the names of today."""
    present = {name: _present(value) for name, value in raw.items()}
    launcher = present.get("launcher")
    if isinstance(launcher, dict) and "name" in launcher:
        present["launcher"] = _present_launcher(launcher)
    return present


def present_override(override: str) -> str:
    """Return what to type today for an override of an earlier version; any other is returned as it is."""
    key, _, value = override.partition("=")
    if key == "launcher.name":
        return f"launcher={_LAUNCHER_OPTIONS.get(value, value)}"
    if key == "launcher" and value in _LAUNCHER_OPTIONS:
        return f"launcher={_LAUNCHER_OPTIONS[value]}"
    return override


def present_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that a run of an earlier version was started with, as they are typed today."""
    present = []
    for text in overrides:
        key, _, value = text.partition("=")
        key = key.lstrip("+~")
        if key == "logger":
            present.append(f"logger={_present_loggers(value)}")
        elif key not in REMOVED and not key.startswith(("logger.csv", "collectives.")):
            present.append(present_override(text))
    return present


def _present_loggers(value: str) -> str:
    """Return the options of `logger=`, with `jsonl` in place of `csv`."""
    names = [name.strip() for name in value.strip("[]").split(",")]
    if "csv" not in names:
        return value
    # Each once, in their order.
    present: dict[str, None] = {}
    for name in names:
        if name == "csv":
            name = "jsonl"
        present[name] = None
    return f"[{','.join(present)}]"


def without_removed(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved configuration without the keys that no longer exist."""
    present = dict(saved)
    for key in _removed_keys(saved):
        section, _, name = key.rpartition(".")
        if not section:
            del present[name]
            continue
        present[section] = {other: value for other, value in present[section].items() if other != name}
        if section == "logger":
            present[section].setdefault("jsonl", {"_target_": _JSONL_LOGGER})
    return present


def removed_settings(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the removed keys that a saved configuration sets to something other than their default."""
    settings = {}
    for key, value in _removed_keys(saved).items():
        if value != REMOVED.get(key):
            settings[key] = value
    return settings


def _removed_keys(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a saved configuration that no longer exist, and their values."""
    keys = {}
    for key in REMOVED:
        section, _, name = key.rpartition(".")
        values: Any = saved
        if section:
            values = saved.get(section, {})
        if isinstance(values, Mapping) and name in values:
            keys[key] = values[name]
    loggers = saved.get("logger")
    if isinstance(loggers, Mapping):
        for name, node in loggers.items():
            if isinstance(node, Mapping) and node.get("_target_") == _REMOVED_LOGGER:
                keys[f"logger.{name}"] = node
    return keys


def _present_launcher(launcher: Mapping[str, Any]) -> dict[str, Any]:
    present = {key: value for key, value in launcher.items() if key != "name"}
    name = launcher["name"]
    target = _LAUNCHER_TARGETS.get(_LAUNCHER_OPTIONS.get(name, name))
    if target is None:
        return dict(launcher)
    # Another class than that of `auto`, which every option of ours inherits, was typed for this run.
    if present.get("_target_", _LAUNCHER_TARGETS["auto"]) == _LAUNCHER_TARGETS["auto"]:
        present["_target_"] = target
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

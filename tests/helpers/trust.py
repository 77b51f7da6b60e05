"""Runs of other tests' folders, which the command asks about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def trusting(overrides: Sequence[str]) -> list[str]:
    """Return the overrides with `trust=true` if they name a run that isn't below `outputs` of the working directory."""
    keys = ("resume=", "rerun=", "run=", "checkpoint.path=")
    named = [text.partition("=")[2].strip("'") for text in overrides if text.startswith(keys)]
    outputs = Path.cwd() / "outputs"
    is_elsewhere = any(name.startswith("/") and not Path(name).is_relative_to(outputs) for name in named)
    is_typed = any(text.startswith("trust=") for text in overrides)
    return [*overrides, "trust=true"] if is_elsewhere and not is_typed else [*overrides]

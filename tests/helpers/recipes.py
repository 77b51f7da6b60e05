"""Recipes of a user's own folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def write_recipe(folder: Path, name: str, content: Mapping[str, Any]) -> None:
    """Make `recipe=NAME` in a user's folder."""
    file = folder / "conf" / "recipe" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"# @package _global_\n{yaml.safe_dump(content)}")

"""Compare what a repeated logging interval gives with what the run has logged. No torch here."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from framework.runs.record import RunRecord

# A row with it ends a logging interval.
_OF_A_LOG = "train/steps_per_s"
# The largest relative rounding of a number in each precision.
_ROUNDING = {
    "64-true": 2.0**-53,
    "32-true": 2.0**-24,
    "bf16-mixed": 2.0**-8,
    "bf16-true": 2.0**-8,
    "16-mixed": 2.0**-11,
    "16-true": 2.0**-11,
}
# As job=parity allows for one step, times the rounding.
_ALLOWED_FINE = 128.0
_ALLOWED_COARSE = 4.0
_COARSE = 2.0**-16


def interval_end(record: RunRecord, step: int) -> int | None:
    """Return the last step of the logging interval that contains `step`; None if the run hasn't logged it."""
    for row in record.rows(having=_OF_A_LOG):
        if row["step"] >= step:
            return int(row["step"])
    return None


def tolerance(precision: str, *, steps: int) -> float:
    """Return how far a logged mean may be off, as a share of it, after `steps` steps on another device or topology.

    That is what job=parity allows for one step, for each step that was repeated. Rounding may grow faster than that.
    """
    unit = _ROUNDING.get(precision, 2.0**-24)
    allowed = _ALLOWED_COARSE if unit > _COARSE else _ALLOWED_FINE
    return allowed * unit * max(1, steps)


def compared(
    logged: RunRecord, repeated: RunRecord, *, step: int, names: Collection[str], allowed: float | None
) -> dict[str, dict[str, Any]]:
    """Return by name what both have logged at `step`, and if it is equal.

    Args:
        names: of losses and metrics, without the `train/` before them.
        allowed: relative; None: bit for bit.
    """
    before = _values_at(logged, step)
    now = _values_at(repeated, step)
    values = {}
    for name in names:
        full_name = f"train/{name}"
        if full_name in before and full_name in now:
            old = before[full_name]
            new = now[full_name]
            values[full_name] = {"logged": old, "repeated": new, "equal": _is_equal(old, new, allowed)}
    return values


def _values_at(record: RunRecord, step: int) -> dict[str, Any]:
    """Return what was logged at a step; texts for numbers that aren't finite."""
    values: dict[str, Any] = {}
    for row in record.rows():
        if row["step"] == step:
            values |= row
            values |= row.get("nonfinite", {})
    return values


def _is_equal(old: Any, new: Any, allowed: float | None) -> bool:
    if allowed is None or isinstance(old, str) or isinstance(new, str):
        return bool(old == new)
    return math.isclose(old, new, rel_tol=allowed, abs_tol=allowed)


def same_place(topology: Mapping[str, Any], present: Mapping[str, Any]) -> bool:
    """Return True for as many processes on as many devices, of the same kind, as far as that is recorded."""
    for key in ("world_size", "span"):
        if topology.get(key) != present.get(key):
            return False
    return bool(topology.get("gpus_per_node")) == bool(present.get("gpus_per_node"))

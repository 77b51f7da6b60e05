"""Which metrics come from an evaluation, told by the part their names bear."""

from __future__ import annotations

from collections.abc import Mapping

_EVALUATED_PARTS = ("val/", "test/")


def of_evaluation(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if name.startswith(_EVALUATED_PARTS)}

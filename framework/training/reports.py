"""Pairs (sum, count) that callbacks report, accumulated until they are reduced over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

from framework.distributed.collectives import gather_to_all
from framework.distributed.context import Context
from framework.types import SumCount


@final
class ReportedPairs:
    """This rank's reported pairs, by the names they are logged under. Tensors are read only by `reduce`."""

    def __init__(self) -> None:
        self._pairs: dict[str, list[SumCount]] = {}

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def add(self, name: str, pair: SumCount) -> None:
        self._pairs.setdefault(name, []).append(pair)

    def reduce(self, context: Context, *, prefix: str) -> dict[str, float]:
        """Return the means over all ranks of the pairs whose names have the prefix, and remove these.

        Every rank must call it; waits for the device.
        """
        own = {name: total for name, total in self.state_dict().items() if name.startswith(prefix)}
        self._pairs = {name: pairs for name, pairs in self._pairs.items() if name not in own}
        sums: dict[str, tuple[float, float]] = {}
        for of_rank in gather_to_all(own, context):
            for name, (total, count) in of_rank.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + total, before[1] + count
        return {name: total / count for name, (total, count) in sums.items() if count}

    def state_dict(self) -> dict[str, tuple[float, float]]:
        """Return what isn't reduced yet; waits for the device."""
        return {
            name: (sum(float(total) for total, _ in pairs), sum(float(count) for _, count in pairs))
            for name, pairs in self._pairs.items()
        }

    def load_state_dicts(self, states: Iterable[Mapping[str, Any]]) -> None:
        for state in states:
            for name, (total, count) in state.items():
                self.add(name, (total, count))

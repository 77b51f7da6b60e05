"""The phases of a task: which are due in a step, and how often an optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, final

from framework.config.suggest import did_you_mean, nearest
from framework.errors import ConfigError, TargetError
from framework.types import Phase, Task


@final
class Phases:
    """The phases of a task. Raises TargetError for one that is wrong, ConfigError for an optimizer that isn't there.

    optimizers: the names in the section `optimizer`.
    """

    def __init__(self, phases: Sequence[Any], *, task: Task, optimizers: Collection[str]) -> None:
        self._phases: tuple[Any, ...] = tuple(phases)
        kind = type(task).__name__
        for each in self._phases:
            if not isinstance(each, Phase) or each.every < 1:
                raise TargetError(
                    f"{kind}.phases has {each!r}. Give framework.Phase(name, step, optimizer, every=1, offset=0), with "
                    "step a method of the task and every at least 1."
                )
            if each.optimizer not in optimizers:
                there = ", ".join(filter(None, optimizers)) or "a single one without a name"
                raise ConfigError(
                    f"The phase {each.name!r} of {kind} steps optimizer.{each.optimizer}, and the section optimizer "
                    f"has {there}.{did_you_mean(nearest(each.optimizer, optimizers))}\n"
                    f"Give it optimizers by name: optimizer: {{{each.optimizer}: {{_target_: ..., params: ...}}, ...}}"
                )
        idle = next((s for s in range(math.lcm(*(each.every for each in self._phases))) if not self.due(s)), None)
        names = [each.name for each in self._phases]
        if not names or idle is not None or len(set(names)) < len(names):
            problem = (
                "none" if not names else "one name twice" if idle is None else f"none that is due in step {idle + 1}"
            )
            raise TargetError(f"{kind}.phases has {problem}. Every step needs a phase, and each has its own name.")

    @property
    def all(self) -> tuple[Phase, ...]:
        """All phases, in the order in which they run."""
        return self._phases

    def due(self, step: int) -> tuple[Phase, ...]:
        """Return the phases to run when `step` steps are done."""
        return tuple(each for each in self._phases if (step + 1 + each.offset) % each.every == 0)

    def count(self, optimizer: str, *, steps: int) -> int:
        """Return how often an optimizer steps in the first `steps` steps of the training."""
        own = [each for each in self._phases if each.optimizer == optimizer]
        return sum((steps + each.offset) // each.every - each.offset // each.every for each in own)


def phases_of(task: Any, *, optimizers: Collection[str]) -> Phases | None:
    """Return the task's phases; None if it has a single loss."""
    phases = getattr(task, "phases", None)
    return None if phases is None else Phases(phases, task=task, optimizers=optimizers)

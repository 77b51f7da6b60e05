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

    Args:
        optimizers: The names in the section `optimizer`.
    """

    def __init__(self, phases: Sequence[Any], *, task: Task, optimizers: Collection[str]) -> None:
        self._phases: tuple[Any, ...] = tuple(phases)
        task_name = type(task).__name__
        for phase in self._phases:
            _check_phase(phase, task_name, optimizers)
        self._check_every_step_has_one(task_name)

    @property
    def all(self) -> tuple[Phase, ...]:
        """All phases, in the order in which they run."""
        return self._phases

    def due(self, step: int) -> tuple[Phase, ...]:
        """Return the phases to run when `step` steps are done."""
        return tuple(phase for phase in self._phases if (step + 1 + phase.offset) % phase.every == 0)

    def count(self, optimizer: str, *, steps: int) -> int:
        """Return how often an optimizer steps in the first `steps` steps of the training."""
        number = 0
        for phase in self._phases:
            if phase.optimizer == optimizer:
                number += (steps + phase.offset) // phase.every - phase.offset // phase.every
        return number

    def _check_every_step_has_one(self, task_name: str) -> None:
        """Raise TargetError if there are no phases, two of one name, or a step without any."""
        names = [phase.name for phase in self._phases]
        problem = None
        if not names:
            problem = "none"
        elif len(set(names)) < len(names):
            problem = "one name twice"
        else:
            # Which phases are due repeats after so many steps.
            period = math.lcm(*(phase.every for phase in self._phases))
            idle_steps = [step + 1 for step in range(period) if not self.due(step)]
            if idle_steps:
                problem = f"none that is due in step {idle_steps[0]}"
        if problem is not None:
            raise TargetError(f"{task_name}.phases has {problem}. Every step needs a phase, and each has its own name.")


def phases_of(task: Any, *, optimizers: Collection[str]) -> Phases | None:
    """Return the task's phases; None if it has a single loss."""
    phases = getattr(task, "phases", None)
    if phases is None:
        return None
    return Phases(phases, task=task, optimizers=optimizers)


def _check_phase(phase: Any, task_name: str, optimizers: Collection[str]) -> None:
    if not isinstance(phase, Phase) or phase.every < 1:
        raise TargetError(
            f"{task_name}.phases has {phase!r}. Give framework.Phase(name, step, optimizer, every=1, offset=0), with "
            "step a method of the task and every at least 1."
        )
    if phase.optimizer not in optimizers:
        names = ", ".join(filter(None, optimizers)) or "a single one without a name"
        raise ConfigError(
            f"The phase {phase.name!r} of {task_name} steps optimizer.{phase.optimizer}, and the section optimizer "
            f"has {names}.{did_you_mean(nearest(phase.optimizer, optimizers))}\n"
            f"Give it optimizers by name: optimizer: {{{phase.optimizer}: {{_target_: ..., params: ...}}, ...}}"
        )

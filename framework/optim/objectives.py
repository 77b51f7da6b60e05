"""The objectives of a task: which are due in a step, and how often an optimizer steps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence
from typing import Any, final

from framework.config.suggest import did_you_mean, nearest
from framework.errors import ConfigError, TargetError
from framework.types import Objective, Task


@final
class Objectives:
    """The objectives of a task.

    Raises TargetError for one that is wrong, ConfigError for an optimizer that isn't there.

    Args:
        optimizers: The names in the section `optimizer`.
    """

    def __init__(self, objectives: Sequence[Any], *, task: Task, optimizers: Collection[str]) -> None:
        self._objectives: tuple[Any, ...] = tuple(objectives)
        task_name = type(task).__name__
        for objective in self._objectives:
            _check_objective(objective, task_name, optimizers)
        self._check_every_step_has_one(task_name)

    @property
    def all(self) -> tuple[Objective, ...]:
        """All objectives, in the order in which they run."""
        return self._objectives

    def due(self, step: int) -> tuple[Objective, ...]:
        """Return the objectives to run when `step` steps are done."""
        return tuple(each for each in self._objectives if (step + 1 + each.offset) % each.every == 0)

    def count(self, optimizer: str, *, steps: int) -> int:
        """Return how often an optimizer steps in the first `steps` steps of the training."""
        number = 0
        for objective in self._objectives:
            if objective.optimizer == optimizer:
                number += (steps + objective.offset) // objective.every - objective.offset // objective.every
        return number

    def _check_every_step_has_one(self, task_name: str) -> None:
        """Raise TargetError if there are no objectives, two of one name, or a step without any."""
        names = [objective.name for objective in self._objectives]
        problem = None
        if not names:
            problem = "none"
        elif len(set(names)) < len(names):
            problem = "one name twice"
        else:
            # Which objectives are due repeats after so many steps.
            period = math.lcm(*(objective.every for objective in self._objectives))
            idle_steps = [step + 1 for step in range(period) if not self.due(step)]
            if idle_steps:
                problem = f"none that is due in step {idle_steps[0]}"
        if problem is not None:
            raise TargetError(
                f"{task_name}.objectives has {problem}. Every step needs an objective, and each has its own name."
            )


def has_objectives(task: Any) -> bool:
    """Return True if the task has objectives in place of a `training_step`."""
    return hasattr(task, "objectives") or hasattr(task, "phases")


def objectives_of(task: Any, *, optimizers: Collection[str]) -> Objectives | None:
    """Return the task's objectives; None if it has a single loss."""
    objectives = getattr(task, "objectives", None)
    if objectives is None and hasattr(task, "phases"):
        name = type(task).__name__
        warnings.warn(f"{name}.phases is now {name}.objectives.", FutureWarning, stacklevel=2)
        objectives = task.phases
    if objectives is None:
        return None
    return Objectives(objectives, task=task, optimizers=optimizers)


def _check_objective(objective: Any, task_name: str, optimizers: Collection[str]) -> None:
    if not isinstance(objective, Objective) or objective.every < 1:
        raise TargetError(
            f"{task_name}.objectives has {objective!r}. Give framework.Objective(name, step, optimizer, every=1, "
            "offset=0), with step a method of the task and every at least 1."
        )
    if objective.optimizer not in optimizers:
        names = ", ".join(filter(None, optimizers)) or "a single one without a name"
        raise ConfigError(
            f"The objective {objective.name!r} of {task_name} steps optimizer.{objective.optimizer}, and the section "
            f"optimizer has {names}.{did_you_mean(nearest(objective.optimizer, optimizers))}\n"
            f"Give it optimizers by name: optimizer: {{{objective.optimizer}: {{_target_: ..., params: ...}}, ...}}"
        )

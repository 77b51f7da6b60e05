"""The sweep on disk that a command continues: `resume=SWEEP`, `resume=auto` or `sweep.worker=SWEEP`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from framework.command.trust import why_not_owned
from framework.config.hydra_compose import is_swept
from framework.config.overrides import key_of
from framework.errors import ConfigError
from framework.sweeps.find import find_sweep, newest_unfinished_sweep
from framework.sweeps.folder import SWEEPS, SweepFolder, SweepPlan
from framework.system.formatting import display_path


@dataclass(frozen=True)
class SavedSweep:
    """A sweep on disk."""

    folder: SweepFolder
    plan: SweepPlan


def find_saved_sweep(
    name: str, *, key: str, typed: Sequence[str], outputs: Callable[[], Sequence[Path]], is_trusted: bool
) -> SavedSweep | None:
    """Return the sweep that `resume=NAME` or `sweep.worker=NAME` names; None for `resume=auto` if none is unfinished.

    Raises ConfigError if there is none of this name, if it can't be read, if it isn't known to be the user's, or if
    another recipe is typed.

    Args:
        key: `resume` or `sweep.worker`.
        typed: the command's overrides. `auto` leaves out the sweeps of other recipes.
        outputs: returns the folders in which `auto` looks.
        is_trusted: the user has typed trust=true.
    """
    if name == "auto" and key == "resume":
        return _newest_unfinished(outputs(), typed=typed)
    folder = find_sweep(name, key=key)
    reason = why_not_owned(folder.path)
    if reason is not None and not is_trusted:
        raise ConfigError(
            f"{display_path(folder.path)} isn't known to be yours: {reason}. Its trials would run what its sweep.json "
            "says. Read it, then type trust=true."
        )
    plan = SweepPlan.read_with_secrets(folder)
    other = _other_recipe(plan, typed)
    if other is not None:
        raise ConfigError(
            f"{other} can't go with {key}: that sweep's recipe is {plan.recipe}. Leave it out, or start a new sweep "
            f"with {other}."
        )
    return SavedSweep(folder, plan)


def _newest_unfinished(outputs: Sequence[Path], *, typed: Sequence[str]) -> SavedSweep | None:
    """Return the newest unfinished sweep of the typed recipe in these folders, or None; print which."""

    def fits(folder: SweepFolder) -> bool:
        is_own = why_not_owned(folder.path, checks_writers=False) is None
        return is_own and _other_recipe(SweepPlan.read(folder), typed) is None

    for place in outputs:
        folder = newest_unfinished_sweep(place, fits=fits)
        if folder is not None:
            print(f"resume=auto: {display_path(folder.path)}", file=sys.stderr, flush=True)
            return SavedSweep(folder, SweepPlan.read_with_secrets(folder))
    sweeps = display_path(outputs[0] / SWEEPS)
    print(f"resume=auto: no unfinished sweep in {sweeps}; a new one begins", file=sys.stderr, flush=True)
    return None


def _other_recipe(plan: SweepPlan, typed: Sequence[str]) -> str | None:
    """Return the override of a recipe that is typed and isn't the sweep's; None if there is none.

    A sweep over recipes may be continued with further ones.
    """
    recipes = [text for text in typed if key_of(text) == "recipe"]
    before = [text for text in plan.overrides if key_of(text) == "recipe"] or [f"recipe={plan.recipe}"]
    if not recipes or is_swept(before[-1]) or is_swept(recipes[-1]) or recipes[-1] == before[-1]:
        return None
    return recipes[-1]

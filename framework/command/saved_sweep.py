"""The sweep on disk that a command continues: `resume=SWEEP`, `resume=auto` or `sweep.worker=SWEEP`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from framework.command.trust import why_not_owned
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
    name: str, *, key: str, outputs: Callable[[], Sequence[Path]], is_trusted: bool
) -> SavedSweep | None:
    """Return the sweep that `resume=NAME` or `sweep.worker=NAME` names; None for `resume=auto` if none is unfinished.

    Raises ConfigError if there is none of this name, if it can't be read, or if it isn't known to be the user's.

    Args:
        key: `resume` or `sweep.worker`.
        outputs: returns the folders in which `auto` looks.
        is_trusted: the user has typed trust=true.
    """
    if name == "auto" and key == "resume":
        return _newest_unfinished(outputs())
    folder = find_sweep(name, key=key)
    reason = why_not_owned(folder.path)
    if reason is not None and not is_trusted:
        raise ConfigError(
            f"{display_path(folder.path)} isn't known to be yours: {reason}. Its trials would run what its sweep.json "
            "says. Read it, then type trust=true."
        )
    return SavedSweep(folder, SweepPlan.read_with_secrets(folder))


def _newest_unfinished(outputs: Sequence[Path]) -> SavedSweep | None:
    """Return the newest unfinished sweep in these folders, or None; print which."""
    for place in outputs:
        folder = newest_unfinished_sweep(place, is_own=_is_own)
        if folder is not None:
            print(f"resume=auto: {display_path(folder.path)}", file=sys.stderr, flush=True)
            return SavedSweep(folder, SweepPlan.read_with_secrets(folder))
    sweeps = display_path(outputs[0] / SWEEPS)
    print(f"resume=auto: no unfinished sweep in {sweeps}; a new one begins", file=sys.stderr, flush=True)
    return None


def _is_own(folder: SweepFolder) -> bool:
    return why_not_owned(folder.path, checks_writers=False) is None

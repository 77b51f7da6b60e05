"""Mirror what a command writes to its URL, if `path.outputs` is one. No torch, and fsspec only then."""

from __future__ import annotations

import sys
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from framework.remote.place import RemotePlace
from framework.system.output import ERASE_BELOW
from framework.system.shown_text import shown


def mirroring(directory: Path, *, only: Collection[str] = ()) -> AbstractContextManager[None]:
    """Return what mirrors the directory of a run or sweep while it is entered; see `remote.mirror.mirrored`."""
    place = RemotePlace.of_local(directory)
    if place is None:
        return nullcontext()
    from framework.remote.mirror import mirrored

    return mirrored(place, only=only, say=_say)


def _say(text: str) -> None:
    if sys.stderr.isatty():
        # Rank 0 may show its progress there.
        sys.stderr.write(f"\r{ERASE_BELOW}")
    print(shown(text), file=sys.stderr, flush=True)

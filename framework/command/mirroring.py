"""Mirror what a command writes to its URL, if `path.outputs` is one. No torch, and fsspec only then."""

from __future__ import annotations

import sys
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from framework.config.schema import Config
from framework.remote.place import RemotePlace, is_url
from framework.system.output import ERASE_BELOW
from framework.system.shown_text import shown

if TYPE_CHECKING:
    from framework.remote.mirror import Mirror


def make_local_outputs(config: Config) -> None:
    """Make the local folder that stands for `path.outputs`, if that is a URL. Raises RequestError if it can't be."""
    if is_url(config.path.outputs):
        RemotePlace.of_url(config.path.outputs, cache=config.path.cache).make_local()


def mirroring(directory: Path, *, only: Collection[str] = ()) -> AbstractContextManager[Mirror | None]:
    """Return what mirrors the directory of a run or sweep while it is entered; see `remote.mirror.mirrored`.

    It yields None if there is no URL.
    """
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

"""The local path of initial weights, which may be named by a URL. No torch."""

from __future__ import annotations

from pathlib import Path

from framework.remote.place import RemotePlace, is_url


def weights_path(init_from: str, *, cache: str | None) -> Path:
    """Return the local path of `init_from`. If it is a URL that isn't on this machine yet, fetch it.

    cache: `path.cache`.
    """
    if not is_url(init_from):
        return Path(init_from)
    place = RemotePlace.of_url(init_from, cache=cache)
    if not place.local.exists():
        # It imports what only URLs need.
        from framework.remote.fetch import fetch_initial

        fetch_initial(place)
    return place.local

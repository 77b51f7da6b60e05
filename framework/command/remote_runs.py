"""Runs that are named by URLs: fetch them, and put the folders that stand for them in place of the URLs. No torch.

A path in the folder of a URL is taken for the URL, so that a run which was resumed elsewhere since isn't resumed from
an old copy.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from framework.config.find_run import is_run
from framework.config.hydra_compose import value_of
from framework.config.overrides import key_of, path_argument
from framework.remote.place import RemotePlace, is_copy, is_url
from framework.system.shown_text import shown

if TYPE_CHECKING:
    from framework.remote.fetch import RemoteError

_RESUME = "resume"
_RUN = "run"
_CHECKPOINT = "checkpoint.path"


def fetch_records_of(path: Mapping[str, Any], recipe: str) -> RemoteError | None:
    """Fetch the records of a recipe's runs in `path.outputs`, which is a URL. Return why that failed, which is printed.

    path: the configuration's section.
    """
    from framework.remote.fetch import RemoteError, fetch_records

    place = RemotePlace.of_url(path["outputs"], cache=path.get("cache")).below(recipe)
    try:
        fetch_records(place)
    except RemoteError as error:
        print(shown(str(error)), file=sys.stderr, flush=True)
        return error
    return None


@final
class RemoteRuns:
    """Fetches the runs that one command names."""

    def __init__(self, cache: Callable[[], str | None]) -> None:
        """cache: returns `path.cache`; called if there is a URL."""
        self._cache = cache
        # URL of initial weights → that of the checkpoint it means.
        self._initial: dict[str, str] = {}

    def with_local(self, typed: Sequence[str], keys: Sequence[str]) -> list[str]:
        """Return the overrides with local paths in place of the URLs of these keys, which are fetched.

        Raises RemoteError or CheckpointError for what can't be fetched.
        """
        overrides = []
        for text in typed:
            if key_of(text) in keys:
                value = value_of(text)
                path = self._local(key_of(text), value)
                if path is not None:
                    (text,) = shlex.split(path_argument(key_of(text), path))
            overrides.append(text)
        return overrides

    def checkpoint(self, path: str) -> str:
        """Return the local path of the checkpoint that a URL names; other paths as they are."""
        local = self._local(_CHECKPOINT, path)
        return path if local is None else str(local)

    def pinned(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return a configuration whose `init_from`, if it is the URL of a run, names the checkpoint that it means now.

        Every rank and every resume then begins with the same weights.
        """
        url = raw.get("init_from")
        if not isinstance(url, str) or not is_url(url) or raw.get(_RESUME) is not None:
            return raw
        if url not in self._initial:
            from framework.remote.fetch import fetch_initial

            self._initial[url] = fetch_initial(RemotePlace.of_url(url, cache=raw["path"].get("cache"))).url
        return {**raw, "init_from": self._initial[url]}

    def _local(self, key: str, value: Any) -> Path | None:
        """Return the local path for the value of a key; None if it stands for no URL."""
        if not isinstance(value, str):
            return None
        if is_url(value):
            place: RemotePlace | None = RemotePlace.of_url(value, cache=self._cache())
        else:
            place = RemotePlace.of_local(Path(value))
        if place is None:
            return None

        from framework.remote.fetch import RemoteError, fetch_checkpoint, fetch_configuration, fetch_run, run_place

        try:
            run = run_place(place)
            if run is None:
                # What is only here, or nowhere, is for those who look there.
                return place.local if place.local.exists() else _raise_no_run(key, place)
            run_at, inside = run
            if key == _CHECKPOINT:
                return fetch_checkpoint(run_at, inside)
            if key not in (_RESUME, _RUN):
                fetch_configuration(run_at)
                return run_at.local
            fetch_run(run_at)
            if inside not in ("", "checkpoints", "checkpoints/last"):
                return fetch_checkpoint(run_at, inside)
            return run_at.local
        except RemoteError as error:
            if not _is_trained_here(place.local):
                raise
            print(shown(f"{error}\nIt was trained on this machine, and is used as it is here."), file=sys.stderr)
            return place.local


def _is_trained_here(path: Path) -> bool:
    for folder in (path, *path.parents):
        if is_run(folder):
            return not is_copy(folder)
    return False


def _raise_no_run(key: str, place: RemotePlace) -> Path:
    from framework.remote.fetch import RemoteError

    raise RemoteError(
        f"{key}={place.url}: there is no run. List those beside it with job=runs runs={place.url.rpartition('/')[0]}"
    )

"""Commands that start from a saved run.

`resume=RUN` continues it, `rerun=RUN` runs it again, and `checkpoint.path=CHECKPOINT` uses its weights. All use the
saved configuration plus what is typed; defaults that changed since then have no effect.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from framework.checkpoint import LocalStorage, find
from framework.checkpoint.layout import CONFIG_NAME
from framework.command.trust import check_trust, why_not_owned
from framework.config.parse import show
from framework.config.renamed import REMOVED, present_override, removed_settings, without_removed
from framework.config.saved import (
    SavedRun,
    apply_typed,
    is_run,
    key_of,
    load_checkpoint,
    load_rerun,
    load_saved,
    merge_overrides,
    newest_unfinished,
    objects_of,
    resume_argument,
    search_path_override,
    value_of,
)
from framework.config.secrets import masked_override, missing_secrets
from framework.errors import ConfigError
from framework.system.formatting import display_path
from framework.system.run_dir import RunDir
from framework.system.shown_text import shown

_RESUME = "resume"
_RERUN = "rerun"
_CHECKPOINT = "checkpoint.path"
_KEYS = (_RESUME, _RERUN, _CHECKPOINT)
_TRUST = "trust"
Compose = Callable[[Sequence[str]], Mapping[str, Any]]
Change = Callable[[Mapping[str, Any], str], dict[str, Any]]


def saved_run(typed: Sequence[str]) -> SavedRun | None:
    """Return the run that is named, if any. Runs none of its code.

    Raises ConfigError if it isn't a run or another recipe is typed, CheckpointError for an unusable checkpoint.
    """
    named = {key: value for key in _KEYS if (value := _typed_path(typed, key)) is not None}
    if not named:
        return None
    if len(named) > 1:
        one, other = list(named)[:2]
        raise ConfigError(f"{one} can't go with {other}: each names the run to start from. Leave one out.")
    ((key, path),) = named.items()
    if key == _RESUME:
        found = load_saved(path, typed=typed)
        if found.checkpoint is not None:
            find(found.checkpoint)  # raises CheckpointError if it isn't complete
    elif key == _RERUN:
        found = load_rerun(path, typed=typed)
    else:
        directory = find(Path(path))
        storage, checkpoint = LocalStorage.of(directory)
        storage.check_file(checkpoint, CONFIG_NAME, storage.read_manifest(checkpoint))
        found = load_checkpoint(directory)
    recipe = found.raw.get("recipe")
    others = [text for text in typed if text.startswith("recipe=") and text != f"recipe={recipe}"]
    if others:
        raise ConfigError(
            f"{others[-1]} can't go with {key}: that run's recipe is {recipe}. "
            f"Leave it out, or start a new run with {others[-1]}."
        )
    return found


def own_outputs(typed: Sequence[str], *, compose: Compose, recipe: Any = None) -> list[Path]:
    """Return `path.outputs` of the command, as typed or as the user's own files set it, never as the run sets it.

    recipe: the run's; the user's own file of that name may set it.
    """
    places = [text for text in typed if key_of(text) in ("path", "path.outputs") or key_of(text).startswith("hydra")]
    recipes = [f"recipe={recipe}"] if re.fullmatch(r"[\w-]+(/[\w-]+)*", str(recipe)) else []
    outputs = []
    for overrides in ([*recipes, *places], recipes, []):
        with suppress(ConfigError):  # there is no such recipe here, or outputs are swept over
            outputs.append(Path(compose(overrides)["path"]["outputs"]).expanduser().absolute())
    return list(dict.fromkeys(outputs))


def _is_trusted(typed: Sequence[str]) -> bool:
    answers = [text for text in typed if key_of(text) == _TRUST]
    if not answers:
        return False
    value = value_of(answers[-1])
    if not isinstance(value, bool):
        raise ConfigError(f"{answers[-1]}: must be true or false.")
    return value


def _was_allowed_before(typed: Sequence[str], *, compose: Compose) -> bool:
    """Return True for a job that SLURM has requeued, and for a node that joins node 0: both follow a first command.

    They start without a person who could answer.
    """
    if int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0:
        return True
    ranks = [text for text in typed if key_of(text).startswith("topology")]
    if not ranks:
        return False
    number: int = compose(ranks)["topology"]["node_rank"]
    return number > 0


def find_auto_run(typed: Sequence[str], *, compose: Compose) -> list[str]:
    """Replace `resume=auto` by the recipe's newest unfinished run in `path.outputs`, or drop it; print which."""
    others = [text for text in typed if key_of(text) != _RESUME]
    if _typed_path(typed, _RESUME) != "auto":
        return list(typed)
    composed = compose([text for text in others if not names_a_run(text)])
    folder = Path(composed["path"]["outputs"]) / composed["recipe"]
    found = newest_unfinished(folder.absolute(), is_own=_is_own)
    if composed["topology"]["node_rank"] == 0:  # the other nodes do the same
        if found is None:
            choice = f"no unfinished run in {display_path(folder)}; a new one begins"
        else:
            status = found.read_run()["status"]
            how = "crashed or still running" if status == "running" else status
            choice = f"{display_path(found.path)} ({how})"
        print(shown(f"resume=auto: {choice}"), file=sys.stderr, flush=True)
    if found is None:
        return others
    # Nobody is there to answer if a cluster starts the command again.
    return [*others, *shlex.split(resume_argument(found.path)), f"{_TRUST}=true"]


def _is_own(run_dir: RunDir) -> bool:
    """Return True unless another user has made the run; print it if so."""
    reason = why_not_owned(run_dir.path, checks_writers=False)
    if reason is not None:
        print(shown(f"resume=auto: {display_path(run_dir.path)} is left out: {reason}"), file=sys.stderr, flush=True)
    return reason is None


def names_a_run(override: str) -> bool:
    """Return True if an override names a saved run, or trusts it; such overrides are not saved with a run."""
    return key_of(override) in (*_KEYS, _TRUST)


@dataclass(frozen=True)
class BaseRun:
    """What the configurations of all jobs of a command are based on."""

    found: SavedRun | None
    # What the saved run's overrides alone compose. A composition differs from it only because of what is typed
    # (`data.datasets.root` follows `data.root`).
    without_typed: Mapping[str, Any] | None
    typed: tuple[str, ...]
    # The saved configuration with the typed overrides, if the files that it was composed of are gone.
    changed: Mapping[str, Any] | None = None

    @property
    def overrides(self) -> tuple[str, ...] | None:
        """All overrides of the run, old and new, if it can't be composed; else None, as the composition has them."""
        if self.found is None or self.changed is None:
            return None
        return tuple(merge_overrides(self.found.overrides, [text for text in self.typed if not names_a_run(text)]))

    def configuration(self, composed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the composed configuration, or the saved one with what is typed applied to it.

        Raises ConfigError for overrides that exclude each other.
        """
        found, typed = self.found, self.typed
        if composed.get(_TRUST) and not any(key_of(text) == _TRUST for text in typed):
            raise ConfigError("trust=true is set in a file. Type it on the command line, for one run: trust=true")
        if found is None:
            return {**_unsaved(composed), _TRUST: False}
        if found.key != _RERUN and "init_from" in map(key_of, typed):
            raise ConfigError(f"{found.key} can't go with init_from: each names initial weights. Leave one out.")
        own = [text for text in typed if not names_a_run(text) and not key_of(text).startswith(("hydra", "recipe"))]
        if self.changed is not None:
            raw = dict(self.changed)
        else:
            assert self.without_typed is not None
            raw = apply_typed(found.raw, before=self.without_typed, after=composed, typed=own)
        raw[_TRUST] = False
        if masked := missing_secrets(raw):
            raise ConfigError(
                f"{', '.join(masked)}: this copy of {found.run_dir.path} lacks the passwords and tokens of the run, "
                f"which are in its {found.run_dir.secrets_file.name}. Type each of these keys again, with its value."
            )
        if raw.get("objects"):
            raw["objects"] = objects_of(found.run_dir, raw)
        raw["resume"] = str(found.checkpoint or found.run_dir.path) if found.key == _RESUME else None
        if found.key == _RERUN:
            raw["rerun"] = str(found.run_dir.path)
        elif found.key == _CHECKPOINT:
            raw |= {"init_from": None, "rerun": None}
        raw["checkpoint"] = {**raw["checkpoint"], "path": str(found.checkpoint) if found.key == _CHECKPOINT else None}
        return raw

    @property
    def parent_run(self) -> Path | None:
        """Return the run whose checkpoint is used; None if it is in no run, or `path.outputs` is typed."""
        typed = {key_of(text) for text in self.typed}
        if self.found is None or self.found.key != _CHECKPOINT or typed & {"path", "path.outputs"}:
            return None
        run_dir = self.found.run_dir.path
        return run_dir if is_run(run_dir) else None


def find_base(typed: Sequence[str], *, compose: Compose, change: Change, swept: bool) -> tuple[BaseRun, list[str]]:
    """Return what a command's configurations are based on, and the overrides to compose.

    If the files of which a saved run was composed aren't there, its config.yaml alone is used.

    compose: returns the configuration of overrides. change: applies overrides to a configuration. swept: they are for
        the jobs of a sweep.
    """
    if swept and _typed_path(typed, _RESUME) is not None:
        raise ConfigError("resume can't go with a sweep: all jobs would write to one directory. Leave -m out.")
    typed = find_auto_run(typed, compose=compose)
    is_trusted = _is_trusted(typed)
    found = saved_run(typed)
    if found is None:
        return BaseRun(None, without_typed=None, typed=tuple(typed)), typed
    # Before anything of the run is composed: a search path may name a package to import.
    if not is_trusted and not _was_allowed_before(typed, compose=compose):
        outputs = own_outputs(typed, compose=compose, recipe=found.raw.get("recipe"))
        check_trust(found, outputs=outputs, asked_by="type trust=true")
    found = _without_removed_keys(found)
    started_with = [present_override(text) for text in _present(found.overrides)]
    try:
        base = BaseRun(found, without_typed=compose(started_with), typed=tuple(typed))
    except ConfigError as error:
        if not swept:
            return _saved_alone(found, typed, compose=compose, change=change, missing=error)
        raise ConfigError(
            f"{error}\n{found.run_dir.path} was started with: {' '.join(map(masked_override, started_with))}\n"
            "Go to the folder it was started from, with its conf/ and recipes/, and name the run by its absolute path."
        ) from error
    return base, merge_overrides(started_with, [text for text in typed if not names_a_run(text)])


def _without_removed_keys(found: SavedRun) -> SavedRun:
    """Return the run of an earlier version without the keys that no longer exist; warn of those that were set."""
    settings = [f"{key}={show(value)}" for key, value in removed_settings(found.raw).items()]
    if settings:
        line = f"{display_path(found.run_dir.path)} sets {', '.join(settings)}, which no longer exists and is ignored."
        print(shown(line), file=sys.stderr, flush=True)
    overrides = tuple(text for text in found.overrides if key_of(text) not in REMOVED)
    return replace(found, raw=without_removed(found.raw), overrides=overrides)


def _present(overrides: Sequence[str]) -> list[str]:
    """Return the overrides without the folders of `hydra.searchpath` that are gone, of which Hydra would warn."""
    present = []
    for text in overrides:
        if key_of(text) == "hydra.searchpath":
            folders = [
                place
                for place in value_of(text)
                if Path(place.removeprefix("file://")).is_dir() or place.startswith("pkg:")
            ]
            text = search_path_override(folders)
        present.append(text)
    return present


def _saved_alone(
    found: SavedRun, typed: Sequence[str], *, compose: Compose, change: Change, missing: ConfigError
) -> tuple[BaseRun, list[str]]:
    """Return what `find_base` does for a run whose configuration files aren't there; missing: the error that says so.

    An option of a group, such as `optimizer=adam`, is looked up where it can be found now.
    """
    bare = ["recipe=blank", *(text for text in typed if key_of(text).startswith("hydra"))]
    own = [text for text in typed if not names_a_run(text) and not key_of(text).startswith(("hydra", "recipe"))]
    changed = dict(found.raw)
    places = [text for text in _present(found.overrides) if key_of(text) == "hydra.searchpath"]
    for text in own:
        key = key_of(text)
        value = text.partition("=")[2]
        is_option = "." not in key and isinstance(changed.get(key), Mapping) and not value.lstrip().startswith("{")
        if not is_option or text.startswith("~"):
            changed = change(changed, text)
            continue
        try:
            option = compose([*places, *bare, text])[key]
        except ConfigError as error:
            raise ConfigError(
                f"{error}\n{found.run_dir.path} was started with: "
                f"{' '.join(map(masked_override, found.overrides))}\n"
                "Go to the folder it was started from, with its conf/, and name the run by its absolute path."
            ) from error
        changed[key] = {**changed[key], **option} if text.startswith("+") else option
    if any("." in key_of(text) for text in own):
        reason = str(missing).splitlines()[0]
        print(
            f"Only config.yaml of {display_path(found.run_dir.path)} is used, since what it was composed of isn't here "
            f"({reason}). Values that follow from what is typed stay as they were.",
            file=sys.stderr,
            flush=True,
        )
    return BaseRun(found, without_typed=None, typed=tuple(typed), changed=changed), bare


def _unsaved(composed: Mapping[str, Any]) -> dict[str, Any]:
    checkpoint = composed.get("checkpoint") or {}
    given = ((_RESUME, composed.get("resume")), (_RERUN, composed.get("rerun")), (_CHECKPOINT, checkpoint.get("path")))
    for key, value in given:
        if value is not None:
            raise ConfigError(f"{key}={value} is set in a file. Type it on the command line: {key}=RUN")
    return dict(composed)


def _typed_path(typed: Sequence[str], key: str) -> str | None:
    given = [text for text in typed if key_of(text) == key]
    value = value_of(given[-1]) if given else None
    if value is None or (isinstance(value, str) and value):
        return value
    raise ConfigError(f"{given[-1]}: must be one run directory, such as {key}=outputs/RECIPE/RUN.")

"""Commands that start from a saved run, and the choice of that run: `resume=auto` is `find_auto_run`.

`resume=RUN` continues it, `rerun=RUN` runs it again, `checkpoint.path=CHECKPOINT` uses its weights, and `run=RUN` looks
into it, with what was in force at `step`. All use the saved configuration plus what is typed; defaults that changed
since then have no effect.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from framework.checkpoint import LocalStorage, find
from framework.checkpoint.layout import CONFIG_NAME
from framework.command.job import load_job
from framework.command.remote_runs import RemoteRuns, fetch_records_of
from framework.command.trust import check_trust, why_not_owned
from framework.config.apply_typed import apply_typed
from framework.config.find_run import is_run, newest_unfinished
from framework.config.hydra_compose import value_of
from framework.config.other_names import value_advice
from framework.config.overrides import (
    key_of,
    merge_overrides,
    path_argument,
    resume_argument,
    search_path_override,
)
from framework.config.renamed import present_overrides, removed_settings, without_removed
from framework.config.saved import SavedRun, load_checkpoint, load_rerun, load_saved, objects_of
from framework.config.schema import PathConfig
from framework.config.secrets import masked_override, missing_secrets
from framework.config.values import show
from framework.errors import ConfigError
from framework.remote.place import RemotePlace, is_url, outputs_folder
from framework.runs.find import named_place
from framework.runs.record import user_name
from framework.runs.segments import segment_at
from framework.sweeps.find import is_sweep
from framework.system.formatting import display_path
from framework.system.run_dir import RunDir
from framework.system.shown_text import shown

_RESUME = "resume"
_RERUN = "rerun"
_CHECKPOINT = "checkpoint.path"
_RUN = "run"
_STEP = "step"
_KEYS = (_RESUME, _RERUN, _CHECKPOINT, _RUN)
_TRUST = "trust"
Compose = Callable[[Sequence[str]], Mapping[str, Any]]
Change = Callable[[Mapping[str, Any], str], dict[str, Any]]


@dataclass(frozen=True)
class BaseRun:
    """What the configurations of all jobs of a command are based on."""

    # None: the command starts from no saved run.
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
        new = [text for text in self.typed if not names_a_run(text)]
        return tuple(merge_overrides(self.found.overrides, new))

    def configuration(self, composed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the composed configuration, or the saved one with what is typed applied to it.

        Raises ConfigError for overrides that exclude each other.
        """
        is_trust_typed = any(key_of(text) == _TRUST for text in self.typed)
        if composed.get(_TRUST) and not is_trust_typed:
            raise ConfigError("trust=true is set in a file. Type it on the command line, for one run: trust=true")
        if self.found is None:
            _check_names_no_run(composed)
            return {**composed, _TRUST: False}
        has_all_weights = not self.found.raw["checkpoint"].get("only_trained")
        if self.found.key != _RERUN and has_all_weights and "init_from" in map(key_of, self.typed):
            raise ConfigError(f"{self.found.key} can't go with init_from: each names initial weights. Leave one out.")
        raw = self._saved_with_typed(self.found, composed)
        _check_secrets(raw, self.found.run_dir)
        return started_from(self.found, raw)

    def _saved_with_typed(self, found: SavedRun, composed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the saved configuration with what is typed."""
        if self.changed is not None:
            return dict(self.changed)
        assert self.without_typed is not None
        return apply_typed(found.raw, before=self.without_typed, after=composed, typed=_keys_and_options(self.typed))

    @property
    def parent_run(self) -> Path | None:
        """Return the run whose checkpoint is used; None if it is in no run, or `path.outputs` is typed."""
        if self.found is None or self.found.key != _CHECKPOINT:
            return None
        typed_keys = {key_of(text) for text in self.typed}
        if "path" in typed_keys or "path.outputs" in typed_keys:
            return None
        run_dir = self.found.run_dir.path
        return run_dir if is_run(run_dir) else None


def find_base(
    typed: Sequence[str], *, compose: Compose, change: Change, swept: bool = False
) -> tuple[BaseRun, list[str]]:
    """Return what a command's configurations are based on, and the overrides to compose.

    If the files of which a saved run was composed aren't there, its config.yaml alone is used.

    Args:
        compose: returns the configuration of overrides.
        change: applies an override to a configuration.
        swept: the overrides are for the jobs of a sweep.
    """
    typed = find_auto_run(typed, compose=compose)
    typed = _with_path_of_run(typed, compose=compose)
    typed = RemoteRuns(partial(cache_of, typed, compose=compose)).with_local(typed, _KEYS)
    may_run_code = is_trusted(typed)
    found = saved_run(typed)
    if found is None:
        return BaseRun(None, without_typed=None, typed=tuple(typed)), typed

    # Before anything of the run is composed: a search path may name a package to import.
    if not may_run_code and not _was_allowed_before(typed, compose=compose):
        outputs = own_outputs(typed, compose=compose, recipe=found.raw.get("recipe"))
        check_trust(found, outputs=outputs, asked_by="type trust=true")

    found = _without_removed_keys(found)
    started_with = _with_present_folders(found.overrides)
    try:
        without_typed = compose(started_with)
    except ConfigError as error:
        if not swept:
            return _saved_alone(found, typed, compose=compose, change=change, missing=error)
        raise ConfigError(
            f"{error}\n{found.run_dir.path} was started with: {' '.join(map(masked_override, started_with))}\n"
            "Go to the folder it was started from, with its conf/ and recipes/, and name the run by its absolute path."
        ) from error
    new = [text for text in typed if not names_a_run(text)]
    return BaseRun(found, without_typed=without_typed, typed=tuple(typed)), merge_overrides(started_with, new)


# Which run


def find_auto_run(typed: Sequence[str], *, compose: Compose) -> list[str]:
    """Replace `resume=auto` by the recipe's newest unfinished run in `path.outputs`, or drop it; print which."""
    if typed_path(typed, _RESUME) != "auto":
        return list(typed)
    others = [text for text in typed if key_of(text) != _RESUME]
    composed = compose([text for text in others if not names_a_run(text)])
    job = composed["job"]
    if not load_job(job).trains:
        raise ConfigError(f"resume=auto can't go with job={job}: it continues a training run. Leave it out.")
    folder = _outputs_of(composed) / composed["recipe"]
    trouble = None
    if is_url(composed["path"]["outputs"]):
        trouble = fetch_records_of(composed["path"], composed["recipe"])
    run_dir = newest_unfinished(folder, is_own=_is_own)
    if trouble is not None and run_dir is None:
        # A new run would repeat what may be there.
        raise trouble

    # The other nodes do the same.
    if composed["topology"]["node_rank"] == 0:
        if run_dir is None:
            choice = f"no unfinished run in {display_path(folder)}; a new one begins"
        else:
            status = run_dir.read_run().get("status")
            how = "crashed or still running" if status == "running" else status
            choice = f"{display_path(run_dir.path)} ({how})"
        print(shown(f"resume=auto: {choice}"), file=sys.stderr, flush=True)

    if run_dir is None:
        return others
    # It has its configuration and its weights.
    others = [text for text in others if key_of(text) not in (_RERUN, "init_from")]
    # Nobody is there to answer if a cluster starts the command again.
    return [*others, *shlex.split(resume_argument(run_dir.path)), f"{_TRUST}=true"]


def _is_own(run_dir: RunDir) -> bool:
    """Return True unless another user has made the run; print it if so."""
    reason = why_not_owned(run_dir.path, checks_writers=False) or _why_not_mine(run_dir)
    if reason is not None:
        print(shown(f"resume=auto: {display_path(run_dir.path)} is left out: {reason}"), file=sys.stderr, flush=True)
    return reason is None


def _why_not_mine(run_dir: RunDir) -> str | None:
    """Return why a run that was fetched isn't this user's, by its record; the copy itself is."""
    user = (run_dir.read_run().get("process") or {}).get("user")
    if user is None or RemotePlace.of_local(run_dir.path) is None or user == user_name():
        return None
    return f"{user} has started it"


def _with_path_of_run(typed: Sequence[str], *, compose: Compose) -> list[str]:
    """Replace `run=NAME`, the name of a run in `path.outputs`, by its path."""
    name = typed_path(typed, _RUN)
    if name is None or is_url(name) or "/" in name:
        return list(typed)
    others = [text for text in typed if key_of(text) != _RUN]
    outputs = _outputs_of(compose([text for text in others if not names_a_run(text)]))
    return [*others, *shlex.split(path_argument(_RUN, named_place(name, outputs=outputs, key=_RUN)))]


def saved_run(typed: Sequence[str]) -> SavedRun | None:
    """Return the run that is named, if any. Runs none of its code.

    Raises ConfigError if it isn't a run or another recipe is typed, CheckpointError for an unusable checkpoint.
    """
    paths: dict[str, str] = {}
    for key in _KEYS:
        path = typed_path(typed, key)
        if path is not None:
            paths[key] = path
    if not paths:
        return None
    if len(paths) > 1:
        one, other = list(paths)[:2]
        raise ConfigError(f"{one} can't go with {other}: each names the run to start from. Leave one out.")

    ((key, path),) = paths.items()
    found = _load(key, path, typed)
    recipe = found.raw.get("recipe")
    other_recipes = [text for text in typed if text.startswith("recipe=") and text != f"recipe={recipe}"]
    if other_recipes:
        raise ConfigError(
            f"{other_recipes[-1]} can't go with {key}: that run's recipe is {recipe}. "
            f"Leave it out, or start a new run with {other_recipes[-1]}."
        )
    return found


def _load(key: str, path: str, typed: Sequence[str]) -> SavedRun:
    if key == _RERUN:
        return load_rerun(path, typed=typed)
    if key == _RUN:
        return _load_at_step(path, typed)
    if key == _CHECKPOINT:
        if is_sweep(Path(path)):
            raise ConfigError(f"{key}={path}: this is a sweep. Type -m too, to take the best checkpoint of each trial.")
        directory = find(Path(path))
        storage, checkpoint = LocalStorage.of(directory)
        storage.check_file(checkpoint, CONFIG_NAME, storage.read_manifest(checkpoint))
        return load_checkpoint(directory)
    found = load_saved(path, typed=typed)
    if found.checkpoint is not None:
        # Raises CheckpointError if it isn't complete.
        find(found.checkpoint)
    return found


def _load_at_step(path: str, typed: Sequence[str]) -> SavedRun:
    """Return the run with what was in force at `step`; without a step, as it was started last."""
    found = load_rerun(path, typed=typed, key=_RUN)
    steps = [value_of(text) for text in typed if key_of(text) == _STEP]
    if not steps or type(steps[-1]) is not int or steps[-1] < 1:
        # `parse` says what is wrong with another value.
        return found
    step = steps[-1]
    jobs = [value_of(text) for text in typed if key_of(text) == "job"]
    if jobs and load_job(jobs[-1]).continues_run:
        step += 1
    segment = segment_at(found.run_dir, step)
    return replace(found, raw=segment.config, overrides=segment.overrides or found.overrides)


def names_a_run(override: str) -> bool:
    """Return True if an override names a saved run, or trusts it; such overrides are not saved with a run."""
    return key_of(override) in (*_KEYS, _TRUST)


def typed_path(typed: Sequence[str], key: str) -> str | None:
    """Return the path that is typed for a key; None if there is none. Raises ConfigError for anything but one text."""
    overrides = [text for text in typed if key_of(text) == key]
    if not overrides:
        return None
    value = value_of(overrides[-1])
    advice = value_advice(key, str(value))
    if value is None or (isinstance(value, str) and value and advice is None):
        return value
    if advice is None:
        advice = f"It must be one run directory, such as {key}=outputs/RECIPE/RUN."
    raise ConfigError(f"{overrides[-1]}: this is no run directory. {advice}")


# Whether its code may run


def own_outputs(typed: Sequence[str], *, compose: Compose, recipe: Any = None) -> list[Path]:
    """Return `path.outputs` of the command, as typed or as the user's own files set it, never as the run sets it.

    recipe: the run's; the user's own file of that name may set it.
    """
    places = [text for text in typed if key_of(text).startswith(("path", "hydra"))]
    recipes = []
    if re.fullmatch(r"[\w-]+(/[\w-]+)*", str(recipe)):
        recipes.append(f"recipe={recipe}")
    outputs: dict[Path, None] = {}
    for overrides in ([*recipes, *places], recipes, []):
        # It is raised if there is no such recipe here, or outputs are swept over.
        with suppress(ConfigError):
            composed = compose(overrides)
            outputs[_outputs_of(composed)] = None
    return list(outputs)


def _outputs_of(composed: Mapping[str, Any]) -> Path:
    """Return the folder of `path.outputs` in a composed configuration."""
    path = composed["path"]
    return outputs_folder(PathConfig(outputs=str(path["outputs"]), cache=path.get("cache")))


def cache_of(typed: Sequence[str], *, compose: Compose) -> str | None:
    """Return `path.cache` of the command, as typed or as the user's own files set it."""
    places = [text for text in typed if key_of(text).startswith(("path", "hydra"))]
    cache = compose(places)["path"].get("cache")
    return None if cache is None else str(cache)


def is_trusted(typed: Sequence[str]) -> bool:
    """Return True if `trust=true` is typed. Raises ConfigError for a value that is no truth value."""
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
    topology = [text for text in typed if key_of(text).startswith("topology")]
    if not topology:
        return False
    node_rank: int = compose(topology)["topology"]["node_rank"]
    return node_rank > 0


# Its configuration


def _keys_and_options(typed: Sequence[str]) -> list[str]:
    """Return the overrides that change the saved configuration."""
    overrides = [text for text in typed if not names_a_run(text)]
    return [text for text in overrides if not key_of(text).startswith(("hydra", "recipe"))]


def _without_removed_keys(found: SavedRun) -> SavedRun:
    """Return the run of an earlier version without the keys that no longer exist; warn of those that were set."""
    settings = [f"{key}={show(value)}" for key, value in removed_settings(found.raw).items()]
    if settings:
        line = f"{display_path(found.run_dir.path)} sets {', '.join(settings)}, which no longer exists and is ignored."
        print(shown(line), file=sys.stderr, flush=True)
    overrides = tuple(present_overrides(found.overrides))
    return replace(found, raw=without_removed(found.raw), overrides=overrides)


def _with_present_folders(overrides: Sequence[str]) -> list[str]:
    """Return the overrides without the folders of `hydra.searchpath` that are gone, of which Hydra would warn."""
    present = []
    for text in overrides:
        if key_of(text) == "hydra.searchpath":
            places = [place for place in value_of(text) if _is_there(place)]
            text = search_path_override(places)
        present.append(text)
    return present


def _is_there(place: str) -> bool:
    return place.startswith("pkg:") or Path(place.removeprefix("file://")).is_dir()


def _saved_alone(
    found: SavedRun, typed: Sequence[str], *, compose: Compose, change: Change, missing: ConfigError
) -> tuple[BaseRun, list[str]]:
    """Return what `find_base` does for a run whose configuration files aren't there; missing: the error that says so.

    An option of a group, such as `optimizer=adam`, is looked up where it can be found now.
    """
    of_hydra = [text for text in typed if key_of(text).startswith("hydra")]
    bare = ["recipe=blank", *of_hydra]
    places = [text for text in _with_present_folders(found.overrides) if key_of(text) == "hydra.searchpath"]
    overrides = _keys_and_options(typed)

    changed = dict(found.raw)
    for text in overrides:
        if not _is_option(text, changed):
            changed = change(changed, text)
            continue
        key = key_of(text)
        try:
            option = compose([*places, *bare, text])[key]
        except ConfigError as error:
            raise ConfigError(
                f"{error}\n{found.run_dir.path} was started with: "
                f"{' '.join(map(masked_override, found.overrides))}\n"
                "Go to the folder it was started from, with its conf/, and name the run by its absolute path."
            ) from error
        changed[key] = {**changed[key], **option} if text.startswith("+") else option

    if any("." in key_of(text) for text in overrides):
        reason = str(missing).splitlines()[0]
        print(
            f"Only config.yaml of {display_path(found.run_dir.path)} is used, since what it was composed of isn't here "
            f"({reason}). Values that follow from what is typed stay as they were.",
            file=sys.stderr,
            flush=True,
        )
    return BaseRun(found, without_typed=None, typed=tuple(typed), changed=changed), bare


def _is_option(override: str, raw: Mapping[str, Any]) -> bool:
    """Return True if an override such as `optimizer=adam` chooses an option of a group."""
    key = key_of(override)
    value = override.partition("=")[2].lstrip()
    if override.startswith("~") or value.startswith("{"):
        return False
    return "." not in key and isinstance(raw.get(key), Mapping)


def _check_names_no_run(composed: Mapping[str, Any]) -> None:
    """Raise ConfigError if a file sets a key that names a saved run."""
    checkpoint = composed.get("checkpoint") or {}
    values = {key: composed.get(key) for key in (_RESUME, _RERUN, _RUN)}
    values[_CHECKPOINT] = checkpoint.get("path")
    for key, value in values.items():
        if value is not None:
            raise ConfigError(f"{key}={value} is set in a file. Type it on the command line: {key}=RUN")


def _check_secrets(raw: Mapping[str, Any], run_dir: RunDir) -> None:
    """Raise ConfigError if passwords and tokens of the run are missing."""
    masked = missing_secrets(raw)
    if masked:
        raise ConfigError(
            f"{', '.join(masked)}: this copy of {run_dir.path} lacks the passwords and tokens of the run, "
            f"which are in its {run_dir.secrets_file.name}. Type each of these keys again, with its value."
        )


def started_from(found: SavedRun, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the keys that name the run which the command starts from."""
    started = {**raw, _TRUST: False, "resume": None}
    checkpoint_path = None
    if raw.get("objects"):
        started["objects"] = objects_of(found.run_dir, raw)
    if found.key == _RESUME:
        started["resume"] = str(found.checkpoint or found.run_dir.path)
    elif found.key == _RERUN:
        started["rerun"] = str(found.run_dir.path)
    elif found.key == _RUN:
        started["run"] = str(found.run_dir.path)
        started["rerun"] = None
    else:
        # A checkpoint of what was trained needs the weights that the run began with.
        if not raw["checkpoint"].get("only_trained"):
            started["init_from"] = None
        started["rerun"] = None
        checkpoint_path = str(found.checkpoint)
    started["checkpoint"] = {**raw["checkpoint"], "path": checkpoint_path}
    return started

"""Commands that begin with a saved run: `resume=RUN` goes on in it, `checkpoint.path=CHECKPOINT` uses its weights.

Both use the saved configuration plus only what is typed; defaults that changed since don't reach it.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from framework.checkpoint.format import CONFIG_NAME
from framework.checkpoint.lookup import describe_others, find, last_whole, read_manifest
from framework.checkpoint.whole import damage, file_fault
from framework.config.saved import (
    Saved,
    apply_changes,
    apply_typed,
    completed,
    is_run,
    key_of,
    load_checkpoint,
    load_saved,
    merge_overrides,
    newest_unfinished,
    resume_argument,
    value_of,
)
from framework.errors import CheckpointError, ConfigError
from framework.jobs.summary import short
from framework.run_dir import RunDir

_RESUME = "resume"
_CHECKPOINT = "checkpoint.path"
_AUTO = "auto"


@dataclass(frozen=True)
class SavedRun:
    """key: the one that names it. checkpoint: the step directory it names, absolute; None for the last of `resume`."""

    key: str
    saved: Saved
    checkpoint: Path | None


def saved_run(typed: Sequence[str]) -> SavedRun | None:
    """The run that is named, None where none is.

    Raises ConfigError where it isn't one or another recipe is typed, CheckpointError for an unusable checkpoint.
    """
    named = {key: value for key in (_RESUME, _CHECKPOINT) if (value := _typed_path(typed, key)) is not None}
    if not named:
        return None
    if len(named) > 1:
        raise ConfigError("resume can't go with checkpoint.path: each names the run to begin with. Leave one out.")
    ((key, path),) = named.items()
    if key == _RESUME:
        saved = load_saved(path)
        found = SavedRun(key, saved, checkpoint=None if saved.step is None else find(saved.step))
    else:
        directory = find(Path(path))
        _check_config(directory)
        found = SavedRun(key, load_checkpoint(directory), checkpoint=directory)
    _check_recipe(found, typed)
    return found


def with_run_found(
    typed: Sequence[str], *, compose: Callable[[Sequence[str]], Mapping[str, Any]], swept: bool
) -> list[str]:
    """What is typed, with the run that `resume=auto` means, or without it where a new one is to begin; says which.

    It is the newest unfinished one of the recipe in path.outputs. compose: gives the configuration of overrides.
    """
    others = [text for text in typed if key_of(text) != _RESUME]
    if _typed_path(typed, _RESUME) != _AUTO:
        return list(typed)
    if swept:
        raise ConfigError("resume can't go with several runs: they would go on in one directory. Leave -m out.")
    composed = compose([text for text in others if not names_a_run(text)])
    folder = Path(composed["path"]["outputs"]) / composed["recipe"]
    found = newest_unfinished(folder.absolute())
    if composed["topology"]["node_rank"] == 0:  # the other nodes do what this one does
        print(f"resume=auto: {_described(found, folder)}", file=sys.stderr, flush=True)
    return others if found is None else [*others, *shlex.split(resume_argument(found.path))]


def _described(found: RunDir | None, folder: Path) -> str:
    if found is None:
        return f"no unfinished run in {short(folder)}; a new one begins"
    run = found.read_run()
    process = run.get("process", {})
    how = run["status"]
    if how == "running":  # nobody wrote down how it ended
        how = f"ended without a word, or under way, as process {process.get('pid')} on {process.get('host')}"
    return f"{short(found.path)} ({how}; {_last_in(found)})"


def _last_in(run_dir: RunDir) -> str:
    """The checkpoint to go on from, as far as sizes tell: rank 0 reads the files, and may go back further."""
    try:
        directory = last_whole(run_dir.checkpoints, look=partial(damage, thorough=False)).directory
    except CheckpointError:
        return "no checkpoint that can be used"
    return "no checkpoint yet" if directory is None else f"checkpoint of step {read_manifest(directory).step}"


def _check_config(directory: Path) -> None:
    """Raise CheckpointError where the configuration of a checkpoint isn't the one that was written with it."""
    fault = file_fault(directory / CONFIG_NAME, facts=read_manifest(directory).files.get(CONFIG_NAME))
    if fault is not None:
        raise CheckpointError(
            f"The checkpoint {directory} is damaged: {CONFIG_NAME} {fault}.\n{describe_others(directory)}"
        )


def names_a_run(override: str) -> bool:
    """Whether an override is one of those that name a saved run; they aren't part of what is saved for later."""
    return key_of(override) in (_RESUME, _CHECKPOINT)


def composable(typed: Sequence[str], found: SavedRun | None) -> list[str]:
    """The overrides to compose: those the saved run was started with, and then what is typed."""
    if found is None:
        return list(typed)
    return merge_overrides(found.saved.overrides, [text for text in typed if not names_a_run(text)])


def not_composable(found: SavedRun, error: ConfigError) -> ConfigError:
    """`error` with what to do where what a saved run was started with can't be composed any more."""
    return ConfigError(
        f"{error}\nThat is of {found.saved.run_dir.path}, which was started with: {' '.join(found.saved.overrides)}\n"
        "Go to the folder it was started from, with its conf/ and recipes/, and name the run by its whole path there."
    )


@dataclass(frozen=True)
class Ground:
    """What all jobs of a command stand on.

    without_typed: what is composed from the saved run's overrides alone; where a composition differs from it, what is
    typed is the reason (`data.datasets.root` follows `data.root`).
    """

    found: SavedRun | None
    without_typed: Mapping[str, Any] | None
    typed: tuple[str, ...]

    def configuration(self, composed: Mapping[str, Any], *, swept: bool) -> dict[str, Any]:
        """The configuration to use: the composed one, or the saved one with what is typed put over it.

        swept: it is a job of a sweep. Raises ConfigError for what can't go together.
        """
        found, typed = self.found, self.typed
        if found is None or self.without_typed is None:
            return _unsaved(composed)
        if found.key == _RESUME and swept:
            raise ConfigError("resume can't go with several runs: they would go on in one directory. Leave -m out.")
        if "init_from" in map(key_of, typed):
            raise ConfigError(f"{found.key} can't go with init_from: each names weights to begin with. Leave one out.")
        own = [text for text in typed if not names_a_run(text) and not key_of(text).startswith(("hydra", "recipe"))]
        raw = completed(found.saved.raw, composed)
        raw = apply_changes(raw, before=self.without_typed, after=composed)
        raw = apply_typed(raw, composed, typed=own)
        is_resumed = found.key == _RESUME
        raw["resume"] = str(found.checkpoint or found.saved.run_dir.path) if is_resumed else None
        raw["checkpoint"] = {**raw["checkpoint"], "path": None if is_resumed else str(found.checkpoint)}
        if not is_resumed:
            raw["init_from"] = None
        return raw

    @property
    def home(self) -> Path | None:
        """The run whose checkpoint is used; None if it is outside of any run, or `path.outputs` is typed."""
        if self.found is None or self.found.key != _CHECKPOINT:
            return None
        if {"path", "path.outputs"} & {key_of(text) for text in self.typed}:
            return None
        run_dir = self.found.saved.run_dir.path
        return run_dir if is_run(run_dir) else None


def _unsaved(composed: Mapping[str, Any]) -> dict[str, Any]:
    checkpoint = composed.get("checkpoint")
    path = checkpoint.get("path") if isinstance(checkpoint, Mapping) else None
    for key, value in ((_RESUME, composed.get("resume")), (_CHECKPOINT, path)):
        if value is not None:
            raise ConfigError(f"{key}={value} is set in a file. Type it on the command line: {key}=RUN")
    return dict(composed)


def _typed_path(typed: Sequence[str], key: str) -> str | None:
    given = [text for text in typed if key_of(text) == key]
    if not given:
        return None
    value = value_of(given[-1])
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{given[-1]}: must be one run directory, such as {key}=outputs/RECIPE/RUN.")
    return value


def _check_recipe(found: SavedRun, typed: Sequence[str]) -> None:
    recipe = found.saved.recipe
    other = [text for text in typed if text.startswith("recipe=") and text != f"recipe={recipe}"]
    if other:
        raise ConfigError(
            f"{other[-1]} can't go with {found.key}: that run's recipe is {recipe}. "
            f"Leave it out, or start a new run with {other[-1]}."
        )

"""Save the configuration in the run directory, and load it to resume the run.

A resumed run uses its saved configuration; only the overrides typed now are applied to it. Defaults in `conf/` or in a
recipe that have changed since don't affect it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.config.find_run import is_run, run_of
from framework.config.overrides import (
    key_of,
    merge_overrides,
    path_argument,
    resume_argument,
    search_path_override,
)
from framework.config.renamed import without_removed
from framework.config.secrets import Secrets, restored_config
from framework.config.written import is_unchanged, load_overrides, load_unchanged, load_written_config
from framework.config.yaml_files import dump_yaml, load_as
from framework.errors import ConfigError
from framework.system.run_dir import RunDir, write_atomically

# What the command imports from here, beside the functions of this module.
__all__ = [
    "SavedRun",
    "is_run",
    "key_of",
    "load_checkpoint",
    "load_config",
    "load_rerun",
    "load_run",
    "load_saved",
    "merge_overrides",
    "objects_of",
    "path_argument",
    "resume_argument",
    "save_config",
    "search_path_override",
    "with_secrets",
]


@dataclass(frozen=True)
class SavedRun:
    """The run that an override names, with absolute paths."""

    # The key of that override: resume, rerun, run or checkpoint.path.
    key: str
    run_dir: RunDir
    raw: Mapping[str, Any]
    overrides: tuple[str, ...]
    # The checkpoint that was named; None: the last one (resume only).
    checkpoint: Path | None


def save_config(run_dir: RunDir, *, raw: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, str]:
    """Write `config.yaml` and `overrides.yaml`, and return their texts; after a kill, each is complete or absent.

    Passwords and tokens are masked in them, and kept in `secrets.yaml`.
    """
    secrets = Secrets(raw)
    recipe = [text for text in overrides if key_of(text) == "recipe"] or [f"recipe={raw['recipe']}"]
    others = [text for text in overrides if key_of(text) not in ("recipe", "resume", "rerun")]

    # The configuration comes last, so that a run that has one has the other files, too.
    texts: dict[Path, str] = {}
    entries = secrets.entries()
    if entries or run_dir.secrets_file.exists():
        texts[run_dir.secrets_file] = dump_yaml(entries)
    texts[run_dir.overrides_file] = dump_yaml(secrets.masked_overrides([*recipe, *others]))
    texts[run_dir.config_file] = dump_yaml(secrets.masked_config())
    for file, text in texts.items():
        write_atomically(file, text, is_private=file == run_dir.secrets_file)
    return {file.name: text for file, text in texts.items()}


def load_saved(path: str | Path, *, typed: Sequence[str] = ()) -> SavedRun:
    """Load what was saved in the run directory `path`, which may also name its checkpoints or one of them.

    Raises ConfigError if there is no run, its files can't be read or were changed, or `path` is something else in it.

    Args:
        typed: the overrides of the command; a key that was edited in `config.yaml` must be among them.
    """
    run_dir = run_of(path)
    place = Path(path).expanduser().absolute()
    checkpoint = None
    if place not in (run_dir.path, run_dir.checkpoints, run_dir.checkpoints / "last"):
        checkpoint = place.resolve()
        if checkpoint.parent != run_dir.checkpoints.resolve() or not checkpoint.is_dir():
            raise ConfigError(
                f"resume={path}: this is neither a run directory nor one of its checkpoints.\n"
                f"Resume from the run's last checkpoint with {resume_argument(run_dir.path)}"
            )

    raw, overrides = load_unchanged(run_dir, typed=typed)
    if raw.get("job", "train") != "train":
        raise ConfigError(
            f"resume={path}: this is the directory of a job={raw['job']}. Only training runs can be resumed."
        )
    raw = with_secrets(raw, run_dir)
    return SavedRun("resume", run_dir=run_dir, raw=raw, overrides=tuple(overrides), checkpoint=checkpoint)


def load_rerun(path: str | Path, *, typed: Sequence[str] = (), key: str = "rerun") -> SavedRun:
    """Load the configuration of the training run that `path` is or lies in. Raises ConfigError if there is none.

    Args:
        typed: as in `load_saved`.
        key: the key that `path` was given as.
    """
    run_dir = run_of(path, key=key)
    raw, overrides = load_unchanged(run_dir, typed=typed)
    if raw.get("job", "train") != "train":
        raise ConfigError(
            f"{key}={path}: this is the directory of a job={raw['job']}. Only a training can be run again; type its "
            "command again, which is in its run.json."
        )
    raw = with_secrets(raw, run_dir)
    return SavedRun(key, run_dir=run_dir, raw=raw, overrides=tuple(overrides), checkpoint=None)


def load_checkpoint(directory: Path) -> SavedRun:
    """Load what was saved with the checkpoint `directory`, which may be a copy outside of its run.

    Raises ConfigError if its configuration can't be read.
    """
    raw = load_as(directory / "config.yaml", dict)
    run_dir = RunDir(directory.parent.parent)
    if is_run(run_dir.path):
        overrides = load_overrides(run_dir)
    else:
        overrides = [f"recipe={raw.get('recipe')}"]
    raw = with_secrets(raw, run_dir)
    return SavedRun("checkpoint.path", run_dir=run_dir, raw=raw, overrides=tuple(overrides), checkpoint=directory)


def load_run(run_dir: RunDir) -> tuple[dict[str, Any], list[str]]:
    """Return what is saved in a run directory: the configuration, secrets masked, and what was typed.

    Raises ConfigError.
    """
    return load_as(run_dir.config_file, dict), load_as(run_dir.overrides_file, list)


def with_secrets(raw: Mapping[str, Any], run_dir: RunDir) -> dict[str, Any]:
    """Return a configuration that was saved with a run, with the secrets that are masked in it.

    Raises ConfigError if the run's secrets.yaml can't be read, or is of another configuration.
    """
    if not run_dir.secrets_file.exists():
        return dict(raw)
    entries = load_as(run_dir.secrets_file, list)
    if not is_unchanged(run_dir, run_dir.secrets_file):
        raise ConfigError(
            f"{run_dir.secrets_file} isn't what the run wrote. Restore it, or remove it and type the values again."
        )
    return restored_config(raw, entries, file=str(run_dir.secrets_file))


def load_config(run_dir: RunDir) -> dict[str, Any]:
    """Return the configuration of a run as its ranks need it, secrets included. Raises ConfigError."""
    return with_secrets(without_removed(load_written_config(run_dir)), run_dir)


def objects_of(run_dir: RunDir, raw: Mapping[str, Any]) -> list[str]:
    """Return the files of the Python objects that a run needs.

    They lie in the run directory, which may have been moved since; those of a run that it reruns lie in the other's.
    """
    files = []
    for recorded in raw.get("objects") or ():
        here = run_dir.path / Path(recorded).name
        if here.exists():
            recorded = str(here)
        files.append(recorded)
    return files

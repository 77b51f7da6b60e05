"""The configuration in a run directory: written when the run is made, read again to go on with it.

A resumed run uses its saved configuration, to which only what was typed is applied: defaults that changed since, in
`conf/` or in a recipe, don't reach it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from framework.config import schema
from framework.config.assets import job_names
from framework.config.schema import Config
from framework.config.suggest import nearest
from framework.errors import ConfigError
from framework.run_dir import RunDir, write_atomically

# The safe loader, in C where there is one.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NOT_THERE = object()
_SECTIONS = {name for name, kind in vars(schema).items() if isinstance(kind, type) and is_dataclass(kind)}
"""Names of the schema's dataclasses, as annotations name them: what a user plugs in has keys of its own."""


class Saveable(Protocol):
    """The part of a request that is saved."""

    @property
    def raw(self) -> Mapping[str, Any]: ...
    @property
    def overrides(self) -> Sequence[str]: ...


@dataclass(frozen=True)
class Saved:
    """What a run directory holds, whose paths are absolute. step: the one checkpoint to resume, None for the last."""

    run_dir: RunDir
    raw: Mapping[str, Any]
    overrides: tuple[str, ...]
    step: Path | None = None

    @property
    def recipe(self) -> str:
        return str(self.raw.get("recipe"))


def save_config(run_dir: RunDir, request: Saveable) -> None:
    """Write `config.yaml` and `overrides.yaml`; each is complete or absent, whenever the process is killed."""
    raw = dict(request.raw)
    others = [text for text in request.overrides if key_of(text) not in ("recipe", "resume")]
    overrides = [f"recipe={raw['recipe']}", *others]
    write_atomically(run_dir.overrides_file, _dump(overrides))
    write_atomically(run_dir.config_file, _dump(raw))


def keep_before(run_dir: RunDir) -> None:
    """Before `save_config` in a run that is resumed: what is saved there counts until `confirm`, also after a kill."""
    if not run_dir.before_file.exists():
        raw, overrides = _saved_in(run_dir)
        write_atomically(run_dir.before_file, _dump({"config": raw, "overrides": overrides}))


def confirm(run_dir: RunDir) -> None:
    """What was saved last is known to resume the run: it counts from now on."""
    run_dir.before_file.unlink(missing_ok=True)


def put_back(run_dir: RunDir) -> None:
    """Undo a `save_config` that was never confirmed; nothing where there is none."""
    if run_dir.before_file.exists():
        raw, overrides = _saved_in(run_dir)
        write_atomically(run_dir.overrides_file, _dump(overrides))
        write_atomically(run_dir.config_file, _dump(raw))
        confirm(run_dir)


def run_of(path: str | Path) -> RunDir:
    """The run that `path` is, or lies in. Raises ConfigError, naming the one that was probably meant."""
    given = Path(path).expanduser().absolute()
    if not given.exists() and not given.is_symlink():  # a `last` whose checkpoint is gone stands for the run, too
        raise ConfigError(f"resume={path}: there is no such directory.{_hint(given)}")
    for place in (given, *given.parents):
        if is_run(place):
            return RunDir(place)
    raise ConfigError(
        f"resume={path}: this is no run directory, for it has no config.yaml and overrides.yaml.{_hint(given)}"
    )


def load_saved(path: str | Path) -> Saved:
    """What was saved in the run directory `path`; its checkpoints, or one of them, stand for it too.

    Raises ConfigError where there is no run, its files can't be read, or `path` is something else in it.
    """
    given, run_dir = Path(path).expanduser().absolute(), run_of(path)
    step = None
    if given not in (run_dir.path, run_dir.checkpoints, run_dir.checkpoints / "last"):
        step = given.resolve()
        if step.parent != run_dir.checkpoints.resolve() or not step.is_dir():
            raise ConfigError(
                f"resume={path}: this is neither a run directory nor one of its checkpoints.\n"
                f"Go on from the run's last checkpoint with {resume_argument(run_dir.path)}"
            )
    raw, overrides = _saved_in(run_dir)
    if isinstance(raw, dict) and raw.get("job", "train") != "train":
        raise ConfigError(
            f"resume={path}: this is the directory of a job={raw['job']}. Only training runs can be resumed."
        )
    are_texts = isinstance(overrides, list) and all(isinstance(text, str) for text in overrides)
    if not isinstance(raw, dict) or not are_texts:
        raise ConfigError(
            f"resume={path}: {run_dir.config_file.name} must hold a mapping and {run_dir.overrides_file.name} a list "
            f"of texts. One of them was changed; restore it, or start a new run."
        )
    return Saved(run_dir=run_dir, raw=raw, overrides=tuple(overrides), step=step)


def newest_unfinished(folder: Path) -> RunDir | None:
    """The newest training run in a recipe's folder that hasn't come to its end; None where there is none.

    Whether it is still under way somewhere isn't asked: `locked` refuses it then.
    """
    places = sorted(folder.iterdir(), reverse=True) if folder.is_dir() else []  # names begin with the time
    return next((RunDir(place) for place in places if is_run(place) and _is_unfinished(RunDir(place))), None)


def load_checkpoint(directory: Path) -> Saved:
    """What was saved with the checkpoint `directory`; it may have been copied away from its run.

    Raises ConfigError where its configuration can't be read.
    """
    raw = _load(directory / "config.yaml")
    if not isinstance(raw, dict):
        raise ConfigError(f"{directory / 'config.yaml'} must hold a mapping. It was changed; restore it.")
    run_dir = RunDir(directory.parent.parent)
    typed = _saved_in(run_dir)[1] if is_run(run_dir.path) else [f"recipe={raw.get('recipe')}"]
    return Saved(run_dir=run_dir, raw=raw, overrides=tuple(typed))


def key_of(override: str) -> str:
    """The key or group an override is about: `trainer.gpus` of `+trainer.gpus=2`."""
    return override.lstrip("+~").partition("=")[0]


def value_of(override: str) -> Any:
    """The value of `key=value` as Hydra reads it; as it stands where Hydra can't."""
    from hydra.errors import HydraException

    try:
        return _parsed_value(override)
    except HydraException:
        return override.partition("=")[2].strip("'\"")  # a path with characters that Hydra would want quoted


def resume_argument(path: str | Path) -> str:
    """`resume=PATH` to paste into a shell: it reaches Hydra as one word and is read as this path."""
    from hydra.core.override_parser.types import Quote, QuotedString
    from hydra.errors import HydraException

    text = f"resume={path}"
    try:
        is_plain = _parsed_value(text) == str(path)
    except HydraException:
        is_plain = False
    return shlex.quote(text if is_plain else f"resume={QuotedString(str(path), Quote.single).with_quotes()}")


def merge_overrides(saved: Sequence[str], typed: Sequence[str]) -> list[str]:
    """What composes a resumed run: what was typed then, unless typed again now, followed by what is typed now.

    What was typed for a group's old option goes when another option is chosen: it may not know those keys.
    """
    # A mapping is merged into what is there (`optimizer={lr:0.1}`), anything else replaces it.
    keys = {key_of(text) for text in typed if not text.partition("=")[2].lstrip().startswith("{")}
    groups = {key for key in keys if "." not in key}
    kept = [text for text in saved if key_of(text) not in keys and key_of(text).partition(".")[0] not in groups]
    return [*kept, *typed]


def apply_typed(saved: Mapping[str, Any], composed: Mapping[str, Any], *, typed: Sequence[str]) -> dict[str, Any]:
    """The saved configuration with the keys of `typed`, and whole groups, taken from `composed`."""
    result = deepcopy(dict(saved))
    for text in typed:
        parts = key_of(text).partition("@")[0].replace("/", ".").split(".")
        _copy(composed, result, parts)
    return result


def apply_changes(target: Mapping[str, Any], *, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """`target` with every key at which `after` differs from `before`: what depends on what was typed, too."""
    result = dict(target)
    for key in before.keys() | after.keys():
        old, new = before.get(key, _NOT_THERE), after.get(key, _NOT_THERE)
        if isinstance(old, Mapping) and isinstance(new, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = apply_changes(result[key], before=old, after=new)
        elif new is _NOT_THERE:
            result.pop(key, None)
        elif old != new:
            result[key] = deepcopy(new)
    return result


def completed(saved: Mapping[str, Any], composed: Mapping[str, Any]) -> dict[str, Any]:
    """The saved configuration with the framework's own keys that are newer than it, at the values composed now."""
    result = {key: saved.get(key, value) for key, value in composed.items()} | dict(saved)
    for section in (field.name for field in fields(Config) if field.type in _SECTIONS):
        if isinstance(result[section], Mapping) and isinstance(composed.get(section), Mapping):
            result[section] = {**composed[section], **result[section]}
    return result


def _parsed_value(override: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(override).value()


def _saved_in(run_dir: RunDir) -> tuple[Any, Any]:
    """Configuration and overrides that count, whatever they are."""
    if not run_dir.before_file.exists():
        return _load(run_dir.config_file), _load(run_dir.overrides_file)
    before = _load(run_dir.before_file)
    return (before.get("config"), before.get("overrides")) if isinstance(before, dict) else (None, None)


def is_run(place: Path) -> bool:
    """Return whether `place` is a run directory: a folder of YAML may have a config.yaml, but not both files."""
    return RunDir(place).config_file.is_file() and RunDir(place).overrides_file.is_file()


def _is_unfinished(run_dir: RunDir) -> bool:
    try:
        if run_dir.read_run()["status"] == "finished":
            return False
        raw, _ = _saved_in(run_dir)
    except (OSError, ValueError, KeyError, TypeError, ConfigError):  # it was ended while it was made, or changed since
        return False
    return isinstance(raw, dict) and raw.get("job") == "train"


def _copy(source: Mapping[str, Any], target: dict[str, Any], parts: list[str]) -> None:
    head, *rest = parts
    value = source.get(head, _NOT_THERE)
    if value is _NOT_THERE:
        target.pop(head, None)
    elif rest and isinstance(value, Mapping) and isinstance(target.get(head), dict):
        _copy(value, target[head], rest)
    else:  # the key itself, or something inside a list or a new mapping, which is taken whole
        target[head] = deepcopy(value)


def _hint(given: Path) -> str:
    """The run that was probably meant: the one with the nearest name, or the newest in a folder of runs."""
    place = next(parent for parent in (given, *given.parents) if parent.is_dir())
    if place == place.parent:
        return ""
    files = [file for pattern in ("*/overrides.yaml", "*/*/overrides.yaml") for file in place.glob(pattern)]
    found = [file.parent for file in files if file.parent.parent.name not in job_names()]  # only training runs
    if not found:
        return ""
    if place == given:
        return f"\nThe newest run in it: {resume_argument(max(found, key=lambda run: run.name))}"
    guess = nearest(str(given), map(str, found))
    return f"\nDid you mean {resume_argument(guess)}?" if guess else ""


def _load(file: Path) -> Any:
    try:
        return yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} can't be read: {' '.join(str(error).split())}") from error


def _dump(value: Any) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120)
    return text

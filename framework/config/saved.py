"""Save the configuration in the run directory, and load it to resume the run.

A resumed run uses its saved configuration; only the overrides typed now are applied to it. Defaults in `conf/` or in a
recipe that have changed since don't affect it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from framework.config.nested import flatten
from framework.config.renamed import without_removed
from framework.config.secrets import Secrets, restored_config
from framework.config.suggest import nearest
from framework.config.values import show
from framework.errors import ConfigError
from framework.system.files import FileFacts, check_nesting, read_bytes, read_text
from framework.system.run_dir import RunDir, read_object, write_atomically

# PyYAML's loader in C, if there is one: it saves 40 ms of each rank's start.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NOT_THERE = object()


@dataclass(frozen=True)
class SavedRun:
    """The run that an override names, with absolute paths."""

    # The key of that override: resume, rerun or checkpoint.path.
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


def search_path_override(places: Sequence[str]) -> str:
    """Return the override that makes Hydra look for options in these places, too."""
    quoted = [place.replace("\\", "\\\\").replace("'", "\\'") for place in places]
    return "hydra.searchpath=[" + ",".join(f"'{place}'" for place in quoted) + "]"


def run_of(path: str | Path, *, key: str = "resume") -> RunDir:
    """Return the run that `path`, given as `key`, is or lies in. Raises ConfigError with a suggestion otherwise."""
    place = Path(path).expanduser().absolute()
    # The symlink `last` of a checkpoint that is gone still names the run.
    if not place.exists() and not place.is_symlink():
        raise ConfigError(f"{key}={path}: there is no such directory.{_hint(place, key=key)}")
    for folder in (place, *place.parents):
        if is_run(folder):
            return RunDir(folder)
    raise ConfigError(
        f"{key}={path}: not a run directory: it has no config.yaml and overrides.yaml.{_hint(place, key=key)}"
    )


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

    raw, overrides = _load_unchanged(run_dir, typed=typed)
    if raw.get("job", "train") != "train":
        raise ConfigError(
            f"resume={path}: this is the directory of a job={raw['job']}. Only training runs can be resumed."
        )
    raw = with_secrets(raw, run_dir)
    return SavedRun("resume", run_dir=run_dir, raw=raw, overrides=tuple(overrides), checkpoint=checkpoint)


def load_rerun(path: str | Path, *, typed: Sequence[str] = ()) -> SavedRun:
    """Load the configuration of the training run that `path` is or lies in. Raises ConfigError if there is none.

    typed: as in `load_saved`.
    """
    run_dir = run_of(path, key="rerun")
    raw, overrides = _load_unchanged(run_dir, typed=typed)
    if raw.get("job", "train") != "train":
        raise ConfigError(
            f"rerun={path}: this is the directory of a job={raw['job']}. Only training runs can be rerun; type its "
            "command again, which is in its run.json."
        )
    raw = with_secrets(raw, run_dir)
    return SavedRun("rerun", run_dir=run_dir, raw=raw, overrides=tuple(overrides), checkpoint=None)


def newest_unfinished(folder: Path, *, is_own: Callable[[RunDir], bool] = lambda _: True) -> RunDir | None:
    """Return the newest unfinished training run in a recipe's folder for which `is_own` holds; None if there is none.

    It may still be running: then `locked` refuses it.
    """
    if not folder.is_dir():
        return None
    # The names of run directories begin with the time.
    for place in sorted(folder.iterdir(), reverse=True):
        run_dir = RunDir(place)
        if _is_unfinished(run_dir) and is_own(run_dir):
            return run_dir
    return None


def load_checkpoint(directory: Path) -> SavedRun:
    """Load what was saved with the checkpoint `directory`, which may be a copy outside of its run.

    Raises ConfigError if its configuration can't be read.
    """
    raw = _load(directory / "config.yaml", dict)
    run_dir = RunDir(directory.parent.parent)
    if is_run(run_dir.path):
        overrides = _load_overrides(run_dir)
    else:
        overrides = [f"recipe={raw.get('recipe')}"]
    raw = with_secrets(raw, run_dir)
    return SavedRun("checkpoint.path", run_dir=run_dir, raw=raw, overrides=tuple(overrides), checkpoint=directory)


def key_of(override: str) -> str:
    """Return the key or group of an override: `trainer.gpus` for `+trainer.gpus=2`."""
    return override.lstrip("+~").partition("=")[0]


def value_of(override: str) -> Any:
    """Return the value of `key=value` as Hydra parses it, or unparsed if Hydra can't."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(override).value()
    except HydraException:
        # A path with characters that Hydra would want quoted.
        return override.partition("=")[2].strip("'\"")


def resume_argument(path: str | Path) -> str:
    """Return `resume=PATH`, quoted for the shell and for Hydra."""
    return path_argument("resume", path)


def path_argument(key: str, path: str | Path) -> str:
    """Return `key=PATH`, quoted for the shell and for Hydra."""
    value = str(path)
    # Anything but a plain path may mean something else to Hydra.
    if not re.fullmatch(r"[\w./-]*/[\w./-]*", value, flags=re.ASCII):
        from hydra.core.override_parser.types import Quote, QuotedString

        value = QuotedString(value, Quote.single).with_quotes()
    return shlex.quote(f"{key}={value}")


def outputs_arguments(overrides: Sequence[str]) -> list[str]:
    """Return the typed `path.outputs`, quoted for the shell: a command that names a run needs it, since only below it
    is a run the user's.
    """
    return [shlex.quote(text) for text in overrides if key_of(text) in ("path", "path.outputs")]


def merge_overrides(saved: Sequence[str], typed: Sequence[str]) -> list[str]:
    """Return the overrides of a resumed run: those typed for the original run, then those typed now.

    A key typed now replaces the earlier one; choosing another option of a group drops what was typed for the old one.
    """
    replaced: set[str] = set()
    for text in typed:
        value = text.partition("=")[2]
        # A mapping is merged into what is there (`optimizer={lr:0.1}`), anything else replaces it.
        if not value.lstrip().startswith("{"):
            replaced.add(key_of(text))
    # `optimizer=sgd` replaces `optimizer.lr=0.1`, too; a key with a dot is no group.
    groups = {key for key in replaced if "." not in key}

    merged: list[str] = []
    for text in saved:
        key = key_of(text)
        if key not in replaced and key.partition(".")[0] not in groups:
            merged.append(text)
    return [*merged, *typed]


def apply_typed(
    saved: Mapping[str, Any], *, before: Mapping[str, Any], after: Mapping[str, Any], typed: Sequence[str]
) -> dict[str, Any]:
    """Return the saved configuration with the keys and groups of `typed` as they are in `after`, and what follows.

    Args:
        before: The configuration composed without `typed`.
        after: The configuration composed with `typed`. All that differs from `before` follows from `typed`, as
            `data.datasets.root` follows from `data.root`.
    """
    # A typed key is taken out of `before`, so that it counts as a difference even if today's default is typed.
    without_typed = deepcopy(dict(before))
    for text in typed:
        if text.startswith("~"):
            continue
        names = _dotted_key(text).split(".")
        section = without_typed
        while len(names) > 1 and isinstance(section.get(names[0]), dict):
            section = section[names.pop(0)]
        section.pop(names[0], None)
    return _apply_changes(saved, before=without_typed, after=after)


def _dotted_key(override: str) -> str:
    """Return the key that an override sets, also if it chooses an option of a group such as `optimizer@x=sgd`."""
    return key_of(override).partition("@")[0].replace("/", ".")


def _apply_changes(target: Mapping[str, Any], *, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return `target` with every difference between `before` and `after`."""
    result = dict(target)
    for key in before.keys() | after.keys():
        old = before.get(key, _NOT_THERE)
        new = after.get(key, _NOT_THERE)
        if isinstance(old, Mapping) and isinstance(new, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = _apply_changes(result[key], before=old, after=new)
        elif new is _NOT_THERE:
            result.pop(key, None)
        elif old != new:
            result[key] = deepcopy(new)
    return result


def load_run(run_dir: RunDir) -> tuple[dict[str, Any], list[str]]:
    """Return what is saved in a run directory: the configuration, secrets masked, and what was typed.

    Raises ConfigError.
    """
    return _load(run_dir.config_file, dict), _load(run_dir.overrides_file, list)


def with_secrets(raw: Mapping[str, Any], run_dir: RunDir) -> dict[str, Any]:
    """Return a configuration that was saved with a run, with the secrets that are masked in it.

    Raises ConfigError if the run's secrets.yaml can't be read, or is of another configuration.
    """
    if not run_dir.secrets_file.exists():
        return dict(raw)
    entries = _load(run_dir.secrets_file, list)
    if not _is_unchanged(run_dir, run_dir.secrets_file):
        raise ConfigError(
            f"{run_dir.secrets_file} isn't what the run wrote. Restore it, or remove it and type the values again."
        )
    return restored_config(raw, entries, file=str(run_dir.secrets_file))


def load_config(run_dir: RunDir) -> dict[str, Any]:
    """Return the configuration of a run as its ranks need it, secrets included. Raises ConfigError."""
    return with_secrets(without_removed(load_written_config(run_dir)), run_dir)


def written_config(run_dir: RunDir) -> str:
    """Return the text of `config.yaml` as the run wrote it: `run.json` has a copy, in case the file was edited since.

    Raises RequestError if neither can be read.
    """
    facts = run_dir.recorded_facts(run_dir.config_file.name)
    try:
        content = read_bytes(run_dir.config_file)
    except OSError as error:
        if facts is None:
            raise ConfigError(f"{run_dir.config_file} can't be read: {error.strerror or error}") from error
        content = b""

    if facts is not None and FileFacts.of(content) != facts:
        content = str(run_dir.read_run().get("config", "")).encode()
        if FileFacts.of(content) != facts:
            raise ConfigError(f"{run_dir.config_file} and its copy in run.json are damaged. Restore them from a copy.")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{run_dir.config_file} can't be read: {error}") from error


def load_written_config(run_dir: RunDir) -> dict[str, Any]:
    """Return the configuration as the run wrote it, secrets masked. Raises RequestError if it can't be read."""
    config: dict[str, Any] = _checked(run_dir.config_file, dict, lambda: _load_text(written_config(run_dir)))
    return config


def _load_unchanged(run_dir: RunDir, *, typed: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the configuration that the run wrote, and what was typed for it.

    Raises RequestError if a file was changed since, except for a `config.yaml` whose changed keys are all typed.
    """
    written = load_written_config(run_dir)
    if run_dir.recorded_facts(run_dir.config_file.name) is not None:
        _check_edits(run_dir, written=written, typed=typed)
    return written, _load_overrides(run_dir)


def _load_overrides(run_dir: RunDir) -> list[str]:
    """Return what was typed for the run. Raises ConfigError if the file was changed since."""
    overrides = _load(run_dir.overrides_file, list)
    if not _is_unchanged(run_dir, run_dir.overrides_file):
        recorded = " ".join(map(str, run_dir.read_run().get("overrides", [])))
        raise ConfigError(
            f"{run_dir.overrides_file} isn't what the run wrote. Restore it, and type what you want to change.\n"
            f"The run was started with: {recorded or 'no overrides'}"
        )
    return list(map(str, overrides))


def _is_unchanged(run_dir: RunDir, file: Path) -> bool:
    """Return True if a readable file is what the run wrote, or if that wasn't recorded."""
    facts = run_dir.recorded_facts(file.name)
    return facts is None or FileFacts.of(read_bytes(file)) == facts


def _check_edits(run_dir: RunDir, *, written: Mapping[str, Any], typed: Sequence[str]) -> None:
    """Raise ConfigError that lists the keys in which `config.yaml` differs from `written`, unless all are typed."""
    try:
        edited = _load(run_dir.config_file, dict)
    except ConfigError as error:
        where = ""
        copies = sorted(run_dir.checkpoints.glob("step_*/config.yaml"))
        if copies:
            where = f" {copies[-1]} is one."
        raise ConfigError(f"{error}\nRestore it from a copy.{where}") from error

    before = flatten(written)
    now = flatten(edited)
    typed_keys = {_dotted_key(text) for text in typed}
    lines = []
    # Each key once, those of `before` first.
    for key in before | now:
        old = before.get(key, _NOT_THERE)
        new = now.get(key, _NOT_THERE)
        is_typed = any(key == typed_key or key.startswith(f"{typed_key}.") for typed_key in typed_keys)
        # Compared as text, because nan differs from itself, and 1 equals 1.0 and true.
        if not is_typed and repr(new) != repr(old):
            lines.append(f"  {_edit_text(key, old=old, new=new)}")
    if lines:
        raise ConfigError(
            f"{run_dir.config_file} was edited, or is damaged: it isn't what the run wrote. These keys differ:\n"
            + "\n".join(lines)
            + "\nType each of them on the command line, with the value that you want."
        )


def _edit_text(key: str, *, old: Any, new: Any) -> str:
    """Return the override that makes an edit, and what the value was before."""
    if new is _NOT_THERE:
        return f"~{key} (it was {show(old)})"
    before = "it was not there"
    if old is not _NOT_THERE:
        before = f"it was {show(old)}"
    return f"{key}={show(new)} ({before})"


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


def is_run(place: Path) -> bool:
    """Return True if `place` is a run directory. Other folders may have a config.yaml, but not both files."""
    run_dir = RunDir(place)
    # Unlike `Path.is_file`, these raise nothing for a folder that can't be read.
    return os.path.isfile(run_dir.config_file) and os.path.isfile(run_dir.overrides_file)  # noqa: PTH113


def _is_unfinished(run_dir: RunDir) -> bool:
    """Return True for a training that hasn't finished. Raises RequestError if `run.json` is damaged."""
    # It isn't a run, or it was killed while it was created.
    if not is_run(run_dir.path) or not run_dir.run_file.exists():
        return False
    record = run_dir.read_run()
    if record.get("status") == "finished":
        return False
    if "job" in record:
        return bool(record["job"] == "train")
    # Runs of earlier versions have no job in their record.
    raw, _ = load_run(run_dir)
    return bool(raw.get("job") == "train")


def _hint(wrong: Path, *, key: str) -> str:
    return suggested_path(wrong, key=key, find=_training_runs)


def suggested_path(wrong: Path, *, key: str, find: Callable[[Path], list[Path]], what: str = "run") -> str:
    """Return, on a new line, what may be meant by the path `wrong`: the nearest name, or the newest in a folder.

    Args:
        find: returns what there is in a folder and in its folders.
        what: what that is.
    """
    # Unlike `Path.is_dir`, this raises nothing for a folder that can't be read.
    folder = next(place for place in (wrong, *wrong.parents) if os.path.isdir(place))  # noqa: PTH112
    if folder == folder.parent:
        return ""
    places = find(folder)
    if not places:
        return ""
    if folder == wrong:
        newest = max(places, key=lambda place: place.name)
        return f"\nThe newest {what} in it: {path_argument(key, newest)}"
    guess = nearest(str(wrong), map(str, places))
    if guess is None:
        return ""
    return f"\nDid you mean {path_argument(key, guess)}?"


def _training_runs(folder: Path) -> list[Path]:
    """Return the training runs in a folder and in its folders."""
    runs = []
    for pattern in ("*/overrides.yaml", "*/*/overrides.yaml"):
        for file in folder.glob(pattern):
            record = read_object(RunDir(file.parent).run_file) or {}
            # A record of an earlier version has no job.
            if record.get("job", "train") == "train":
                runs.append(file.parent)
    return runs


def load_yaml(file: Path) -> Any:
    """Load a YAML file.

    Raises OSError, ValueError or yaml.YAMLError if it can't be read.
    """
    return _load_text(read_text(file))


def _load_text(text: str) -> Any:
    try:
        content = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        raise
    # PyYAML's constructors don't expect what a damaged file may have after a tag: `!!int ''` is an IndexError.
    except Exception as error:
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error
    check_nesting(content)
    return content


def _load(file: Path, kind: type) -> Any:
    """Load a YAML file with a mapping or list, as `kind` says. Raises ConfigError."""
    return _checked(file, kind, lambda: load_yaml(file))


def _checked(file: Path, kind: type, load: Callable[[], Any]) -> Any:
    """Return what `load` makes of the file. Raises ConfigError if it fails, or returns something else than `kind`."""
    try:
        content = load()
    except OSError as error:
        raise ConfigError(f"{file} can't be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        # YAML's errors have several lines.
        reason = " ".join(str(error).split())
        raise ConfigError(f"{file} can't be read: {reason}") from error
    if not isinstance(content, kind):
        what = "mapping" if kind is dict else "list"
        raise ConfigError(f"{file} must hold a {what}. It was changed: restore it, or start a new run.")
    return content


def dump_yaml(value: Any) -> str:
    """Return YAML as it is in the files of a run."""
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120)
    return text

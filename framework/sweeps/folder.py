"""A sweep on disk: the paths in its folder, and `sweep.json`, its plan. No torch here.

The plan is written before the first trial. Whatever a trial reached is in its own run directory, so that nothing of a
sweep is lost with the command that runs it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from framework.config.jobs import JOBS
from framework.config.overrides import key_of
from framework.config.secrets import Secrets, masked_arguments, restored_values
from framework.config.yaml_files import dump_yaml, load_yaml
from framework.errors import ConfigError, DiskError
from framework.sweeps.claims import exclusive
from framework.system.files import read_json
from framework.system.run_dir import RunDir, write_atomically, write_object
from framework.system.shown_text import MASK

SWEEPS = "multirun"
"""The folder of all sweeps in `path.outputs`."""

_VERSION = 1
# Above it, a number isn't one of a trial.
_MAX_NUMBER = 2**31
# What of a configuration neither changes what a run computes nor which weights it starts from.
_SAME_RUN = frozenset({"sweep", "resume", "rerun", "trust", "objects", "tags", "path", "logger", "launcher"})
_PROGRESS = "trainer.progress"


@dataclass(unsafe_hash=True)
class SweepFolder:
    """The paths inside one sweep's folder."""

    path: Path

    def __post_init__(self) -> None:
        path = self.path
        self.sweep_file = path / "sweep.json"
        # The overrides that sweep.json shows masked; only the owner can read it.
        self.secrets_file = path / "secrets.yaml"
        # The table of results, derived from the records of the trials.
        self.results_file = path / "results.csv"
        # Optuna's journal; only of a search.
        self.study_file = path / "study.log"
        # Which worker runs which trial; see `framework.sweeps.claims`.
        self.claims = path / "claims"
        # What the commands of trials print.
        self.logs = path / "logs"
        # For `exclusive`: who changes sweep.json.
        self.lock = path / ".lock"

    def trial(self, number: int) -> RunDir:
        """Return the run directory of a trial."""
        return RunDir(self.path / str(number))

    def trial_log(self, number: int) -> Path:
        """Return the log of what a trial's command prints."""
        return self.logs / f"{number}.log"

    def refusal(self, number: int) -> Path:
        """Return the file that says why a trial could not be started: such a trial has no run directory."""
        return self.logs / f"{number}.refused"

    def update(self, change: Callable[[SweepPlan], SweepPlan]) -> SweepPlan:
        """Replace the plan by what `change` makes of it, while no other process does, and return that.

        Raises RequestError if the plan can't be read, RunError if it can't be written.
        """
        with exclusive(self.lock):
            before = SweepPlan.read_with_secrets(self)
            after = change(before)
            if after != before:
                after.write(self)
        return after

    def add_trials(self, trials: Sequence[Trial]) -> list[Trial]:
        """Add trials to the plan under the next free numbers, and return each as it is there. As `update`.

        One whose configuration a trial of the sweep has already isn't repeated: that trial is returned. The numbers
        that are given don't count.
        """
        after = self.update(lambda plan: replace(plan, trials=(*plan.trials, *self._new_trials(plan, trials))))
        by_hash = _by_hash(after.trials)
        return [by_hash[trial.config_hash] for trial in trials]

    def _new_trials(self, plan: SweepPlan, trials: Iterable[Trial]) -> list[Trial]:
        """Return the trials that the plan doesn't have, with their numbers."""
        known = _by_hash(plan.trials)
        number = max((trial.number for trial in plan.trials), default=-1)
        new = []
        for key, trial in _by_hash(trials).items():
            if key not in known:
                number += 1
                # A trial that the plan has lost, as one restored from an older copy may.
                while os.path.lexists(self.trial(number).path):
                    number += 1
                new.append(replace(trial, number=number))
        return new


@dataclass(frozen=True)
class Trial:
    """One of a sweep's trials, as its plan lists it."""

    number: int
    # Those of the command that would run this trial alone.
    overrides: tuple[str, ...]
    # Of its resolved configuration, by `config_hash`.
    config_hash: str


@dataclass(frozen=True)
class SearchPlan:
    """How a search chooses its trials."""

    # The values that are searched, by key.
    space: Mapping[str, Any]
    # Nodes, as `sweep.sampler` and `sweep.pruner`.
    sampler: Mapping[str, Any] | None
    pruner: Mapping[str, Any] | None
    # Of all trials together, also after the search is continued.
    n_trials: int


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """The content of `sweep.json`."""

    # When the sweep was started, as an ISO time.
    created: str
    # The words of its command.
    arguments: tuple[str, ...]
    # The typed overrides, values to sweep over included.
    overrides: tuple[str, ...]
    # The absolute places of `hydra.searchpath`.
    search_path: tuple[str, ...]
    job: str
    recipe: str
    # `checkpoint.monitor` and `checkpoint.mode`: what is compared, and whether `min` or `max` is best.
    monitor: str | None
    mode: str
    # Trials that differ in these keys only are one row of the table.
    over: tuple[str, ...]
    # None: a grid.
    search: SearchPlan | None
    trials: tuple[Trial, ...]

    @staticmethod
    def read(folder: SweepFolder) -> SweepPlan:
        """Return the plan of a sweep, secrets masked. Raises ConfigError if there is none, or it can't be read."""
        return _plan(_content(folder), folder)

    @staticmethod
    def read_with_secrets(folder: SweepFolder) -> SweepPlan:
        """Return the plan as `read` does, with the passwords and tokens in overrides, if the sweep has them.

        Raises ConfigError if its secrets.yaml can't be read, or is another sweep's.
        """
        content = _content(folder)
        plan = _plan(content, folder)
        file = folder.secrets_file
        if not os.path.lexists(file):
            return plan
        try:
            entries = load_yaml(file)
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{file} can't be read: {_reason(error)}") from error
        try:
            restored = _plan(restored_values(content, entries), folder)
        except ConfigError:
            restored = None
        if restored is None or restored.masked() != plan.masked():
            raise ConfigError(
                f"{file} doesn't belong to the {folder.sweep_file.name} beside it. Restore both, or remove it and type "
                "the passwords and tokens again."
            )
        return restored

    def write(self, folder: SweepFolder) -> None:
        """Write `sweep.json`, passwords and tokens masked, and these to `secrets.yaml`. Raises DiskError.

        Each is replaced as a whole. `SweepFolder.update` also keeps other processes from doing the same.
        """
        masked = self.masked()
        entries = _secret_entries(self, masked)
        try:
            # First, so that a plan whose overrides are masked has them.
            if entries or folder.secrets_file.exists():
                write_atomically(folder.secrets_file, dump_yaml(entries), is_private=True)
            write_object(folder.sweep_file, {"version": _VERSION, **asdict(masked)})
        except OSError as error:
            raise DiskError(f"{folder.sweep_file} can't be written: {error.strerror or error}.") from error

    def masked(self) -> SweepPlan:
        """Return the plan with every secret in arguments and overrides masked."""
        # Each once, as most are the same in all trials.
        texts = dict.fromkeys(self.overrides)
        for trial in self.trials:
            texts.update(dict.fromkeys(trial.overrides))
        values: dict[str, list[str]] = {}
        for text in texts:
            values.setdefault(key_of(text), []).append(text.partition("=")[2])

        secrets = Secrets(values)
        by_text = dict(zip(texts, secrets.masked_overrides(list(texts)), strict=True))
        masked = self._with_overrides(lambda overrides: [by_text[text] for text in overrides])
        arguments = [secrets.masked_text(text) for text in masked_arguments(self.arguments)]
        return replace(masked, arguments=tuple(arguments))

    def with_typed_secrets(self, typed: Sequence[str]) -> SweepPlan:
        """Return the plan with overrides that are typed now in place of masked ones with the same key.

        Raises ConfigError that lists the keys whose values are still missing, as in a copy without secrets.yaml.
        """
        by_key = {key_of(text): text for text in typed}
        missing: dict[str, None] = {}

        def restored(overrides: Sequence[str]) -> list[str]:
            texts = []
            for text in overrides:
                if MASK in text:
                    key = key_of(text)
                    if key not in by_key:
                        missing[key] = None
                    text = by_key.get(key, text)
                texts.append(text)
            return texts

        plan = self._with_overrides(restored)
        if missing:
            raise ConfigError(
                f"{', '.join(missing)}: this copy of the sweep lacks the passwords and tokens of its command, which "
                "are in its secrets.yaml. Type each of these keys again, with its value."
            )
        return plan

    def _with_overrides(self, change: Callable[[Sequence[str]], Sequence[str]]) -> SweepPlan:
        """Return the plan with the overrides of the command and of each trial changed."""
        trials = [replace(trial, overrides=tuple(change(trial.overrides))) for trial in self.trials]
        return replace(self, overrides=tuple(change(self.overrides)), trials=tuple(trials))


def config_hash(raw: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a resolved configuration, the same for configurations that run the same.

    What only says where something is, how it is shown or what another job does isn't part of it. Secrets are masked: a
    short one could be guessed by its hash, and a sweep is continued with a token that was renewed.
    """
    masked = Secrets(_what_runs(raw)).masked_config()
    text = json.dumps(_with_text_keys(masked), sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def hidden_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys of masked values that differ between two configurations with the same `config_hash`."""
    secrets = []
    for raw in (one, other):
        entries = Secrets(_what_runs(raw)).entries()
        secrets.append({".".join(map(str, entry["key"])): entry["value"] for entry in entries})
    first, second = secrets
    return [key for key in first if first[key] != second.get(key)]


def idle_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the sections that differ between two configurations with the same `config_hash`: they run the same."""
    keys = []
    for key in {**one, **other}:
        if one.get(key) != other.get(key):
            keys.append(key)
    return keys


def decides_what_runs(key: str) -> bool:
    """Return False for a dotted key that says only where a run is, how it is started or what is shown of it."""
    return key.partition(".")[0] not in _SAME_RUN and key != _PROGRESS


def _what_runs(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that decides what is run."""
    left_out = set(_SAME_RUN)
    job = raw.get("job", "train")
    # The section of a job has its name. A job of the user's may read any of them.
    if job in JOBS:
        left_out |= JOBS.keys() - {job}
    kept = {key: value for key, value in raw.items() if key not in left_out}
    trainer = kept.get("trainer")
    if isinstance(trainer, Mapping):
        kept["trainer"] = {key: value for key, value in trainer.items() if decides_what_runs(f"trainer.{key}")}
    return kept


# Reading and writing sweep.json


def _content(folder: SweepFolder) -> dict[str, Any]:
    """Return what `sweep.json` contains. Raises ConfigError if there is none, or it isn't a sweep's."""
    file = folder.sweep_file
    try:
        content = read_json(file)
    except FileNotFoundError as error:
        raise ConfigError(f"{folder.path} is no sweep: it has no {file.name}.") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} can't be read: {_reason(error)}. Restore it from a copy.") from error

    version = content.get("version") if isinstance(content, dict) else None
    # By exact type: to Python, True is an int.
    if type(version) is not int or version < 1:
        raise ConfigError(f"{file} isn't the plan of a sweep: it has no version. Restore it from a copy.")
    if version > _VERSION:
        raise ConfigError(f"{file} was written by a later version of the framework. Update the framework.")
    return content  # type: ignore[no-any-return]


def _plan(content: Mapping[str, Any], folder: SweepFolder) -> SweepPlan:
    """Return the plan that the content of `sweep.json` means. Raises ConfigError if it has wrong types or values."""
    try:
        mode = _value(content, "mode", str)
        if mode not in ("min", "max"):
            raise ValueError("its mode is neither min nor max")
        trials = tuple(_trial(entry) for entry in _value(content, "trials", list))
        if len({trial.number for trial in trials}) < len(trials):
            raise ValueError("two of its trials have the same number")
        search = _value(content, "search", dict, is_optional=True)
        return SweepPlan(
            created=_value(content, "created", str),
            arguments=_texts(content, "arguments"),
            overrides=_texts(content, "overrides"),
            search_path=_texts(content, "search_path"),
            job=_value(content, "job", str),
            recipe=_value(content, "recipe", str),
            monitor=_value(content, "monitor", str, is_optional=True),
            mode=mode,
            over=_texts(content, "over"),
            search=None if search is None else _search(search),
            trials=trials,
        )
    except ValueError as error:
        raise ConfigError(f"{folder.sweep_file} is damaged: {error}. Restore it from a copy.") from error


def _trial(entry: Any) -> Trial:
    if not isinstance(entry, dict):
        raise ValueError("one of its trials isn't an object")
    number = _value(entry, "number", int)
    if not 0 <= number < _MAX_NUMBER:
        raise ValueError("a trial has a number that is too small or too large")
    return Trial(number, _texts(entry, "overrides"), _value(entry, "config_hash", str))


def _search(entry: Mapping[str, Any]) -> SearchPlan:
    n_trials = _value(entry, "n_trials", int)
    if n_trials < 1:
        raise ValueError(f"its n_trials is {n_trials}")
    return SearchPlan(
        space=_value(entry, "space", dict),
        sampler=_value(entry, "sampler", dict, is_optional=True),
        pruner=_value(entry, "pruner", dict, is_optional=True),
        n_trials=n_trials,
    )


def _texts(entry: Mapping[str, Any], name: str) -> tuple[str, ...]:
    texts = _value(entry, name, list)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"something in its {name} isn't text")
    return tuple(texts)


def _value(entry: Mapping[str, Any], name: str, kind: type, *, is_optional: bool = False) -> Any:
    """Return the value of a name. Raises ValueError unless it is of this kind; or, if it is optional, None."""
    value = entry.get(name)
    if value is None and is_optional:
        return None
    # By exact type: to Python, True is an int.
    if type(value) is not kind:
        raise ValueError(f"its {name} is {type(value).__name__} in place of {kind.__name__}")
    return value


def _by_hash(trials: Iterable[Trial]) -> dict[str, Trial]:
    """Return the trials by their configuration, of several with the same one the first."""
    by_hash: dict[str, Trial] = {}
    for trial in trials:
        by_hash.setdefault(trial.config_hash, trial)
    return by_hash


def _secret_entries(plan: SweepPlan, masked: SweepPlan) -> list[dict[str, Any]]:
    """Return the overrides that are masked and where they belong in `sweep.json`: the content of secrets.yaml."""
    entries = _differences(["overrides"], plan.overrides, masked.overrides)
    for index, (trial, masked_trial) in enumerate(zip(plan.trials, masked.trials, strict=True)):
        entries += _differences(["trials", index, "overrides"], trial.overrides, masked_trial.overrides)
    return entries


def _differences(place: list[Any], texts: Sequence[str], masked: Sequence[str]) -> list[dict[str, Any]]:
    entries = []
    for index, (text, masked_text) in enumerate(zip(texts, masked, strict=True)):
        if text != masked_text:
            entries.append({"key": [*place, index], "value": text})
    return entries


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    # YAML's errors have several lines.
    return " ".join(str(error).split())


def _with_text_keys(node: Any) -> Any:
    """Return a copy whose keys are texts, which can be sorted: YAML has numbers as keys, too."""
    if isinstance(node, Mapping):
        return {str(key): _with_text_keys(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_with_text_keys(value) for value in node]
    return node

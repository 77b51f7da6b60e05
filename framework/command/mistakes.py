"""Explain why Hydra could not compose a configuration.

Runs only after composing has failed. Checks each override of the command line again and reports every mistake; if all
of them are right, the mistake is in a file, and the error that was raised is shortened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from framework.config.parse import PACKAGE_LINE, raise_mistakes, walk
from framework.config.suggest import did_you_mean, nearest, nearest_key
from framework.errors import ConfigError

_COMPOSING = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, OSError)  # what composing raises


def explain(error: Exception, *, loader: ConfigLoader, typed: Sequence[str], is_sweep: bool) -> None:
    """Raise a ConfigError that explains `error`; return if `error` isn't about the configuration.

    Args:
        loader: that of Hydra, which raised `error`.
        typed: the overrides that were composed.
        is_sweep: True with -m, which allows several values for a key.
    """
    if not isinstance(error, _COMPOSING) or isinstance(error, BrokenPipeError):
        return
    overrides: list[Override] = []
    mistakes: list[str] = []
    for text in typed:
        try:
            overrides.append(OverridesParser.create().parse_override(text))
        except HydraException:
            mistakes.append(_unreadable(text))
    # If the right choices alone can't be composed either, the mistake is in a file, and `error` names it.
    with suppress(*_COMPOSING):
        mistakes.extend(_typed_mistakes(overrides, loader, is_sweep=is_sweep))
    raise_mistakes(mistakes)
    raise ConfigError(_shortened(error)) from error


def _unreadable(text: str) -> str:
    key, equals, _ = text.partition("=")
    if not equals:
        return f"{text}: not of the form key=value."
    return f"{text}: this value can't be read. Text with special characters needs two kinds of quotes: {key}=\"'…'\""


def _typed_mistakes(overrides: Sequence[Override], loader: Any, *, is_sweep: bool) -> Iterator[str]:
    groups = {group: loader.get_group_options(group) for group in loader.list_groups("") if group != "hydra"}
    right: list[str] = []  # choices to compose, so that the keys are known
    keys: list[Override] = []
    for each in overrides:
        text = str(each.input_line)
        group = each.key_or_group
        is_swept = each.is_sweep_override()
        if is_swept and not is_sweep:
            yield f"{text}: several values start several runs, which needs -m. Give one value or a list, or add -m."
        if group.startswith("hydra") or (each.is_delete() and group in groups):
            continue
        if group not in groups or (not is_swept and isinstance(each.value(), dict)):
            keys.append(each)
            continue
        wrong = [option for option in _options(each) if not loader.repository.config_exists(f"{group}/{option}")]
        for option in wrong:
            guess = nearest(option, groups[group])
            hint = did_you_mean(guess and f"{group}={guess}")
            yield f"{group}={option}: {group} has no such option.{hint}\n    Options: {', '.join(groups[group])}"
        if not wrong and not is_swept:
            right.append(text)
    raw: Any = OmegaConf.to_container(loader.load_configuration("config", right, RunMode.RUN), resolve=False)
    for each in keys:
        yield from _key_mistakes(each, raw, groups=groups)


def _options(override: Override) -> list[str]:
    """Return the options of a group that an override chooses."""
    if override.is_sweep_override():
        return list(override.sweep_string_iterator()) if override.is_choice_sweep() else []
    value = override.value()
    return ["" if each is None else str(each) for each in (value if isinstance(value, list) else [value])]


def _key_mistakes(override: Override, raw: Mapping[str, Any], *, groups: Mapping[str, Sequence[str]]) -> Iterator[str]:
    key = override.key_or_group
    text = str(override.input_line)
    there = dict(walk(raw))
    section, _, below = key.partition(".")
    part, is_below_part, _ = below.partition(".")
    if key in there or override.is_add() or override.is_force_add():
        return
    if part in groups.get(section, ()) and is_below_part and f"{section}.{part}" not in there:
        one = f"{section}.{part} isn't chosen. Choose it with {section}={part}"
        yield f"{text}: {one}, or several with {section}=[…,{part}]."
    elif isinstance(there.get(section, {}), dict):
        near = nearest_key(key, [*there, *groups])
        node = key.rpartition(".")[0]
        while node and f"{node}._target_" not in there:
            node = node.rpartition(".")[0]
        more = f" To pass {node} another keyword, write +{text}." if node and not override.is_delete() else ""
        help_line = "" if near or more else " `--cfg job` shows every key, `--help` every group."
        yield f"{text}: there is no such key.{did_you_mean(near)}{more}{help_line}"


def _shortened(error: BaseException) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}, column {mark.column + 1} is not valid YAML: {error.problem}."
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        name = error.missing_cfg_file
        options = error.options
        hint = did_you_mean(nearest(name.rpartition("/")[2], options))
        return f"There is no {name}.yaml, which a file refers to.{hint}\n    Options: {', '.join(options)}"
    if isinstance(error, OmegaConfBaseException):
        key = f"{error.full_key}: " if error.full_key else ""
        return f"{key}{_first_line(error)}"
    cause = f" ({_first_line(error.__cause__)})" if isinstance(error.__cause__, OmegaConfBaseException) else ""
    hint = f" {PACKAGE_LINE}" if "@recipe." in str(error) else ""
    return f"The configuration can't be composed: {_first_line(error) or type(error).__name__}{cause}{hint}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")

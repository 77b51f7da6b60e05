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
from framework.config.renamed import REMOVED_ADVICE
from framework.config.suggest import did_you_mean, nearest, nearest_key
from framework.errors import ConfigError

# What composing raises.
_COMPOSING = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, OSError)


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
    # Choices without a mistake are composed, so that the keys are known.
    choices: list[str] = []
    key_overrides: list[Override] = []
    for override in overrides:
        text = str(override.input_line)
        group = override.key_or_group
        is_swept = override.is_sweep_override()
        if is_swept and not is_sweep:
            yield f"{text}: several values start several runs, which needs -m. Give one value or a list, or add -m."
        if group.startswith("hydra") or (override.is_delete() and group in groups):
            continue
        if group not in groups or (not is_swept and isinstance(override.value(), dict)):
            key_overrides.append(override)
            continue

        unknown = [name for name in _options(override) if not loader.repository.config_exists(f"{group}/{name}")]
        for name in unknown:
            yield _no_such_option(name, group, groups[group])
        if not unknown and not is_swept:
            choices.append(text)

    composed = loader.load_configuration("config", choices, RunMode.RUN)
    raw: Any = OmegaConf.to_container(composed, resolve=False)
    for override in key_overrides:
        yield from _key_mistakes(override, raw, groups=groups)


def _no_such_option(name: str, group: str, options: Sequence[str]) -> str:
    advice = REMOVED_ADVICE.get(f"{group}={name}")
    if advice is not None:
        return f"{group}={name}: {group} has no such option. {advice}"
    guess = nearest(name, options)
    hint = did_you_mean(guess and f"{group}={guess}")
    return f"{group}={name}: {group} has no such option.{hint}\n    Options: {', '.join(options)}"


def _options(override: Override) -> list[str]:
    """Return the options of a group that an override chooses."""
    if override.is_sweep_override():
        return list(override.sweep_string_iterator()) if override.is_choice_sweep() else []
    value = override.value()
    names = value if isinstance(value, list) else [value]
    return ["" if name is None else str(name) for name in names]


def _key_mistakes(override: Override, raw: Mapping[str, Any], *, groups: Mapping[str, Sequence[str]]) -> Iterator[str]:
    key = override.key_or_group
    text = str(override.input_line)
    known = dict(walk(raw))
    if key in known or override.is_add() or override.is_force_add():
        return

    section, _, below = key.partition(".")
    option, is_below_option, _ = below.partition(".")
    if option in groups.get(section, ()) and is_below_option and f"{section}.{option}" not in known:
        yield (
            f"{text}: {section}.{option} isn't chosen. Choose it with {section}={option}, or several with "
            f"{section}=[…,{option}]."
        )
    elif isinstance(known.get(section, {}), dict):
        advice = REMOVED_ADVICE.get(key) or REMOVED_ADVICE.get(section)
        if advice is not None:
            yield f"{text}: there is no such key. {advice}"
            return
        hint = did_you_mean(nearest_key(key, [*known, *groups]))
        node = _node_around(key, known)
        if node and not override.is_delete():
            hint += f" To pass {node} another keyword, write +{text}."
        yield f"{text}: there is no such key.{hint or ' `--cfg job` shows every key, `--help` every group.'}"


def _node_around(key: str, known: Mapping[str, Any]) -> str:
    """Return the key of the innermost `_target_` node that a key is in; empty if it is in none."""
    node = key.rpartition(".")[0]
    while node and f"{node}._target_" not in known:
        node = node.rpartition(".")[0]
    return node


def _shortened(error: BaseException) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}, column {mark.column + 1} is not valid YAML: {error.problem}."
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        name = error.missing_cfg_file
        options = error.options
        hint = did_you_mean(nearest(name.rpartition("/")[2], options))
        return f"There is no {name}.yaml, which a file refers to.{hint}\n    Options: {', '.join(options)}"
    reason = _first_line(error)
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key}: {reason}" if error.full_key else reason
    text = f"The configuration can't be composed: {reason or type(error).__name__}"
    if isinstance(error.__cause__, OmegaConfBaseException):
        text += f" ({_first_line(error.__cause__)})"
    if "@recipe." in str(error):
        text += f" {PACKAGE_LINE}"
    return text


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]

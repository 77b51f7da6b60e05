"""Explain why Hydra could not compose a configuration.

Runs only after composing has failed. Checks each override of the command line again and reports every mistake; if all
of them are right, the mistake is in a file, and the error that was raised is shortened.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.config_source import ConfigSource
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from framework.config.assets import option_file
from framework.config.parse import raise_mistakes, show, walk
from framework.config.suggest import did_you_mean, nearest, nearest_key
from framework.errors import ConfigError

_HYDRA = "hydra"
_COMPOSING = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, OSError)  # what composing raises


def explain(error: Exception, *, loader: ConfigLoader, typed: Sequence[str], is_sweep: bool) -> None:
    """Raise a ConfigError that explains `error`; return if `error` isn't about the configuration.

    Args:
        loader: that of Hydra, which raised `error`.
        typed: the overrides that were composed.
        is_sweep: True with -m, which allows several values for a key.
    """
    if not isinstance(error, _COMPOSING):
        return
    overrides: list[Override] = []
    mistakes: list[str] = []
    for text in typed:
        try:
            overrides.append(OverridesParser.create().parse_override(text))
        except HydraException:
            mistakes.append(_unreadable(text))
    # If the right overrides alone can't be composed either, the mistake is in a file, and `error` names it.
    with suppress(*_COMPOSING):
        mistakes += _typed_mistakes(overrides, loader, is_sweep=is_sweep)
    raise_mistakes(mistakes)
    raise ConfigError(_shortened(error)) from error


def raise_misplaced(choices: Mapping[str, str], folders: Sequence[Path]) -> None:
    """Raise ConfigError if the package line of a chosen option's file puts its keys in the wrong place.

    choices: group → option. folders: searched for options, in this order.
    """
    raise_mistakes(list(_misplaced(choices, folders)))


def _misplaced(choices: Mapping[str, str], folders: Sequence[Path]) -> Iterator[str]:
    for group, option in choices.items():
        file = option_file(group, option, folders=folders)
        if file is None:
            continue
        text = file.read_text(encoding="utf-8")
        package = ConfigSource._get_header_dict(text).get("package")
        if group == "recipe":
            if package != "_global_":
                yield (
                    f"{file}: the first line must be `# @package _global_`, so that its keys are those of the "
                    f"whole configuration and not put below `{group}`."
                )
        elif package not in (None, "_group_", group) and re.search("^_target_:", text, flags=re.MULTILINE):
            yield f"{file}: remove the line `# @package {package}`, so that its keys are put below `{group}`."


def _unreadable(text: str) -> str:
    key, equals, _ = text.partition("=")
    if not equals:
        return f"{text}: not of the form key=value."
    if not key.strip("+~ "):
        return f"{text}: there is no key before the `=`."
    return f"{text}: this value can't be read. Text with special characters needs two kinds of quotes: {key}=\"'…'\""


def _typed_mistakes(overrides: Sequence[Override], loader: Any, *, is_sweep: bool) -> list[str]:
    groups = {group: loader.get_group_options(group) for group in loader.list_groups("") if group != _HYDRA}
    ours = [each for each in overrides if not each.key_or_group.startswith(_HYDRA)]
    mistakes = [] if is_sweep else [_several_values(each) for each in ours if each.is_sweep_override()]
    chosen: list[str] = []
    for each in ours:
        if _is_choice(each, groups):
            wrong = list(_choice_mistakes(each, loader, groups))
            mistakes += wrong
            if not wrong and each.input_line and not each.is_sweep_override():
                chosen.append(each.input_line)
    # These files can make composing fail, and any further mistakes follow from them.
    named = dict(text.split("=", 1) for text in chosen)
    folders = [Path(source.path) for source in loader.get_sources() if source.scheme() == "file"]
    if misplaced := list(_misplaced(named, folders)):
        return [*mistakes, *misplaced]
    raw: Any = OmegaConf.to_container(loader.load_configuration("config", chosen, RunMode.RUN), resolve=False)
    for each in ours:
        if not _is_choice(each, groups):
            mistakes += _key_mistakes(each, raw, groups=groups)
    return mistakes


def _several_values(override: Override) -> str:
    text = str(override.input_line)
    key, _, value = text.partition("=")
    is_plain = override.is_choice_sweep() and not value.startswith("choice")
    as_list = f", or a list with {key}=[{value}]" if is_plain else ""
    return f"{text}: several values start several runs, which needs -m. Give one value{as_list}, or add -m."


def _is_choice(override: Override, groups: Mapping[str, Any]) -> bool:
    is_mapping = not override.is_sweep_override() and isinstance(override.value(), dict)
    return override.key_or_group in groups and not is_mapping


def _choice_mistakes(override: Override, loader: Any, groups: Mapping[str, Sequence[str]]) -> Iterator[str]:
    group, text = override.key_or_group, str(override.input_line)
    if override.package is not None:
        yield f"{text}: a group can't be moved to another package. Remove @{override.package}."
    elif override.is_add() or override.is_force_add():
        yield f"{text}: {group} always has an option. Write {text.lstrip('+')}."
    elif override.is_delete():
        none = f" Choose {group}=none instead." if "none" in groups[group] else ""
        yield f"{text}: the group {group} can't be left out.{none}"
    else:
        if override.is_sweep_override():
            options: Any = override.sweep_string_iterator() if override.is_choice_sweep() else ()
        else:
            options = value if isinstance(value := override.value(), list) else [value]
        for option in options:
            if not loader.repository.config_exists(f"{group}/{option}"):
                shown = "" if option is None else option
                guess = nearest(str(shown), groups[group])
                yield (
                    f"{group}={shown}: {group} has no such option.{did_you_mean(guess and f'{group}={guess}')}\n"
                    f"    Options: {', '.join(groups[group])}"
                )


def _key_mistakes(override: Override, raw: Mapping[str, Any], *, groups: Mapping[str, Sequence[str]]) -> Iterator[str]:
    key, text, there = override.key_or_group, str(override.input_line), dict(walk(raw))
    section, _, below = key.partition(".")
    part, is_below_part, _ = below.partition(".")
    if override.is_add() and key in there and not isinstance(override.value(), (dict, list)):
        yield f"{text}: {key} exists already. Write {text.removeprefix('+')}."
    elif key in there or override.is_add() or override.is_force_add():
        value = None if override.is_sweep_override() else override.value()
        for name, inner in value.items() if isinstance(value, dict) else ():  # such as trainer={gpu:1}
            if f"{key}.{name}" not in there:
                yield _unknown(f"{key}.{name}", f"{key}.{name}={inner}", there)
    elif part in groups.get(section, ()) and is_below_part and f"{section}.{part}" not in there:
        one = f"{section}.{part} isn't chosen. Choose it with {section}={part}"
        yield f"{text}: {one}, or several with {section}=[…,{part}]."
    elif not isinstance(there.get(section, {}), dict):
        yield f"{text}: a file sets {section}={show(there[section])}, which has no keys. Write a mapping there."
    else:
        yield _unknown(key, text, [*there, *groups], is_deletion=override.is_delete())


def _unknown(key: str, text: str, known: Collection[str], *, is_deletion: bool = False) -> str:
    near = nearest_key(key, known)
    node = key.rpartition(".")[0]
    while node and f"{node}._target_" not in known:
        node = node.rpartition(".")[0]
    more = f" To pass {node} another keyword, write +{text}." if node and not is_deletion else ""
    help_line = "" if near or more else " `--cfg job` shows every key, `--help` every group."
    return f"{text}: there is no such key.{did_you_mean(near)}{more}{help_line}"


def _shortened(error: BaseException) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}, column {mark.column + 1} is not valid YAML: {error.problem}."
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing_file(error.missing_cfg_file, error.options or ())
    if isinstance(error, OmegaConfBaseException):
        key = f"{error.full_key}: " if error.full_key else ""
        return f"{key}{_first_line(error)}"
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    cause = f" ({_first_line(error.__cause__)})" if isinstance(error.__cause__, OmegaConfBaseException) else ""
    return f"The configuration can't be composed: {_first_line(error) or type(error).__name__}{cause}"


def _missing_file(name: str, options: Sequence[str]) -> str:
    if not options:
        return f"There is no {name}.yaml."
    group, _, option = name.rpartition("/")
    guess = nearest(option, options)
    hint = did_you_mean(guess and f"{group}/{guess}")
    asked = f"There is no {name}.yaml, which a configuration file refers to.{hint}"
    return f"{asked}\n    Options: {', '.join(options)}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")

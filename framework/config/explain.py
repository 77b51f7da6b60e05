"""What Hydra, OmegaConf and YAML say about a configuration that can't be composed, in our words.

Called only when composing has failed, so it may take its time: what was typed is looked at again, piece by piece, and
every mistake in it is named. Where nothing typed is wrong, a file is, and what was raised is shortened.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from framework.config.assets import option_file
from framework.config.parse import known_keys, node_above, raise_mistakes
from framework.config.suggest import did_you_mean, nearest, nearest_key
from framework.errors import ConfigError

_HYDRA = "hydra"
_COMPOSING = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, OSError)  # what composing raises


def explain(error: Exception, *, config_dir: Path, typed: Sequence[str], sweep: bool) -> None:
    """Raise the ConfigError for `error`, which composing `typed` raised; return where it isn't about a configuration.

    typed: the overrides of the command line. sweep: several values may be given, because -m was.
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
    # Where even the part that is right can't be composed, what is wrong is in a file, and `error` says so.
    with suppress(*_COMPOSING):
        mistakes += _typed_mistakes(overrides, config_dir=config_dir, sweep=sweep)
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
        package = _package(text)
        if group == "recipe":
            if package != "_global_":
                yield (
                    f"{file}: the first line must be `# @package _global_`, so that its keys are those of the "
                    f"whole configuration and not put below `{group}`."
                )
        elif package not in (None, "_group_", group) and re.search("^_target_:", text, flags=re.MULTILINE):
            yield f"{file}: remove the line `# @package {package}`, so that its keys are put below `{group}`."


def _package(text: str) -> str | None:
    """Return what follows `# @package` in a file's header, as Hydra reads it; None if there is no such line."""
    for line in filter(None, map(str.strip, text.splitlines())):
        header = re.match(r"#+\s*@(\S+)\s+(.+)", line)
        if header is None:
            return None
        if header[1] == "package":
            return header[2]
    return None


def _unreadable(text: str) -> str:
    key, equals, _ = text.partition("=")
    if not equals:
        return f"{text}: this can't be read. What is set is written key=value."
    if not key.strip("+~ "):
        return f"{text}: this can't be read, for there is no key before the `=`."
    return f"{text}: this value can't be read. Text with special characters needs two kinds of quotes: {key}=\"'…'\""


def _typed_mistakes(overrides: Sequence[Override], *, config_dir: Path, sweep: bool) -> list[str]:
    with initialize_config_dir(str(config_dir), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        groups = {group: loader.get_group_options(group) for group in loader.list_groups("") if group != _HYDRA}
        ours = [each for each in overrides if not each.key_or_group.startswith(_HYDRA)]
        mistakes = [mistake for each in ours for mistake in _sweep_mistakes(each, sweep=sweep)]
        chosen: list[str] = []
        for each in ours:
            if not _is_choice(each, groups):
                continue
            wrong = list(_choice_mistakes(each, loader, groups))
            mistakes += wrong
            if not wrong and each.input_line and not each.is_sweep_override() and not each.is_delete():
                chosen.append(each.input_line)
        # These files can make composing fail, and any further mistakes follow from them.
        named = dict(text.split("=", 1) for text in chosen)
        folders = [Path(source.path) for source in loader.get_sources() if source.scheme() == "file"]
        if misplaced := list(_misplaced(named, folders)):
            return [*mistakes, *misplaced]
        config = compose("config", overrides=chosen)
        raw: Any = OmegaConf.to_container(config, resolve=False)
    keys = known_keys(raw)
    for each in ours:
        if not _is_choice(each, groups):
            mistakes += _key_mistakes(each, config, keys=keys, groups=groups)
    return mistakes


def _sweep_mistakes(override: Override, *, sweep: bool) -> Iterator[str]:
    if not override.is_sweep_override() or sweep:
        return
    text = str(override.input_line)
    key, _, value = text.partition("=")
    is_plain = override.is_choice_sweep() and not value.startswith("choice")
    as_list = f", or a list with {key}=[{value}]" if is_plain else ""
    yield f"{text}: several values start several runs, which needs -m. Give one value{as_list}, or add -m."


def _is_choice(override: Override, groups: Mapping[str, Any]) -> bool:
    is_mapping = not override.is_sweep_override() and isinstance(override.value(), dict)
    return override.key_or_group in groups and not is_mapping


def _choice_mistakes(override: Override, loader: Any, groups: Mapping[str, Sequence[str]]) -> Iterator[str]:
    group, text = override.key_or_group, str(override.input_line)
    if override.package is not None:
        yield f"{text}: a group has one place here. Write it without @{override.package}."
        return
    if override.is_add() or override.is_force_add():
        yield f"{text}: {group} is a group that is always there. Write {text.lstrip('+')}."
        return
    if override.is_delete():
        none = f" Choose {group}=none instead." if "none" in groups[group] else ""
        yield f"{text}: the group {group} can't be left out.{none}"
        return
    for option in _options(override):
        folder, _, name = str(option).rpartition("/")
        known = loader.get_group_options(f"{group}/{folder}".rstrip("/"))
        if not isinstance(option, str) or name.removesuffix(".yaml") not in known:
            shown = "" if option is None else option
            guess = nearest(str(shown), groups[group])
            yield (
                f"{group}={shown}: {group} has no such option.{did_you_mean(guess and f'{group}={guess}')}\n"
                f"    Options: {', '.join(groups[group])}"
            )


def _options(override: Override) -> list[Any]:
    """The options an override asks for; none of a sweep over anything else than named values."""
    if override.is_sweep_override():
        return list(override.sweep_string_iterator()) if override.is_choice_sweep() else []
    value = override.value()
    return value if isinstance(value, list) else [value]


def _key_mistakes(
    override: Override, config: Any, *, keys: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    key, text = override.key_or_group, str(override.input_line)
    there = _has(config, key)
    if override.is_add() and there and not isinstance(override.value(), (dict, list)):
        yield f"{text}: {key} is there already. Write {text.removeprefix('+')}."
    elif there or override.is_add() or override.is_force_add():
        if isinstance(value := None if override.is_sweep_override() else override.value(), dict):
            yield from _below(value, config, key=key, keys=keys)
    elif (part := _part_not_chosen(key, config, groups)) is not None:
        group, option = part
        several = f"{group}=[…,{option}]"
        yield f"{text}: {group}.{option} isn't there. Choose it with {group}={option}, or several with {several}."
    elif isinstance(switch := OmegaConf.select(config, section := key.partition(".")[0]), bool):
        word = str(switch).lower()
        yield (
            f"{text}: a file says {section}: {word}, and there are no keys below that. "
            f"Write {section}: {{enabled: {word}}} there."
        )
    else:
        yield _unknown(key, text, keys=[*keys, *groups], deletion=override.is_delete())


def _part_not_chosen(key: str, config: Any, groups: Mapping[str, Sequence[str]]) -> tuple[str, str] | None:
    """The group and option that would bring `key`, where options are parts, as those of `callbacks` are."""
    group, _, rest = key.partition(".")
    option = rest.partition(".")[0]
    is_part = group in groups and option in groups[group] and node_above(key) == f"{group}.{option}"
    return (group, option) if is_part and not _has(config, f"{group}.{option}") else None


def _below(value: Mapping[Any, Any], config: Any, *, key: str, keys: Sequence[str]) -> Iterator[str]:
    """Mistakes in a mapping that was typed, such as trainer={gpu:1}."""
    for name, inner in value.items():
        full = f"{key}.{name}"
        if not _has(config, full):
            yield _unknown(full, f"{full}={inner}", keys=keys, deletion=False)


def _unknown(key: str, text: str, *, keys: Sequence[str], deletion: bool) -> str:
    node = node_above(key)
    near = nearest_key(key, keys)
    more = f" To give {node} one more keyword, write +{text}." if node is not None and not deletion else ""
    help_line = "" if near or more else " `--cfg job` shows every key, `--help` every group."
    return f"{text}: there is no such key.{did_you_mean(near)}{more}{help_line}"


def _has(config: Any, key: str) -> bool:
    """Whether a dotted key exists; unlike OmegaConf.select, also where its value is null or can't be resolved."""
    node = OmegaConf.to_container(config, resolve=False)
    for part in key.split("."):
        if isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, dict) and part in node:
            node = node[part]
        else:
            return False
    return True


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
    asked = f"There is no {name}.yaml, which a file of the configuration asks for.{hint}"
    return f"{asked}\n    Options: {', '.join(options)}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")

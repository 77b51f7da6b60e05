"""Say what is wrong in a configuration file, in a few words, from the error that Hydra raised for it.

Runs only after composing has failed, and if `mistakes` finds nothing wrong in what was typed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from framework.config.hydra_compose import GroupDefault, groups_of
from framework.config.parse import PACKAGE_LINE
from framework.config.suggest import did_you_mean, nearest
from framework.config.values import show
from framework.system.formatting import display_path

# What Hydra says of a line in a defaults list that lacks `override` or the slash. Without a slash, a group is looked
# for in the folder of the file, and Hydra's own advice leaves it out.
_LINES = (
    re.compile(r"Multiple values for (?P<group>\w+)\. To override a value use 'override \S+: (?P<name>.+)'"),
    re.compile(r"In '(?P<file>\S+)': Could not find '\w+/(?P<group>\w+)/(?P<name>[^']+)'"),
    re.compile(r"In '(?P<file>\S+)': Could not override '\w+/(?P<group>\w+)[@']"),
    re.compile(r"In (?P<file>\S+): Override '.+' is defined before '(\w+/)?(?P<group>\w+)(@\w+)?: (?P<name>.+)'"),
)
_NO_SUCH_GROUP = re.compile(r"In '(?P<file>\S+)': Could not override '(?P<group>\w+)'")
_IN_FILE = re.compile(r"In '(?P<file>[^']+)': ConfigTypeError raised")


def file_mistake(error: BaseException, *, loader: Any) -> str:
    """Return what is wrong in a file, from the error that composing has raised."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}, column {mark.column + 1} is not valid YAML: {error.problem}."
    in_defaults = _in_defaults_list(error, loader)
    if in_defaults is not None:
        return in_defaults
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        name = error.missing_cfg_file
        options = error.options
        hint = did_you_mean(nearest(name.rpartition("/")[2], options))
        return f"There is no {name}.yaml, which a file refers to.{hint}\n    Options: {', '.join(options)}"
    reason = _first_line(error)
    if isinstance(error, OmegaConfBaseException):
        if not error.full_key:
            return reason
        return f"{error.full_key}: {reason}"
    primary = re.match(r"Cannot find primary config '(\S+)'", reason)
    if primary is not None and loader.repository.config_exists(f"recipe/{primary[1]}"):
        return f"{primary[1]} is a recipe. Type recipe={primary[1]} in place of --config-name."
    not_a_mapping = _not_a_mapping(reason, loader)
    if not_a_mapping is not None:
        return not_a_mapping
    text = f"The configuration can't be composed: {reason or type(error).__name__}"
    if isinstance(error.__cause__, OmegaConfBaseException):
        text += f" ({_first_line(error.__cause__)})"
    if "@recipe." in str(error):
        text += f" {PACKAGE_LINE}"
    return text


def _in_defaults_list(error: BaseException, loader: Any) -> str | None:
    """Return what is wrong with a line of a file's defaults list; None if that isn't the mistake."""
    groups = groups_of(loader)
    for pattern in _LINES:
        line = pattern.match(str(error))
        if line is None or line["group"] not in groups:
            continue
        facts = line.groupdict()
        group = facts["group"]
        file = facts.get("file")
        path = "A file" if file is None else _path_of(file, loader)
        name = facts.get("name") or _chosen_in(str(file), group, loader)
        if file == "hydra/config":
            return f"hydra/{group}={name} can't be used: a sweep starts its trials itself. Leave it out."
        return (
            f"{path}: an option of {group} is chosen already, so the line of the defaults list needs `override` and a "
            f"slash:\n    - override /{group}: {name}"
        )

    unknown = _NO_SUCH_GROUP.match(str(error))
    if unknown is None:
        return None
    hint = did_you_mean(nearest(unknown["group"], groups))
    path = _path_of(unknown["file"], loader)
    return f"{path}: its defaults list has `override` for {unknown['group']}, which is no group.{hint}"


def _not_a_mapping(reason: str, loader: Any) -> str | None:
    """Return what is wrong with a file that has a list or text for a section; None if that isn't the mistake."""
    match = _IN_FILE.match(reason)
    if match is None:
        return None
    content: Any = OmegaConf.to_container(loader.repository.load_config(match["file"]).config, resolve=False)
    path = _path_of(match["file"], loader)
    groups = groups_of(loader)
    for name, value in content.items():
        if name in groups and not isinstance(value, dict):
            options = show(value) if _is_list_of_names(value) else "[NAME,…]"
            return (
                f"{path}: {name} is {'a list' if isinstance(value, list) else show(value)}, and must be a mapping. "
                f"Options are chosen in the file's defaults list:\n    - override /{name}: {options}\n"
                f"Those of your own have names:\n    {name}: {{NAME: {{_target_: package.module.Name}}}}"
            )
    return f"{path}: a list or text stands where a mapping belongs."


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _chosen_in(file: str, group: str, loader: Any) -> str:
    """Return the option of a group that the defaults list of a file chooses."""
    for line in loader.repository.load_config(file).defaults_list:
        if isinstance(line, GroupDefault) and line.group == group:
            return str(line.value)
    return "NAME"


def _path_of(name: str, loader: Any) -> str:
    """Return where the file of a configuration such as `recipe/toy` is."""
    folder = loader.repository.load_config(name).path
    return display_path(Path(f"{folder.removeprefix('file://')}/{name}.yaml"))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]

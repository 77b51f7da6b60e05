"""Write the configuration of a run as a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from framework.api.nodes import BLANK, OBJECTS, importable_name, is_maker
from framework.config.assets import config_dir, user_config_dir
from framework.config.hydra_compose import OverridesParser
from framework.config.mistakes import raise_mistakes
from framework.config.nested import walk
from framework.config.objects import ObjectFactory, load_objects
from framework.config.renamed import present_overrides, with_present_names, without_removed
from framework.config.saved import objects_of
from framework.config.targets import import_target
from framework.config.yaml_files import load_yaml
from framework.errors import ConfigError
from framework.system.run_dir import RunDir, write_atomically
from framework.system.shown_text import MASK
from framework.types import Datasets

_HEAD = "# @package _global_\n"
_EMPTY_OPTIONS = {"data": "default", "scheduler": "none"}
"""The options of groups that hold a node among other keys, without that node."""


def write_recipe(run_dir: RunDir, path: Path) -> Path:
    """Write the overrides of a run as a recipe's file; return its path.

    Raises ConfigError if the file exists, or if the run has objects that can't be named.
    """
    if path.exists():
        raise ConfigError(f"{path} exists already. Choose another name, or remove it.")
    raw = without_removed(with_present_names(load_yaml(run_dir.config_file)))

    # The parts of the recipe's file: the recipe it starts from, the options of groups, and the keys.
    base: list[Any] = []
    options: dict[str, Any] = {}
    content: dict[str, Any] = {}
    for text in present_overrides(load_yaml(run_dir.overrides_file)):
        if MASK in text:
            raise ConfigError(
                f"{text}: a recipe can't hold a password or token. Put it into an environment variable, and start the "
                f"run with {text.partition('=')[0]}='${{oc.env:NAME}}'."
            )
        override = OverridesParser.create().parse_override(text)
        key = override.key_or_group
        value = override.value()
        section, _, below = key.partition(".")
        if key == "recipe":
            base = [] if value == BLANK else [value]
        elif _is_group(key) and not isinstance(value, Mapping):
            options[f"override /{key}"] = None if override.is_delete() else value
        elif override.is_delete():
            raise ConfigError(f"{text} removes a key, which a recipe can't do. Choose another option of the group.")
        elif base and below and value is None and section in _EMPTY_OPTIONS:
            # YAML can't remove the node that the recipe has, so the whole section is written out.
            options[f"override /{section}"] = _EMPTY_OPTIONS[section]
            content[section] = raw[section]
        # A section that is written out has this key already.
        elif content.get(section) is not raw[section]:
            _set(content, key.split("."), value)
    raise_mistakes(list(_unnamed(content, objects_of(run_dir, raw))))

    written: dict[str, Any] = {}
    defaults = base + [{group: option} for group, option in options.items()]
    if defaults:
        written["defaults"] = defaults
    written.update(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _HEAD + yaml.safe_dump(written, sort_keys=False, allow_unicode=True, width=120))
    return path


def _is_group(key: str) -> bool:
    """Return True if `conf`, the framework's or the user's, has a folder of options for the key."""
    places = (config_dir(), user_config_dir(Path.cwd()))
    return any(place is not None and (place / key).is_dir() for place in places)


def _set(content: dict[str, Any], path: list[str], value: Any) -> None:
    """Set a value at a path of keys, and make the mappings that lead there."""
    *parents, last = path
    for name in parents:
        if not isinstance(content.get(name), dict):
            content[name] = {}
        content = content[name]
    content[last] = value


def _unnamed(content: Mapping[str, Any], files: Sequence[str]) -> Iterator[str]:
    """Yield a mistake for each pickled object that `content` refers to, with what to pass instead."""
    load_objects(files)
    for key, target in walk(content):
        if not (key.endswith("._target_") and str(target).startswith(f"{OBJECTS}.")):
            continue
        pickled = import_target(target)
        place = key.removesuffix("._target_")
        if not isinstance(pickled, ObjectFactory):
            name = getattr(pickled, "__qualname__", target)
            yield f"{place}: {name} is defined in a script or notebook. Move it to a module, and import it from there."
            continue
        value = pickled.value
        name = importable_name(type(value))
        if isinstance(value, Datasets):
            yield f"{place}: these data sets have no name. Put a function that makes them in a module, and pass that."
        elif is_maker(value) or name is None:
            name = getattr(value, "__qualname__", type(value).__qualname__)
            yield f"{place}: {name} is defined in a script or notebook. Move it to a module; pass a class or function."
        elif place in content or place == "task.loss":
            yield f"{place}: the arguments of this {name} aren't known. Pass functools.partial({name}, ...) instead."
        else:
            yield f"{place}: this {name} can't be written. Have a function of a module make it, and pass that."

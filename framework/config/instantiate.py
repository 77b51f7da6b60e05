"""Build what a `_target_` node describes: import the target, build the nodes inside, call it.

The keys are those of Hydra's `instantiate`:

    _target_: torch.nn.Sequential
    _args_: [{_target_: torch.nn.ReLU}]     # arguments by position
    _partial_: true                         # a functools.partial of the target instead of its result
    _recursive_: false                      # the target gets the nodes inside as they are
    _convert_: all                          # containers are lists and dicts; `none`: OmegaConf's

`_recursive_` and `_convert_` also hold for the nodes inside, which may have their own. By default `_convert_` is `all`:
a ListConfig in an optimizer's state would make its checkpoint unreadable. Nodes are resolved: `${name}` is a text.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from framework.config.schema import Node
from framework.config.targets import NODE_KEYS, import_target
from framework.errors import DataError, FrameworkError, TargetError


class _Mode(NamedTuple):
    """What a node passes on to the nodes inside."""

    recursive: bool = True
    convert: str = "all"

    def inside(self, container: Mapping[str, Any]) -> _Mode:
        """Return the mode inside a node or mapping, which may set another one."""
        return _Mode(container.get("_recursive_", self.recursive), container.get("_convert_", self.convert))


def instantiate(node: Node, *, key: str) -> Any:
    """Return what the node's target returns; a partial of the target if the node has `_partial_: true`.

    Exceptions of targets are passed on, with a line that names the key and the target.

    Args:
        key: where the node is in the configuration, for errors.
    """
    return _build_node(node, key=key, mode=_Mode())


def bind(node: Node, *, key: str) -> partial[Any]:
    """Return a partial of the node's target with its arguments, for which the nodes inside are built."""
    return _bind(node, key=key, mode=_Mode())


def call_target(node: Node, function: Callable[..., Any], *args: Any, key: str, **keywords: Any) -> Any:
    """Call the function of a node. The exceptions that it raises name the node's key and target."""
    try:
        return function(*args, **keywords)
    except DataError:
        # It already says where data is missing or wrong.
        raise
    except Exception as error:
        _add_line(error, f"While building {key} ({node['_target_']}).")
        raise


def _add_line(error: Exception, line: str) -> None:
    # Notes came with Python 3.11.
    if isinstance(error, FrameworkError) or not hasattr(error, "add_note"):
        error.args = (f"{error}\n{line}",)
    else:
        error.add_note(line)


def _build(value: Any, *, key: str, mode: _Mode) -> Any:
    """Return a value of a node with the nodes inside built."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            return _build_node(value, key=key, mode=mode)
        mode = mode.inside(value)
        items = {name: _build(item, key=f"{key}.{name}", mode=mode) for name, item in value.items()}
        return _container(items, mode)
    if isinstance(value, list):
        return _container([_build(item, key=f"{key}.{number}", mode=mode) for number, item in enumerate(value)], mode)
    return value


def _build_node(node: Node, *, key: str, mode: _Mode) -> Any:
    bound = _bind(node, key=key, mode=mode)
    if node.get("_partial_", False):
        return bound
    return call_target(node, bound, key=key)


def _bind(node: Node, *, key: str, mode: _Mode) -> partial[Any]:
    try:
        target = import_target(node["_target_"])
    except TargetError as error:
        raise TargetError(f"{key}._target_={node['_target_']}: {error}") from error
    args = ()
    keywords = {}
    for name, value in _arguments(node, key=key, mode=mode.inside(node)):
        if name == "_args_":
            args = value
        else:
            keywords[name] = value
    return partial(target, *args, **keywords)


def _arguments(node: Node, *, key: str, mode: _Mode) -> Iterator[tuple[str, Any]]:
    """Yield the arguments in the order of the node, in which the nodes inside are built."""
    for name, value in node.items():
        if name in NODE_KEYS and name != "_args_":
            continue
        if mode.recursive:
            yield name, _without_configs(_build(value, key=f"{key}.{name}", mode=mode), mode)
        else:
            yield name, _container(copy.deepcopy(value), mode)


def _container(value: Any, mode: _Mode) -> Any:
    """Return a container as the mode says."""
    if mode.convert != "none" or not isinstance(value, (dict, list)):
        return value
    from omegaconf import OmegaConf

    return OmegaConf.create(value, flags={"allow_objects": True})


def _without_configs(value: Any, mode: _Mode) -> Any:
    """Return a list or dict for a container of OmegaConf, which a node inside may have read from a file."""
    # Importing it takes 0.15 s, and only a program that has done so has its containers.
    omegaconf = sys.modules.get("omegaconf")
    if mode.convert == "none" or omegaconf is None or not omegaconf.OmegaConf.is_config(value):
        return value
    return omegaconf.OmegaConf.to_container(value, resolve=True)

"""Import the targets of `_target_` nodes and check their keywords against signatures, before anything is built."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from framework.config.objects import load_objects
from framework.config.optimizers import optimizer_configs, schedules
from framework.config.schema import Config, Node
from framework.config.suggest import did_you_mean, nearest
from framework.errors import TargetError

F = TypeVar("F")
_SPECIAL = ("_target_", "_args_", "_partial_", "_convert_", "_recursive_")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

_NUMERIC_WORDS = {"int", "float", "None", "NoneType", "Optional", "Union", "Tensor", "torch"}
"""The words of annotations that allow numbers but no strings."""


def check_targets(config: Config) -> None:
    """Import every target, nested ones included, and check keywords against signatures. Call nothing.

    Raises TargetError with all mistakes, one per line. An exception raised by a module's import is passed on.
    """
    load_objects(config.objects or ())
    model, _ = without_freeze(config.model)
    collate_fn = config.data.collate_fn
    if collate_fn is not None:
        # It is called with the samples later, for each batch.
        collate_fn = {**collate_fn, "_partial_": True}

    mistakes = [
        *check_node(model, "model", supplied=("devices",)),
        *check_node(config.data.datasets, "data.datasets", supplied=("run_config", "run_context")),
        *check_node(collate_fn, "data.collate_fn"),
        *check_node(config.data.sampler, "data.sampler", positional=1),
        *check_node(config.task, "task", supplied=("model", "config", "context")),
        *check_node(config.strategy, "strategy", supplied=("context",)),
    ]
    for optimizer in optimizer_configs(config.optimizer):
        mistakes += check_node(optimizer.node, optimizer.key, positional=1, supplied=("model", "total_steps"))
        for number, group in enumerate(optimizer.groups):
            options = {"_target_": optimizer.node["_target_"], "_partial_": True, **group.options}
            mistakes += check_node(options, f"{optimizer.key}.groups.{number}", positional=1)
    for name, node in config.logger.items():
        mistakes += check_node(node, f"logger.{name}", supplied=("run_dir", "progress"))
    for name, node in config.callbacks.items():
        mistakes += check_node(node, f"callbacks.{name}", supplied=("context", "run_dir"))
    for key, schedule in schedules(config):
        mistakes += check_node(schedule, key, positional=1, supplied=("total_steps",))
    if mistakes:
        raise TargetError("\n".join(mistakes))


def without_freeze(node: Node) -> tuple[Node, Any]:
    """Return the model's node without the framework's key `freeze`, and that; the model may have its own keyword."""
    if "freeze" not in node or takes(node, "freeze"):
        return node, None
    return {name: value for name, value in node.items() if name != "freeze"}, node["freeze"]


def takes(node: Node, keyword: str) -> bool:
    """Return True if the target's signature has the keyword; `**kwargs` doesn't count."""
    parameter = _parameters(import_target(node["_target_"])).get(keyword)
    return parameter is not None and parameter.kind in _NAMED


def unwrap_partial(function: F) -> F:
    """Return what is to be called in every step: a partial without Hydra's checks, which take 90 µs at each call."""
    if not isinstance(function, partial):
        return function
    return partial(function.func, *function.args, **function.keywords)  # type: ignore[return-value]


def requires(node: Node, keyword: str) -> bool:
    """Return True if the target requires the keyword and the node doesn't set it."""
    parameter = _parameters(import_target(node["_target_"])).get(keyword)
    return parameter is not None and parameter.default is parameter.empty and keyword not in node


def import_target(name: str) -> Any:
    """Return what a dotted name stands for. Raises TargetError with the nearest name if there is no such thing."""
    target: Any = None
    path = ""
    for part in name.split("."):
        parent = target
        path = f"{path}.{part}".lstrip(".")
        if hasattr(parent, part):
            target = getattr(parent, part)
            continue
        try:
            target = importlib.import_module(path)
        except ModuleNotFoundError as error:
            # The module itself is missing, or its parent isn't a package.
            if f"{path}.".startswith(f"{error.name}."):
                raise TargetError(_no_such(path, within=parent)) from None
            raise TargetError(
                f"{path} can't be imported, because it imports {error.name}, which isn't installed."
            ) from error
    if not callable(target):
        raise TargetError(f"it is a {type(target).__name__} and can't be called. Name a class or function.")
    return target


def check_node(node: Any, key: str, *, positional: int = 0, supplied: Collection[str] = ()) -> Iterator[str]:
    """Yield the mistakes in a node, or in the nodes inside any other value.

    Args:
        positional: Number of leading positional arguments that the framework passes.
        supplied: Keywords that it passes if the signature has them and the node doesn't set them.
    """
    if isinstance(node, Mapping) and "_target_" in node:
        try:
            parameters = _parameters(import_target(node["_target_"]))
            yield from _check_keywords(node, key, parameters, positional=positional, supplied=supplied)
        except TargetError as error:
            yield f"{key}._target_={node['_target_']}: {error}"
    if isinstance(node, Mapping) and node.get("_recursive_", True):
        for name, item in node.items():
            yield from check_node(item, f"{key}.{name}")
    elif isinstance(node, list):
        for number, item in enumerate(node):
            yield from check_node(item, f"{key}.{number}")


def _check_keywords(
    node: Node, key: str, parameters: Mapping[str, inspect.Parameter], *, positional: int, supplied: Collection[str]
) -> Iterator[str]:
    kinds = {parameter.kind for parameter in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return
    target = node["_target_"]
    by_position = [p.name for p in parameters.values() if p.kind in _BY_POSITION]
    # Those that the framework passes by position, and those of the node.
    num_passed = positional + len(node.get("_args_") or ())
    filled = set(by_position[:num_passed])
    allowed = [p.name for p in parameters.values() if p.kind in _NAMED and p.name not in filled]
    takes = f"It takes {', '.join(allowed) or 'nothing'}."

    if len(by_position) < positional and inspect.Parameter.VAR_POSITIONAL not in kinds:
        yield f"{key}: {target} must take a first argument, which the framework passes. {takes}"
    for name, value in node.items():
        if name in _SPECIAL:
            continue
        if name in filled:
            yield f"{key}.{name} is filled in by the framework. Leave it out."
        elif name not in allowed:
            guess = nearest(name, allowed)
            if guess is not None:
                hint = did_you_mean(f"{key}.{guess}")
            else:
                hint = f" If it is another target's, remove it with ~{key}.{name}."
            yield f"{key}.{name}: {target} has no such keyword.{hint} {takes}"
        elif isinstance(value, str) and _wants_number(parameters[name]):
            yield f"{key}.{name}={value}: must be a number for {target}."

    if node.get("_partial_"):
        return
    given = filled | node.keys() | set(supplied)
    for p in parameters.values():
        if p.default is p.empty and p.kind is not p.VAR_POSITIONAL and p.name not in given:
            yield f"{key}.{p.name} is required by {target}. {takes}"


def _wants_number(parameter: inspect.Parameter) -> bool:
    """Return True if the annotation allows numbers but no strings, so that a string is certainly a mistake."""
    words = set(re.findall(r"\w+", inspect.formatannotation(parameter.annotation)))
    return bool(words & {"int", "float"}) and words <= _NUMERIC_WORDS


def _parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a callable's signature; `**kwargs` if it has none, as some that are written in C."""
    anything = {"kwargs": inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)}
    try:
        parameters = inspect.signature(target).parameters
        if not inspect.isclass(target):
            return parameters
        # A decorated `__init__` may take more than it shows, as those of transformers' configurations do.
        decorated = inspect.signature(target, follow_wrapped=False).parameters
    except ValueError:
        return anything
    if decorated != parameters and any(p.kind is p.VAR_KEYWORD for p in decorated.values()):
        return {**parameters, **anything}
    return parameters


def _no_such(path: str, *, within: Any) -> str:
    """Return the message for a dotted name that doesn't exist. within: the module or class that should have it."""
    parent, _, name = path.rpartition(".")
    guess = nearest(name, _names_in(within))
    if not parent:
        return f"there is no module {name}.{did_you_mean(guess)}"
    if guess is not None:
        return f"there is no {name} in {parent}.{did_you_mean(f'{parent}.{guess}')}"
    # Another package of the same name may hide the one that is meant.
    file = getattr(within, "__file__", None)
    place = f" ({file})" if file else ""
    return f"there is no {name} in {parent}{place}."


def _names_in(parent: Any) -> list[str]:
    """Return the names in a module or class, its modules that aren't imported included; None: all modules there are."""
    if parent is None:
        return [module.name for module in pkgutil.iter_modules()]
    names = [name for name in dir(parent) if not name.startswith("_")]
    folders = getattr(parent, "__path__", None) or []
    return names + [module.name for module in pkgutil.iter_modules(folders)]

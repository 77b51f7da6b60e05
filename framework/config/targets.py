"""Import the targets of `_target_` nodes and check their keywords against signatures, before anything is built."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from framework.config.schema import Config, Node
from framework.config.suggest import did_you_mean, nearest
from framework.errors import TargetError

_SPECIAL = ("_target_", "_args_", "_partial_", "_convert_", "_recursive_")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Supplied:
    """The arguments that the framework itself passes to a target.

    positional: number of leading positional arguments.
    keywords: passed if the signature has them.
    defaults: likewise, unless the node sets them.
    """

    positional: int = 0
    keywords: tuple[str, ...] = ()
    defaults: tuple[str, ...] = ()


MODEL = Supplied(keywords=("devices",))
STRATEGY = Supplied(keywords=("context",))
OPTIMIZER = Supplied(positional=1)
SCHEDULE = Supplied(positional=1, defaults=("total_steps",))
LOGGER = Supplied(keywords=("run_dir", "redraws"))
CALLBACK = Supplied(keywords=("context", "run_dir"))
PLAIN = Supplied()
_GROUPS = ("model", "task", "strategy", "optimizer")  # whose options are one node

_NUMERIC_WORDS = frozenset(
    {"int", "float", "None", "NoneType", "Optional", "Union", "Tensor", "torch", "typing", "types"}
)


def check_targets(config: Config) -> None:
    """Import every target, nested ones included, and check keywords against signatures. Call nothing.

    Raises TargetError with all mistakes, one per line. An exception raised by a module's import is passed on.
    """
    mistakes = [mistake for key, node, supplied in _nodes(config) for mistake in check_node(node, key, supplied)]
    if mistakes:
        raise TargetError("\n".join(mistakes))


def check_node(node: Node, key: str, supplied: Supplied = PLAIN) -> list[str]:
    """Return the mistakes in a node that the framework calls, and in the nodes inside it."""
    refused = [
        f"{key}.{name} can't be used here: the framework calls this target itself. Write keywords."
        for name in ("_partial_", "_args_")
        if node.get(name)
    ]
    return refused or list(_check(node, key, supplied))


def takes(node: Node, keyword: str) -> bool:
    """Return True if the target's signature has the keyword; `**kwargs` doesn't count."""
    parameter = _parameters(import_target(node["_target_"])).get(keyword)
    return parameter is not None and parameter.kind in _NAMED


def requires(node: Node, keyword: str) -> bool:
    """Return True if the target requires the keyword and the node doesn't set it."""
    parameter = _parameters(import_target(node["_target_"])).get(keyword)
    return parameter is not None and parameter.default is parameter.empty and keyword not in node


def import_target(name: str) -> Any:
    """Return what a dotted name stands for. Raises TargetError with the nearest name if there is no such thing."""
    path, _, rest = name.partition(".")
    found: Any = _import_module(path, within=None)
    for part in rest.split("."):
        parent, path = found, f"{path}.{part}"
        if hasattr(parent, part):
            found = getattr(parent, part)
        elif isinstance(parent, ModuleType):
            found = _import_module(path, within=parent)
        else:
            raise TargetError(_no_such(path, within=parent))
    if not callable(found):
        raise TargetError(f"it is a {type(found).__name__} and can't be called.{_callables(found)}")
    return found


def _nodes(config: Config) -> Iterator[tuple[str, Node, Supplied]]:
    yield "model", config.model, MODEL
    yield "data.datasets", config.data.datasets, PLAIN
    yield "task", config.task, PLAIN
    yield "strategy", config.strategy, STRATEGY
    yield "optimizer", config.optimizer, OPTIMIZER
    if config.scheduler.schedule is not None:
        yield "scheduler.schedule", config.scheduler.schedule, SCHEDULE
    for name, node in config.logger.items():
        yield f"logger.{name}", node, LOGGER
    for name, node in config.callbacks.items():
        yield f"callbacks.{name}", node, CALLBACK


def _check(node: Node, key: str, supplied: Supplied) -> Iterator[str]:
    name = node["_target_"]
    try:
        parameters = _parameters(import_target(name))
    except TargetError as error:
        yield f"{key}._target_={name}: {error}"
    else:
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            yield from _check_keywords(node, key, supplied, parameters)
    if node.get("_recursive_", True):
        for keyword, value in node.items():
            yield from _check_inside(value, f"{key}.{keyword}")


def _check_inside(value: Any, key: str) -> Iterator[str]:
    if isinstance(value, Mapping) and "_target_" in value:
        yield from _check(value, key, PLAIN)
    elif isinstance(value, (Mapping, list, tuple)):
        for name, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _check_inside(item, f"{key}.{name}")


def _check_keywords(
    node: Node, key: str, supplied: Supplied, parameters: Mapping[str, inspect.Parameter]
) -> Iterator[str]:
    target = node["_target_"]
    positional = [p.name for p in parameters.values() if p.kind in _BY_POSITION]
    filled = set(positional[: supplied.positional + len(node.get("_args_") or ())])
    filled |= set(supplied.keywords) & parameters.keys()
    allowed = [p.name for p in parameters.values() if p.kind in _NAMED and p.name not in filled]
    takes = f"It takes {', '.join(allowed) or 'nothing'}."
    for name, value in node.items():
        if name in _SPECIAL:
            continue
        if name in filled:
            yield f"{key}.{name} is filled in by the framework. Leave it out."
        elif name not in allowed:
            guess = nearest(name, allowed)
            hint = did_you_mean(guess and f"{key}.{guess}")
            if guess is None:
                whole = f" (in a recipe, all of them with `override /{key}: null`)" if key in _GROUPS else ""
                hint = f" If it is another target's, remove it with ~{key}.{name}{whole}."
            yield f"{key}.{name}: {target} has no such keyword.{hint} {takes}"
        elif isinstance(value, str) and _wants_number(parameters[name]):
            yield f"{key}.{name}={value}: must be a number for {target}."
    given = filled | node.keys() | set(supplied.defaults)
    for p in parameters.values() if not node.get("_partial_") else ():
        if p.default is p.empty and p.kind is not p.VAR_POSITIONAL and p.name not in given:
            yield f"{key}.{p.name} is required by {target}. {takes}"


def _wants_number(parameter: inspect.Parameter) -> bool:
    """Return True if the annotation allows numbers but no strings, so that a string is certainly a mistake."""
    annotation = parameter.annotation
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    words = set(re.findall(r"\w+", text))
    return bool(words & {"int", "float"}) and words <= _NUMERIC_WORDS


def _parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(target).parameters
    except ValueError:  # written in C, without a signature: allow anything
        return {"kwargs": inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)}


def _import_module(path: str, *, within: ModuleType | None) -> ModuleType:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if f"{path}.".startswith(f"{error.name}."):  # it, or its parent, which is a module and no package
            raise TargetError(_no_such(path, within=within)) from None
        raise TargetError(
            f"{path} can't be imported, because it imports {error.name}, which isn't installed."
        ) from error


def _no_such(path: str, *, within: Any) -> str:
    parent, _, name = path.rpartition(".")
    hidden = _hidden(name, within)
    if hidden is not None:
        return f"{hidden} can't be found, because {within.__file__} hides it. Remove or rename that file."
    guess = nearest(name, _names_in(within))
    if not parent:
        return f"there is no module {name}.{did_you_mean(guess)}"
    return f"there is no {name} in {parent}.{did_you_mean(guess and f'{parent}.{guess}')}"


def _hidden(name: str, package: Any) -> Path | None:
    """Return the module `name` of another package of the same name, which `package` hides on sys.path."""
    if not isinstance(package, ModuleType) or package.__file__ is None or "." in package.__name__:
        return None
    places = [Path(folder, package.__name__, name) for folder in sys.path]
    return next((path for place in places for path in (place.with_suffix(".py"), place) if path.exists()), None)


def _names_in(parent: Any) -> list[str]:
    if parent is None:
        return [module.name for module in pkgutil.iter_modules()]
    names = [name for name in dir(parent) if not name.startswith("_")]
    return names + [module.name for module in pkgutil.iter_modules(getattr(parent, "__path__", None) or [])]


def _callables(module: Any) -> str:
    """List what a module has to call, for a target that names only the module."""
    if not isinstance(module, ModuleType):
        return ""
    own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
    return f" It has {', '.join(n for n in own if not n.startswith('_')) or 'nothing'}."

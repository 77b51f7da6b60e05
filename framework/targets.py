"""What `_target_` nodes name: imported, and their keywords compared with signatures, before anything is built."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, final

from framework.config.schema import Config, Node
from framework.config.suggest import did_you_mean, nearest
from framework.errors import TargetError

_SPECIAL = ("_target_", "_args_", "_partial_", "_convert_", "_recursive_")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Supplied:
    """What the framework gives a target itself.

    positional: how many of its first parameters. keywords: those that are given where the signature has them.
    defaults: likewise, unless the node gives them.
    """

    positional: int = 0
    keywords: tuple[str, ...] = ()
    defaults: tuple[str, ...] = ()


MODEL = Supplied(keywords=("devices",))
STRATEGY = Supplied(keywords=("context",))
OPTIMIZER = Supplied(positional=1)
SCHEDULE = Supplied(positional=1, defaults=("total_steps",))
LOGGER = Supplied(keywords=("run_dir",))
CALLBACK = Supplied(keywords=("context", "run_dir"))
PLAIN = Supplied()
_GROUPS = ("model", "task", "strategy", "optimizer")  # whose options are one node

_NUMERIC_WORDS = frozenset(
    {"int", "float", "None", "NoneType", "Optional", "Union", "Tensor", "torch", "typing", "types"}
)


def check_targets(config: Config) -> None:
    """Import every target, also nested ones, and compare keywords with signatures. Builds and calls nothing.

    Raises TargetError with all mistakes, one a line. A module that fails while it is imported raises its own exception.
    """
    mistakes = [mistake for key, node, supplied in _nodes(config) for mistake in check_node(node, key, supplied)]
    if mistakes:
        raise TargetError("\n".join(mistakes))


def check_node(node: Node, key: str, supplied: Supplied = PLAIN) -> list[str]:
    """What is wrong with one node that the framework calls, and with the nodes inside it."""
    refused = [
        f"{key}.{name} can't be used here: the framework calls this target itself. Write keywords."
        for name in ("_partial_", "_args_")
        if node.get(name)
    ]
    return refused or list(_check(node, key, supplied))


def takes(node: Node, keyword: str) -> bool:
    """Whether the node's target names the keyword in its signature; `**kwargs` doesn't count."""
    parameter = _parameters(import_target(node["_target_"])).get(keyword)
    return parameter is not None and parameter.kind in _NAMED


def requires(node: Node, keyword: str) -> bool:
    """Whether the target can't be called without the keyword, and the node doesn't give it."""
    parameter = _parameters(import_target(node["_target_"])).get(keyword)
    return parameter is not None and parameter.default is parameter.empty and keyword not in node


def is_torchs(node: Node) -> bool:
    """Whether the node's target is torch's own."""
    return str(getattr(import_target(node["_target_"]), "__module__", "")).partition(".")[0] == "torch"


def import_target(name: str) -> Any:
    """What a dotted name names. Raises TargetError with the nearest name where there is no such thing."""
    first, *rest = name.split(".")
    found: Any = _import_module(first, within=None)
    path = first
    for part in rest:
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
        target = import_target(name)
    except TargetError as error:
        yield f"{key}._target_={name}: {error}"
    else:
        yield from _Call(node, key, supplied, _parameters(target)).mistakes()
    if node.get("_recursive_", True):
        for keyword, value in node.items():
            yield from _check_inside(value, f"{key}.{keyword}")


def _wants_number(parameter: inspect.Parameter) -> bool:
    """Whether the annotation allows numbers and no text, so that text is certainly a mistake."""
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", None) or str(annotation)
    if text in ("Union", "Optional", "UnionType"):  # whose name doesn't say of what
        text = str(annotation)
    words = set(re.findall(r"\w+", text))
    return bool(words & {"int", "float"}) and words <= _NUMERIC_WORDS


def _check_inside(value: Any, key: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield from _check(value, key, PLAIN)
        else:
            for name, item in value.items():
                yield from _check_inside(item, f"{key}.{name}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _check_inside(item, f"{key}.{index}")


@final
@dataclass(frozen=True)
class _Call:
    """One node against its target's signature."""

    node: Node
    key: str
    supplied: Supplied
    parameters: Mapping[str, inspect.Parameter]

    def mistakes(self) -> Iterator[str]:
        if any(p.kind is p.VAR_KEYWORD for p in self.parameters.values()):
            return
        positional = [p.name for p in self.parameters.values() if p.kind in _BY_POSITION]
        by_position = set(positional[: self.supplied.positional + len(self.node.get("_args_") or ())])
        filled = by_position | {name for name in self.supplied.keywords if name in self.parameters}
        allowed = [p.name for p in self.parameters.values() if p.kind in _NAMED and p.name not in filled]
        given = [name for name in self.node if name not in _SPECIAL]
        for name in given:
            if name in filled:
                yield f"{self.key}.{name} is filled in by the framework. Leave it out."
            elif name not in allowed:
                yield self._unknown(name, allowed)
            elif isinstance(self.node[name], str) and _wants_number(self.parameters[name]):
                yield f"{self.key}.{name}={self.node[name]}: {self.node['_target_']} takes a number there."
        if not self.node.get("_partial_"):
            for parameter in self.parameters.values():
                if self._is_missing(parameter, filled):
                    yield (
                        f"{self.key}.{parameter.name} is needed by {self.node['_target_']} and isn't given. "
                        f"It takes {_listed(allowed)}."
                    )

    def _is_missing(self, parameter: inspect.Parameter, filled: set[str]) -> bool:
        return (
            parameter.default is parameter.empty
            and parameter.kind in (*_NAMED, parameter.POSITIONAL_ONLY)
            and parameter.name not in filled
            and parameter.name not in self.node
            and parameter.name not in self.supplied.defaults
        )

    def _unknown(self, name: str, allowed: list[str]) -> str:
        guess = nearest(name, allowed)
        hint = did_you_mean(guess and f"{self.key}.{guess}")
        if guess is None:
            whole = f" (in a recipe, all of them with `override /{self.key}: null`)" if self.key in _GROUPS else ""
            hint = f" If it is another target's, remove it with ~{self.key}.{name}{whole}."
        return f"{self.key}.{name}: {self.node['_target_']} has no such keyword.{hint} It takes {_listed(allowed)}."


def _parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(target).parameters
    except ValueError:  # written in C without a signature: anything may be right
        return {"kwargs": inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)}


def _import_module(path: str, *, within: ModuleType | None) -> ModuleType:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name == path:
            raise TargetError(_no_such(path, within=within)) from None
        if error.name is not None and path.startswith(f"{error.name}."):  # the parent is a module, not a package
            raise TargetError(_no_such(path, within=within)) from None
        raise TargetError(f"{path} can't be imported, because it imports {error.name}, which isn't there.") from error


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
    """The module `name` in another folder of the name of `package`, which hides it by being a file or having one."""
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
    """For a name that stops at a module: what it may go on with."""
    if not isinstance(module, ModuleType):
        return ""
    own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
    return f" It has {_listed([n for n in own if not n.startswith('_')])}."


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"

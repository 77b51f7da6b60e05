"""Check the targets of `_target_` nodes, and their keywords against signatures, before anything is built.

Twice: the command reads signatures from source files, without importing anything, and is silent where these can't tell;
each rank imports the targets.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from framework.config import source
from framework.config.objects import load_objects
from framework.config.optimizers import optimizer_configs, schedules
from framework.config.schema import Config, Node
from framework.config.suggest import did_you_mean, nearest
from framework.errors import TargetError, TopologyError

NODE_KEYS = ("_target_", "_args_", "_partial_", "_convert_", "_recursive_")
"""The keys of a node that aren't keywords of its target; see `framework.config.instantiate`."""
_CONVERT = ("none", "partial", "object", "all")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

SCHEDULE_LENGTHS = ("total_steps", "num_training_steps")
"""What schedules call the length of a run: torch's, and those of transformers."""

_NUMERIC_WORDS = {"int", "float", "None", "NoneType", "Optional", "Union", "Tensor", "torch"}
"""The words of annotations that allow numbers but no strings."""


class Signatures(Protocol):
    """Where the signatures of targets are known from."""

    def parameters(self, target: str) -> Mapping[str, inspect.Parameter] | None:
        """Return the parameters of a dotted name; None if they aren't known. Raises TargetError if there is none."""

    def confirms(self, target: str) -> bool:
        """Return True if calls are certain to be checked against these parameters. It may take longer."""


class ImportedSignatures:
    """Those of the imported targets. An exception raised by a module's import is passed on."""

    def parameters(self, target: str) -> Mapping[str, inspect.Parameter] | None:
        return _parameters(import_target(target))

    def confirms(self, target: str) -> bool:
        return True


class SourceSignatures:
    """Those that source files show."""

    def parameters(self, target: str) -> Mapping[str, inspect.Parameter] | None:
        found = source.look_up(target)
        if isinstance(found, source.Missing):
            raise TargetError(_no_such_name(found))
        return source.signature(found)

    def confirms(self, target: str) -> bool:
        return source.is_ordinary(source.look_up(target))


def check_targets(config: Config) -> None:
    """Import every target, nested ones included, and check keywords against signatures. Call nothing.

    Raises TargetError with all mistakes, one per line. An exception raised by a module's import is passed on.
    """
    load_objects(config.objects or ())
    mistakes = list(target_mistakes(config, ImportedSignatures()))
    if mistakes:
        raise TargetError("\n".join(mistakes))


def target_mistakes(config: Config, signatures: Signatures) -> Iterator[str]:
    """Yield what is wrong with the targets of a configuration and their keywords, as far as signatures are known."""
    check = partial(check_node, signatures=signatures)
    model, _ = without_freeze(config.model, signatures)
    collate_fn = config.data.collate_fn
    if collate_fn is not None:
        # It is called with the samples later, for each batch.
        collate_fn = {**collate_fn, "_partial_": True}

    yield from check(model, "model", supplied=("devices",))
    yield from _peft_mistakes(config.peft, signatures)
    yield from check(config.data.datasets, "data.datasets", supplied=("run_config", "run_context"))
    yield from check(collate_fn, "data.collate_fn")
    yield from check(config.data.sampler, "data.sampler", positional=1)
    yield from check(config.task, "task", supplied=("model", "config", "context"))
    yield from check(config.strategy, "strategy", supplied=("context",))
    for optimizer in optimizer_configs(config.optimizer):
        yield from check(optimizer.node, optimizer.key, positional=1, supplied=("model", "total_steps"))
        for number, group in enumerate(optimizer.groups):
            options = {"_target_": optimizer.node["_target_"], "_partial_": True, **group.options}
            yield from check(options, f"{optimizer.key}.groups.{number}", positional=1)
    for name, node in config.logger.items():
        yield from check(node, f"logger.{name}", supplied=("run_dir", "progress"))
    for name, node in config.callbacks.items():
        yield from check(node, f"callbacks.{name}", supplied=("context", "run_dir"))
    for key, schedule in schedules(config):
        yield from check(schedule, key, positional=1, supplied=SCHEDULE_LENGTHS)


def _peft_mistakes(node: Node | None, signatures: Signatures) -> Iterator[str]:
    if node is None:
        return
    if node["_target_"].startswith("peft.") and find_spec("peft") is None:
        yield "peft needs the package peft, which isn't installed: pip install peft"
        return
    yield from check_node(node, "peft", signatures=signatures)


def without_freeze(node: Node, signatures: Signatures | None = None) -> tuple[Node, Any]:
    """Return the model's node without the framework's key `freeze`, and that; the model may have its own keyword."""
    if "freeze" not in node or takes(node, "freeze", signatures):
        return node, None
    return {name: value for name, value in node.items() if name != "freeze"}, node["freeze"]


def takes(node: Node, keyword: str, signatures: Signatures | None = None) -> bool:
    """Return True if the target's signature has the keyword, as far as it is known; `**kwargs` doesn't count."""
    try:
        parameters = (signatures or ImportedSignatures()).parameters(node["_target_"]) or {}
    except TargetError:
        if signatures is None:
            raise
        return False
    parameter = parameters.get(keyword)
    return parameter is not None and parameter.kind in _NAMED


def check_devices(node: Node, number: int, signatures: Signatures | None = None) -> None:
    """Raise TopologyError for several devices of a process, and a model that takes none, as far as that is known."""
    signatures = signatures or ImportedSignatures()
    target = node["_target_"]
    if number == 1 or takes(node, "devices", signatures) or not signatures.confirms(target):
        return
    if signatures.parameters(target) is not None:
        raise TopologyError(
            f"{target} can't use {number} devices: it takes no keyword `devices`.\n"
            "Use topology.gpus_per_process=1 topology.min_gpus_per_process=1 topology.procs_per_node=auto, or a model "
            "that takes it."
        )


def requires(node: Node, keyword: str) -> bool:
    """Return True if the target requires the keyword and the node doesn't set it."""
    parameter = _parameters(import_target(node["_target_"])).get(keyword)
    return parameter is not None and parameter.default is parameter.empty and keyword not in node


def import_target(name: str) -> Any:
    """Return the class or function with a dotted name. Raises TargetError with the nearest name if there is none."""
    target = get_object(name)
    if not callable(target):
        raise TargetError(f"it is a {type(target).__name__} and can't be called. Name a class or function.")
    return target


def get_object(path: str) -> Any:
    """Return what a dotted name stands for. Raises TargetError with the nearest name if there is no such thing."""
    value: Any = None
    name = ""
    for part in path.split("."):
        parent = value
        name = f"{name}.{part}".lstrip(".")
        if hasattr(parent, part):
            value = getattr(parent, part)
            continue
        try:
            value = importlib.import_module(name)
        except ModuleNotFoundError as error:
            # The module itself is missing, or its parent isn't a package.
            if f"{name}.".startswith(f"{error.name}."):
                raise TargetError(_no_such(name, within=parent)) from None
            raise TargetError(
                f"{name} can't be imported, because it imports {error.name}, which isn't installed."
            ) from error
    return value


def check_node(
    node: Any,
    key: str,
    *,
    positional: int = 0,
    supplied: Collection[str] = (),
    signatures: Signatures | None = None,
) -> Iterator[str]:
    """Yield the mistakes in a node, or in the nodes inside any other value.

    Args:
        positional: Number of leading positional arguments that the framework passes.
        supplied: Keywords that it passes if the signature has them and the node doesn't set them.
        signatures: by default, those of the imported targets.
    """
    signatures = signatures or ImportedSignatures()
    if isinstance(node, Mapping) and "_target_" in node:
        target = node["_target_"]
        try:
            parameters = signatures.parameters(target)
        except TargetError as error:
            yield f"{key}._target_={target}: {error}"
            parameters = None
        wrong_keys = list(_node_key_mistakes(node, key))
        yield from wrong_keys
        if parameters is not None and not wrong_keys:
            mistakes = list(_check_keywords(node, key, parameters, positional=positional, supplied=supplied))
            if mistakes and signatures.confirms(target):
                yield from mistakes
    if isinstance(node, Mapping) and node.get("_recursive_", True):
        for name, item in node.items():
            yield from check_node(item, f"{key}.{name}", signatures=signatures)
    elif isinstance(node, list):
        for number, item in enumerate(node):
            yield from check_node(item, f"{key}.{number}", signatures=signatures)


def _node_key_mistakes(node: Node, key: str) -> Iterator[str]:
    """Yield what is wrong with the keys of a node that aren't keywords of its target."""
    for name in ("_partial_", "_recursive_"):
        if not isinstance(node.get(name, False), bool):
            yield f"{key}.{name}={node[name]}: must be true or false."
    if node.get("_convert_", "all") not in _CONVERT:
        yield f"{key}._convert_={node['_convert_']}: must be one of {', '.join(_CONVERT)}."
    if not isinstance(node.get("_args_", []), list):
        yield f"{key}._args_={node['_args_']}: must be a list, the arguments by position."


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
        if name in NODE_KEYS:
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
    return _no_such_in(path, _names_in(within), file=getattr(within, "__file__", None))


def _no_such_name(missing: source.Missing) -> str:
    """Return the same message for a name that no source file has."""
    if missing.parent is None:
        return _no_such_in(missing.path, _names_in(None), file=None)
    return _no_such_in(missing.path, source.names_in(missing.parent), file=missing.parent.file)


def _no_such_in(path: str, names: Collection[str], *, file: str | None) -> str:
    parent, _, name = path.rpartition(".")
    guess = nearest(name, names)
    if not parent:
        return f"there is no module {name}.{did_you_mean(guess)}"
    if guess is not None:
        return f"there is no {name} in {parent}.{did_you_mean(f'{parent}.{guess}')}"
    if file is None:
        return f"there is no {name} in {parent}."
    return f"there is no {name} in {parent} ({file}).{_hidden_by(file, module=parent)}"


def _hidden_by(file: str, *, module: str) -> str:
    """Return, after a space, what to do if a file of the user's hides another module; empty if it doesn't."""
    own = Path(file).resolve()
    hidden = []
    for entry in sys.path:
        folder = Path(entry or ".", *module.split(".")).resolve()
        if folder.is_dir() and not own.is_relative_to(folder):
            hidden.append(folder)
        other = folder.with_name(f"{folder.name}.py")
        if other.is_file() and not own.is_relative_to(folder) and other != own:
            hidden.append(other)
    if not hidden:
        return ""
    is_merged = Path(file).name == "__init__.py" and not (hidden[0] / "__init__.py").exists()
    if is_merged:
        return f" It hides {hidden[0]}: delete this __init__.py, and both folders are found; or rename the folder."
    return f" It hides {hidden[0]}: rename it."


def _names_in(parent: Any) -> list[str]:
    """Return the names in a module or class, its modules that aren't imported included; None: all modules there are."""
    if parent is None:
        return [module.name for module in pkgutil.iter_modules()]
    names = [name for name in dir(parent) if not name.startswith("_")]
    folders = getattr(parent, "__path__", None) or []
    return names + [module.name for module in pkgutil.iter_modules(folders)]

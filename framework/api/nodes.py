"""Python values as configuration: what has a name becomes a `_target_` node, anything else an object of the run.

A class or function that can be imported is named, with the arguments that a `functools.partial` binds. What is defined
in a script or notebook, or was made already, is pickled with the run, and named in `framework.config.objects`.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import pickle
import sys
from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter
from numbers import Integral, Real
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, final

from hydra.core.override_parser.types import Quote, QuotedString

from framework.config import objects
from framework.config.objects import Given
from framework.errors import ConfigError

OBJECTS = objects.__name__
BLANK = "blank"
"""The recipe without a model, data or task: what a call without a recipe starts from."""

_PLAIN = (bool, int, float, str, type(None))
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)


@final
class Nodes:
    """Makes the nodes of one call, and collects the objects that they refer to."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}

    def part(self, value: Any, *, key: str) -> dict[str, Any]:
        """Return the node of a part of a run: a class or function to call, a node already, or the object itself."""
        if isinstance(value, Mapping):
            return {name: self.value(item, key=f"{key}.{name}") for name, item in value.items()}
        if isinstance(value, (partial, type, *_FUNCTIONS)):
            return self._call(value, key=key)
        return self._object(value, key=key)

    def function(self, value: Any, *, key: str) -> dict[str, Any]:
        """Return the node of something that is called in every step, such as a loss: a class is made first."""
        if isinstance(value, _FUNCTIONS):
            node: dict[str, Any] = self.value(value, key=key)
            return node
        node = self.part(value, key=key)
        return {**node, "_partial_": True} if isinstance(getattr(value, "func", None), _FUNCTIONS) else node

    def value(self, value: Any, *, key: str) -> Any:
        """Return an argument as it is written in YAML: plain, or a node that gives exactly this value."""
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, Real):  # NumPy's numbers, too
            return int(value) if isinstance(value, Integral) else float(value)
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            return {name: self.value(item, key=f"{key}.{name}") for name, item in value.items()}
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return [self.value(item, key=f"{key}.{number}") for number, item in enumerate(value)]
        if isinstance(value, partial):
            return {**self._call(value, key=key), "_partial_": True}
        if isinstance(value, (type, *_FUNCTIONS)) and (name := importable_name(value)):
            return {"_target_": "hydra.utils.get_object", "path": name}
        return self._object(value, key=key)

    def pickled(self) -> bytes | None:
        """Return the objects that nodes refer to, or None. Raises ConfigError for one that can't be pickled."""
        import cloudpickle

        def dump(what: Any) -> bytes:
            content: bytes = cloudpickle.dumps(what)
            return content

        if not self._objects:
            return None
        try:
            return dump(self._objects)
        except Exception:  # a user's class may raise anything
            for name, value in self._objects.items():
                _check_pickles(name, value, dump)
            raise

    def _call(self, value: Any, *, key: str) -> dict[str, Any]:
        bound: partial[Any] = value if isinstance(value, partial) else partial(value)
        called: Any = bound.func
        node: dict[str, Any] = {
            "_target_": importable_name(called) or self._add(called, name=getattr(called, "__name__", key))
        }
        if bound.args:
            node["_args_"] = [self.value(item, key=f"{key}.{number}") for number, item in enumerate(bound.args)]
        return node | {name: self.value(item, key=f"{key}.{name}") for name, item in bound.keywords.items()}

    def _object(self, value: Any, *, key: str) -> dict[str, Any]:
        kind: Any = type(value)
        arguments = constructor_arguments(value)
        if arguments is not None:
            return self._call(partial(kind, **arguments), key=key)
        return {"_target_": self._add(Given(_on_cpu(value)), name=key.replace(".", "_"))}

    def _add(self, value: Any, *, name: str) -> str:
        """Keep the object under its name, or the next free one, and return the dotted name."""
        name = name if name.isidentifier() else "function"  # a lambda
        free, number = name, 1
        while free in self._objects and self._objects[free] is not value:
            number += 1
            free = f"{name}_{number}"
        self._objects[free] = value
        return f"{OBJECTS}.{free}"


def importable_name(value: Any) -> str | None:
    """Return the shortest dotted name by which any process can import `value`; None if there is none."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    root = str(module).partition(".")[0]
    if module is None or name is None or root == "__main__" or module not in sys.modules:
        return None
    if not _is_findable(root) or _attribute(module, name) != value:
        return None
    parts = module.split(".")
    prefixes = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    public = (prefix for prefix in prefixes if prefix in sys.modules and not prefix.rpartition(".")[2].startswith("_"))
    prefix = next((each for each in public if _attribute(each, name) == value), module)
    return f"{prefix}.{name}"


def constructor_arguments(value: Any) -> dict[str, Any] | None:
    """Return the arguments with which its class gives an equal object; None if they aren't known.

    Known are those of objects without attributes, and of modules without parameters that keep their arguments as
    attributes of the same name, as torch's losses do: one is made, and compared.
    """
    kind = type(value)
    if not inspect.isclass(kind) or importable_name(kind) is None:
        return None
    state = getattr(value, "__dict__", None)
    is_module = hasattr(value, "parameters") and hasattr(value, "register_buffer")
    if state is None or (state and not is_module) or (is_module and any(True for _ in value.parameters())):
        return None
    try:
        parameters = inspect.signature(kind).parameters.values()
        given = {each.name: getattr(value, each.name) for each in parameters if hasattr(value, each.name)}
        defaults = {each.name: each.default for each in parameters if each.default is not Parameter.empty}
        arguments = {name: item for name, item in given.items() if name not in defaults or item != defaults[name]}
        if not all(isinstance(item, _PLAIN) for item in arguments.values()):
            return None
        return arguments if pickle.dumps(kind(**arguments)) == pickle.dumps(value) else None
    except Exception:  # a class that can't be made so, or compared, may raise anything
        return None


def override_value(value: Any) -> str:
    """Return a plain value as Hydra's overrides write it: texts quoted, so that they stay texts."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return QuotedString(value.replace("${", "\\${"), Quote.single).with_quotes()
        case Mapping():
            return "{" + ", ".join(f"{_key(name)}: {override_value(item)}" for name, item in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(override_value, value)) + "]"
        case _:
            return repr(value)


def _key(name: str) -> str:
    return name if name.replace("_", "a").isalnum() else QuotedString(name, Quote.single).with_quotes()


def _is_findable(root: str) -> bool:
    try:
        return root in sys.builtin_module_names or importlib.util.find_spec(root) is not None
    except ValueError:  # a module that was made by hand
        return False


def _attribute(module: str, name: str) -> Any:
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _on_cpu(value: Any) -> Any:
    """Return a copy on the CPU of a module that is on another device: each rank moves it to its own."""
    parameters = getattr(value, "parameters", None)
    if callable(parameters) and hasattr(value, "cpu") and any(each.device.type != "cpu" for each in parameters()):
        return copy.deepcopy(value).cpu()
    return value


def _check_pickles(name: str, value: Any, dump: Callable[[Any], bytes]) -> None:
    try:
        dump(value)
    except Exception as error:
        kind = value.value if isinstance(value, Given) else value
        raise ConfigError(
            f"{name}: an object of {type(kind).__name__} can't be handed to the processes: {error}.\n"
            f"Pass a function that makes it, which each process calls: def make(): return {type(kind).__name__}(...)"
        ) from error

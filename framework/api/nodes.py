"""Turn Python values into configuration: `_target_` nodes.

An importable class or function is named, with the arguments that a `functools.partial` binds. An instance, or anything
defined in a script or notebook, is pickled into the run directory and named as `framework.config.objects.NAME`.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import io
import pickle
import re
import sys
from collections.abc import Collection, Mapping
from functools import partial
from inspect import Parameter
from numbers import Real
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, final

from framework.config import objects
from framework.config.objects import ObjectFactory
from framework.config.overrides import quoted
from framework.errors import ConfigError

OBJECTS = objects.__name__
BLANK = "blank"
"""The recipe without a model, data or task: what a call without a recipe starts from."""

_PLAIN = (bool, int, float, str, type(None))
KEY = re.compile(r"(?!(true|false|null|nan|inf)$)[a-z_][\w/.@%+* -]*", re.ASCII | re.IGNORECASE)
"""Names that Hydra's overrides take as they are."""

_DTYPE = "<class 'torch.dtype'>"
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)


@final
class Nodes:
    """Make the nodes of one call, and collect the objects that they refer to."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}

    def part(self, value: Any, *, key: str) -> dict[str, Any]:
        """Return the node of a part of a run: a class or function to call, a node already, or the object itself."""
        if isinstance(value, Mapping):
            return {name: self.value(item, key=f"{key}.{name}") for name, item in value.items()}
        if is_maker(value):
            return self._call(value, key=key)
        return self._object(value, key=key)

    def function(self, value: Any, *, key: str) -> dict[str, Any]:
        """Return the node of a callable, such as a loss: a function as it is, an instance of a class."""
        if isinstance(value, _FUNCTIONS):
            named: dict[str, Any] = self.value(value, key=key)
            return named
        node = self.part(value, key=key)
        # A partial of a function is called for each batch; one of a class makes an instance first.
        if isinstance(value, partial) and isinstance(value.func, _FUNCTIONS):
            node["_partial_"] = True
        return node

    def value(self, value: Any, *, key: str) -> Any:
        """Return an argument as YAML has it: a plain value, or a node that evaluates to exactly this value."""
        kind = type(value)
        if kind.__module__ == "numpy" and isinstance(value, Real):
            return value.item()  # type: ignore[attr-defined] # NumPy's numbers have it
        # OmegaConf would read these as an interpolation or a missing value.
        if kind is str and ("${" in value or value == "???"):
            return self._object(value, key=key)
        if kind in _PLAIN:
            return value
        if kind is dict and all(isinstance(name, str) and KEY.fullmatch(name) for name in value):
            return {name: self.value(item, key=f"{key}.{name}") for name, item in value.items()}
        if kind in (list, tuple):
            items = [self.value(item, key=f"{key}.{number}") for number, item in enumerate(value)]
            if kind is list:
                return items
            return {"_target_": "builtins.tuple", "_args_": [items]}
        if isinstance(value, partial):
            return {**self._call(value, key=key), "_partial_": True}

        name = None
        if is_maker(value):
            name = importable_name(value)
        elif str(kind) == _DTYPE:
            # torch.float32 is written `torch.float32`.
            name = str(value)
        if name is not None:
            return {"_target_": "framework.config.targets.get_object", "path": name}
        return self._object(value, key=key)

    def pickled(self) -> bytes | None:
        """Return the collected objects, pickled; None if there are none. Raises ConfigError for one that can't be."""
        if not self._objects:
            return None
        try:
            return _pickled(self._objects)
        # A user's class may raise anything.
        except Exception:
            for name, value in self._objects.items():
                _check_pickles(name, value)
            raise

    def _call(self, value: Any, *, key: str) -> dict[str, Any]:
        """Return the node that calls a class or function, with the arguments of a partial."""
        bound: partial[Any] = value if isinstance(value, partial) else partial(value)
        called: Any = bound.func
        target = importable_name(called)
        if target is None:
            target = self._add(called, name=getattr(called, "__name__", key))

        node: dict[str, Any] = {"_target_": target}
        if bound.args:
            node["_args_"] = [self.value(item, key=f"{key}.{number}") for number, item in enumerate(bound.args)]
        for name, item in bound.keywords.items():
            node[name] = self.value(item, key=f"{key}.{name}")
        return node

    def _object(self, value: Any, *, key: str) -> dict[str, Any]:
        """Return the node that makes an equal object, or the node of the pickled object."""
        kind: Any = type(value)
        arguments = constructor_arguments(value)
        if arguments is not None:
            return self._call(partial(kind, **arguments), key=key)
        return {"_target_": self._add(ObjectFactory(_on_cpu(value)), name=key.replace(".", "_"))}

    def _add(self, value: Any, *, name: str) -> str:
        """Keep the object under its name, or the next unused one, and return the dotted name."""
        # `<lambda>` is no identifier.
        if not name.isidentifier():
            name = "function"
        taken = [other_name for other_name, other in self._objects.items() if other is not value]
        name = unused_name(name, taken)
        self._objects[name] = value
        return f"{OBJECTS}.{name}"


def unused_name(name: str, taken: Collection[str]) -> str:
    """Return `name`, or the first of `name_2`, `name_3`, … that isn't taken."""
    candidate = name
    number = 2
    while candidate in taken:
        candidate = f"{name}_{number}"
        number += 1
    return candidate


def is_maker(value: Any) -> bool:
    """Return True for a class, function or partial, which makes a part of a run when it is called."""
    return isinstance(value, (partial, type, *_FUNCTIONS))


def importable_name(value: Any) -> str | None:
    """Return the shortest dotted name by which any process can import `value`; None if it has none."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    if module is None or name is None or module not in sys.modules:
        return None
    root = module.partition(".")[0]
    if root == "__main__" or not _is_findable(root) or _attribute(module, name) != value:
        return None

    # `torch.nn.Linear` for `torch.nn.modules.linear.Linear`.
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        package = ".".join(parts[:length])
        is_public = not parts[length - 1].startswith("_")
        if is_public and package in sys.modules and _attribute(package, name) == value:
            return f"{package}.{name}"
    return f"{module}.{name}"


def constructor_arguments(value: Any) -> dict[str, Any] | None:
    """Return constructor arguments that give an equal object; None if they can't be recovered.

    They can for objects without attributes, and for modules without parameters that keep their arguments as attributes
    of the same name, as torch's losses do. An object is made with them and compared.
    """
    kind = type(value)
    if not inspect.isclass(kind) or importable_name(kind) is None:
        return None
    attributes = getattr(value, "__dict__", None)
    if attributes is None:
        return None
    is_module = hasattr(value, "parameters") and hasattr(value, "register_buffer")
    if is_module and list(value.parameters()):
        return None
    if attributes and not is_module:
        return None
    try:
        arguments: dict[str, Any] = {}
        for name, parameter in inspect.signature(kind).parameters.items():
            if not hasattr(value, name):
                continue
            argument = getattr(value, name)
            if parameter.default is Parameter.empty or argument != parameter.default:
                arguments[name] = argument
        if not all(isinstance(argument, _PLAIN) for argument in arguments.values()):
            return None
        is_equal = pickle.dumps(kind(**arguments)) == pickle.dumps(value)
    # A class that can't be made so, or compared, may raise anything.
    except Exception:
        return None
    return arguments if is_equal else None


def override_value(value: Any) -> str:
    """Return a plain value in the syntax of Hydra's overrides; strings are quoted, so that they stay strings."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return quoted(value.replace("${", "\\${"))
        case Mapping():
            items = [f"{name}: {override_value(item)}" for name, item in value.items()]
            return "{" + ", ".join(items) + "}"
        case list() | tuple():
            return "[" + ", ".join(override_value(item) for item in value) + "]"
        case _:
            return str(value)


def _is_findable(root: str) -> bool:
    """Return True if any process can import this top-level module."""
    if root in sys.builtin_module_names:
        return True
    try:
        return importlib.util.find_spec(root) is not None
    # A module that was made by hand.
    except ValueError:
        return False


def _attribute(module: str, name: str) -> Any:
    """Return the attribute of a module, such as `Class.method`; None if there is none."""
    value: Any = sys.modules[module]
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _on_cpu(value: Any) -> Any:
    """Return the value; of a module on another device, a copy on the CPU. Each rank moves it to its own device."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.nn.Module):
        return value
    devices = {parameter.device.type for parameter in value.parameters()}
    if devices <= {"cpu", "meta"}:
        return value
    return copy.deepcopy(value).cpu()


def _pickled(value: Any) -> bytes:
    """Return the value pickled by cloudpickle; of a tensor that is a view, only the part it shows."""
    import cloudpickle

    torch = sys.modules.get("torch")

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, item: Any) -> Any:
            is_plain = torch is not None and type(item) is torch.Tensor and item.layout is torch.strided
            if is_plain and item.is_leaf and item.untyped_storage().nbytes() > item.nbytes:
                return item.clone().__reduce_ex__(self.proto)
            return super().reducer_override(item)

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _check_pickles(name: str, value: Any) -> None:
    """Raise ConfigError if the object can't be pickled."""
    try:
        _pickled(value)
    except Exception as error:
        given = value.value if isinstance(value, ObjectFactory) else value
        kind = type(given).__name__
        raise ConfigError(
            f"{name}: an object of {kind} can't be handed to the processes: {error}.\n"
            f"Pass a function that makes it, which each process calls: def make(): return {kind}(...)"
        ) from error

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
from itertools import chain, count
from numbers import Real
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, final

from hydra.core.override_parser.types import Quote, QuotedString

from framework.config import objects
from framework.config.objects import ObjectFactory
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
            node: dict[str, Any] = self.value(value, key=key)
            return node
        node = self.part(value, key=key)
        return {**node, "_partial_": True} if isinstance(getattr(value, "func", None), _FUNCTIONS) else node

    def value(self, value: Any, *, key: str) -> Any:
        """Return an argument as YAML has it: a plain value, or a node that evaluates to exactly this value."""
        kind = type(value)
        if kind.__module__ == "numpy" and isinstance(value, Real):
            return value.item()  # type: ignore[attr-defined] # of NumPy's numbers
        if kind is str and ("${" in value or value == "???"):  # OmegaConf would read them
            return self._object(value, key=key)
        if kind in _PLAIN:
            return value
        if kind is dict and all(isinstance(name, str) and KEY.fullmatch(name) for name in value):
            return {name: self.value(item, key=f"{key}.{name}") for name, item in value.items()}
        if kind in (list, tuple):
            items = [self.value(item, key=f"{key}.{number}") for number, item in enumerate(value)]
            return items if kind is list else {"_target_": "builtins.tuple", "_args_": [items]}
        if isinstance(value, partial):
            return {**self._call(value, key=key), "_partial_": True}
        name = importable_name(value) if is_maker(value) else str(value) if str(kind) == _DTYPE else None
        if name is not None:
            return {"_target_": "hydra.utils.get_object", "path": name}
        return self._object(value, key=key)

    def pickled(self) -> bytes | None:
        """Return the collected objects, pickled; None if there are none. Raises ConfigError for one that can't be."""
        if not self._objects:
            return None
        try:
            return _pickled(self._objects)
        except Exception:  # a user's class may raise anything
            for name, value in self._objects.items():
                _check_pickles(name, value)
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
        return {"_target_": self._add(ObjectFactory(_on_cpu(value)), name=key.replace(".", "_"))}

    def _add(self, value: Any, *, name: str) -> str:
        """Keep the object under its name, or the next unused one, and return the dotted name."""
        name = name if name.isidentifier() else "function"  # a lambda
        name = unused_name(name, [taken for taken, other in self._objects.items() if other is not value])
        self._objects[name] = value
        return f"{OBJECTS}.{name}"


def unused_name(name: str, taken: Collection[str]) -> str:
    """Return `name`, or the first of `name_2`, `name_3`, … that isn't taken."""
    return next(each for each in chain([name], (f"{name}_{number}" for number in count(2))) if each not in taken)


def is_maker(value: Any) -> bool:
    """Return True for a class, function or partial, which makes a part of a run when it is called."""
    return isinstance(value, (partial, type, *_FUNCTIONS))


def importable_name(value: Any) -> str | None:
    """Return the shortest dotted name by which any process can import `value`; None if it has none."""
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
    """Return constructor arguments that give an equal object; None if they can't be recovered.

    They can for objects without attributes, and for modules without parameters that keep their arguments as attributes
    of the same name, as torch's losses do. An object is made with them and compared.
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
    """Return a plain value in the syntax of Hydra's overrides; strings are quoted, so that they stay strings."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return QuotedString(value.replace("${", "\\${"), Quote.single).with_quotes()
        case Mapping():
            return "{" + ", ".join(f"{name}: {override_value(item)}" for name, item in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(override_value, value)) + "]"
        case _:
            return str(value)


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
    """Return the value; of a module on another device, a copy on the CPU. Each rank moves it to its own device."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.nn.Module):
        return value
    is_elsewhere = {each.device.type for each in value.parameters()} - {"cpu", "meta"}
    return copy.deepcopy(value).cpu() if is_elsewhere else value


def _pickled(value: Any) -> bytes:
    """Return the value pickled by cloudpickle; of a tensor that is a view, only the part it shows."""
    import cloudpickle

    torch = sys.modules.get("torch")

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, each: Any) -> Any:
            is_plain = torch is not None and type(each) is torch.Tensor and each.layout is torch.strided
            if is_plain and each.is_leaf and each.untyped_storage().nbytes() > each.nbytes:
                return each.clone().__reduce_ex__(self.proto)
            return super().reducer_override(each)

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _check_pickles(name: str, value: Any) -> None:
    try:
        _pickled(value)
    except Exception as error:
        kind = value.value if isinstance(value, ObjectFactory) else value
        raise ConfigError(
            f"{name}: an object of {type(kind).__name__} can't be handed to the processes: {error}.\n"
            f"Pass a function that makes it, which each process calls: def make(): return {type(kind).__name__}(...)"
        ) from error

"""Import `torch._dynamo` only once something is compiled.

What it saves: 1.3 s of CPU time in each rank (torch 2.14). A training of one step of `recipe=toy`, from the command to
its end, took 5.7 s instead of 7.0 s with one rank, and 11.4 s instead of 22.8 s with two: medians of 9 and of 7
alternating starts on two busy cores. With the import in the fork server it took 5.7 s and 20.2 s.

How: optimizers, DDP's constructor and `init_process_group` import it only to mark what a compiler must leave alone.
Until something is compiled, the module exists without having been executed, and answers those few calls. Anything else
that is asked of it, also by a later version of torch, executes it first.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import FunctionType, ModuleType
from typing import Any, ClassVar, final

_NAME = "torch._dynamo"
_DISABLE_CACHE = "__dynamo_disable"
"""The attribute of a function in which torch caches the answer of `disable`."""


def import_dynamo_late() -> None:
    """Have this process import `torch._dynamo` late, unless it is imported already."""
    if _NAME in sys.modules:
        return
    spec = find_spec(_NAME)
    if spec is None:
        return
    module = module_from_spec(spec)
    module.__class__ = _LateDynamo
    sys.modules[_NAME] = module
    vars(sys.modules["torch"])["_dynamo"] = module
    sys.meta_path.insert(0, _Finder())


@final
class _Part:
    """Stands in for a module of `torch._dynamo`: it has `answers`; any other attribute is the real module's."""

    def __init__(self, name: str, **answers: Any) -> None:
        vars(self).update(answers, name=name)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(vars(self)["name"]), name)


@final
class _LateDynamo(ModuleType):
    """The class of `torch._dynamo` until it is executed."""

    utils = _Part(f"{_NAME}.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
    trace_rules = _Part(f"{_NAME}.trace_rules", clear_lru_cache=lambda: None)
    # The functions whose `disable` was answered here, which torch has cached.
    answered: ClassVar[list[FunctionType]] = []

    def graph_break(self) -> None:
        """Do nothing: nothing is compiled yet."""

    def disable(self, fn: Callable[..., Any] | None = None, *arguments: Any, **settings: Any) -> Any:
        # Torch calls this once for each of its own functions. Other callers may keep what they get forever.
        if isinstance(fn, FunctionType) and settings.get("wrapping") is False:
            self.answered.append(fn)
            return fn
        return importlib.import_module(f"{_NAME}.decorators").disable(fn, *arguments, **settings)

    def __getattr__(self, name: str) -> Any:
        # Inspection tools look at these in all modules.
        if name.startswith("__"):
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
        importlib.import_module(f"{_NAME}.decorators")
        return getattr(self, name)


@final
class _Finder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Execute the package before its first module is imported, and have torch repeat what was answered here."""
        if not name.startswith(f"{_NAME}."):
            return None
        sys.meta_path.remove(self)
        package: Any = sys.modules[_NAME]
        package.__class__ = ModuleType
        for function in _LateDynamo.answered:
            vars(function).pop(_DISABLE_CACHE, None)
        package.__loader__.exec_module(package)
        # Executing the package may have imported the module.
        if name in sys.modules:
            return ModuleSpec(name, _Loaded(sys.modules[name]))
        return None


@final
class _Loaded(Loader):
    """The loader of a loaded module, which the import system would execute again by the module's own spec."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__
        # The import system would prefer the module's own spec. Some modules refuse to set attributes, so in `vars`.
        vars(module)["__spec__"] = None

    def create_module(self, _: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__spec__"] = self._spec

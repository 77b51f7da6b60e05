"""Import `torch._dynamo` only once something is compiled.

It takes as long to import as the rest of torch, in each process, which is half of the start-up time of a plain script
with an optimizer (docs/speed.md; `python -m benchmarks --only start_up`). Optimizers, DDP's constructor and
`init_process_group` import it only to mark what a compiler must leave alone. Until something is compiled, the module
exists without having been executed, and answers those few calls. Anything else that is asked of it, also by a later
version of torch, executes it first.
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
_DISABLE_CACHE = "__dynamo_disable"  # the attribute in which torch caches the answer


def import_dynamo_late() -> None:
    """Have this process import `torch._dynamo` late, unless it is imported already."""
    spec = None if _NAME in sys.modules else find_spec(_NAME)
    if spec is not None:
        module = sys.modules[_NAME] = module_from_spec(spec)
        module.__class__ = _LateDynamo
        vars(sys.modules["torch"])["_dynamo"] = module
        sys.meta_path.insert(0, _Finder())


@final
class _Part:
    """Stands in for a module of `torch._dynamo`: has `answers`; anything else is the real one's."""

    def __init__(self, name: str, **answers: Any) -> None:
        vars(self).update(answers, name=name)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(vars(self)["name"]), name)


@final
class _LateDynamo(ModuleType):
    """The class of `torch._dynamo` until it is executed."""

    utils = _Part(f"{_NAME}.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
    trace_rules = _Part(f"{_NAME}.trace_rules", clear_lru_cache=lambda: None)
    answered: ClassVar[list[FunctionType]] = []  # whose `disable` torch has cached

    def graph_break(self) -> None:
        """Do nothing: nothing is compiled yet."""

    def disable(self, fn: Callable[..., Any] | None = None, *arguments: Any, **settings: Any) -> Any:
        # Torch's calls for its own functions, one for each. Other callers may keep what they get forever.
        if isinstance(fn, FunctionType) and settings.get("wrapping") is False:
            self.answered.append(fn)
            return fn
        return importlib.import_module(f"{_NAME}.decorators").disable(fn, *arguments, **settings)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # inspection tools look at these in all modules
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
        return ModuleSpec(name, _Loaded(sys.modules[name])) if name in sys.modules else None


@final
class _Loaded(Loader):
    """The loader of a loaded module, which the import system would execute again by the module's own spec."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__
        vars(module)["__spec__"] = None  # the import system would prefer it; some modules refuse to set attributes

    def create_module(self, _: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__spec__"] = self._spec

"""Import `torch._dynamo` only once something is compiled.

It takes as long to import as the rest of torch, in each process, which is half of the start-up time of a plain script
with an optimizer (docs/speed.md; `python -m benchmarks --only start_up`). Optimizers, DDP's constructor and
`init_process_group` import it only to mark what a compiler must leave alone. Until something is compiled a stand-in
module answers those few calls. Anything else that is asked of it, also by a later version of torch, imports the real
module, which then answers as if it had been there from the start.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any, final

_NAME = "torch._dynamo"
_DISABLE_CACHE = "__dynamo_disable"  # the attribute in which torch caches the answer


@contextmanager
def late_dynamo() -> Iterator[None]:
    """Import `torch._dynamo` late while this is entered, unless it is imported already."""
    if _NAME in sys.modules:
        yield
        return
    replacement = _Replacement()
    try:
        yield
    finally:
        replacement.remove()


@final
class _Replacement:
    """Has stand-ins in the place of `torch._dynamo` until `remove`, and sees when one of its modules is imported."""

    def __init__(self) -> None:
        self._disabled: list[FunctionType] = []  # whose `disable` torch has cached
        spec = importlib.util.find_spec(_NAME)
        assert spec is not None
        own = {
            "graph_break": lambda: None,
            "disable": self._disable,
            "utils": _StandIn(f"{_NAME}.utils", self, get_optimize_ddp_mode=lambda: "ddp_optimizer"),
            "trace_rules": _StandIn(f"{_NAME}.trace_rules", self, clear_lru_cache=lambda: None),
        }
        self._torch = importlib.import_module("torch")
        self._stand_in = _StandIn(_NAME, self, **own, __spec__=spec, __path__=spec.submodule_search_locations)
        sys.modules[_NAME] = vars(self._torch)["_dynamo"] = self._stand_in
        sys.meta_path.insert(0, self)

    def _disable(self, fn: Callable[..., Any] | None = None, *arguments: Any, **settings: Any) -> Any:
        # Torch's calls for its own functions, one for each. Other callers may keep what they get forever.
        is_late = sys.modules.get(_NAME) is self._stand_in
        if is_late and isinstance(fn, FunctionType) and settings.get("wrapping") is False:
            self._disabled.append(fn)
            return fn
        return self.real(_NAME).disable(fn, *arguments, **settings)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Import the real package before one of its modules is imported by name."""
        if not name.startswith(f"{_NAME}."):
            return None
        self.real(_NAME)
        return ModuleSpec(name, _Loaded(sys.modules[name])) if name in sys.modules else None

    def real(self, name: str) -> ModuleType:
        """Return the real module, importing it if necessary."""
        self.remove()
        return importlib.import_module(name)

    def remove(self) -> None:
        """Make way for the real module, and have torch repeat the calls to it that were answered here."""
        if sys.modules.get(_NAME) is self._stand_in:
            del sys.modules[_NAME], vars(self._torch)["_dynamo"]
            sys.meta_path.remove(self)
        for function in self._disabled:
            vars(function).pop(_DISABLE_CACHE, None)
        self._disabled.clear()


@final
class _StandIn(ModuleType):
    """Stands in for `torch._dynamo` or one of its modules: has `own`; anything else is the real one's."""

    def __init__(self, name: str, replacement: _Replacement, **own: Any) -> None:
        super().__init__(name)
        vars(self).update(own, replacement=replacement)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # inspection tools look at these in all modules
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(vars(self)["replacement"].real(self.__name__), name)


@final
class _Loaded(Loader):
    """The loader of a loaded module, which the import system would execute again by the module's own spec."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, _: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__spec__"] = self._spec

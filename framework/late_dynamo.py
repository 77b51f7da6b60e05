"""`torch._dynamo` is imported when something asks for what it does, not when something names it.

It costs as much to import as the rest of torch, in each process. Optimizers, DDP's constructor and
`init_process_group` import it only to say what a compiler must leave alone. Until something is compiled there is
nothing to say: a module in its place answers those few calls. Any other question to it imports the real one and
answers from there, and from then on all is as if that had been there from the start.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any, final

_NAME = "torch._dynamo"
_ANSWER_OF_DISABLE = "__dynamo_disable"  # where torch keeps it, on the function that it asked for


@contextmanager
def late_dynamo() -> Iterator[None]:
    """While this is entered, `torch._dynamo` is imported late, unless it is there already."""
    if _NAME in sys.modules:
        yield
        return
    stand_in = _dynamo()
    try:
        yield
    finally:
        stand_in.place.leave()


@final
class _Finder:
    """For modules in `torch._dynamo` that are imported by name: the package brings them in, and none comes twice."""

    def __init__(self, place: _Place) -> None:
        self._place = place

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(f"{_NAME}."):
            return None
        self._place.leave()
        importlib.import_module(_NAME)
        module = sys.modules.get(name)
        if module is None:
            return None
        # Import takes the spec of a module that has come meanwhile, and would load it anew by its own.
        loader: Any = _Loaded(module)
        found = vars(module)["__spec__"] = ModuleSpec(name, loader)
        return found


@final
class _Loaded:
    """A loader of what is loaded; gives it its own spec back."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, _: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__spec__"] = self._spec  # not by `setattr`: modules of settings take no others


@final
class _Place:
    """What `torch._dynamo` is: the stand-in, until `leave`."""

    def __init__(self) -> None:
        self.answered: list[FunctionType] = []  # those that torch has asked to disable, and keeps the answers of
        self.stand_in: ModuleType | None = None
        self._finder = _Finder(self)

    def take(self, stand_in: ModuleType) -> None:
        sys.modules[_NAME] = self.stand_in = stand_in
        sys.meta_path.insert(0, self._finder)
        importlib.import_module("torch")._dynamo = stand_in  # type: ignore[attr-defined]

    def leave(self) -> None:
        """Make way for the real one. Torch asks it again what it was answered."""
        torch = sys.modules["torch"]
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        if sys.modules.get(_NAME) is self.stand_in:
            del sys.modules[_NAME]
        if vars(torch).get("_dynamo") is self.stand_in:
            del torch._dynamo
        for function in self.answered:
            vars(function).pop(_ANSWER_OF_DISABLE, None)
        self.answered.clear()


@final
class _StandIn(ModuleType):
    """In the place of a module of `torch._dynamo`, or of itself: has `own`, the rest is the real one's."""

    def __init__(self, name: str, place: _Place, **own: Any) -> None:
        super().__init__(name)
        self.__dict__.update(own, place=place)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # tools look through the specials of all modules
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(_real(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_real(self), name, value)


def _real(stand_in: _StandIn) -> ModuleType:
    """The real one, imported now unless it has been."""
    stand_in.place.leave()
    return importlib.import_module(stand_in.__name__)


def _dynamo() -> _StandIn:
    """The stand-in for the whole package, in its place."""
    place = _Place()

    def still_late() -> bool:
        return sys.modules.get(_NAME) is stand_in

    def graph_break(msg: str = "") -> None:
        if not still_late():
            _real(stand_in).graph_break(msg)

    def disable(fn: Callable[..., Any] | None = None, *arguments: Any, **settings: Any) -> Any:
        # So torch asks for a function of its own, and once; anybody else may keep the answer for good.
        if still_late() and isinstance(fn, FunctionType) and settings.get("wrapping") is False:
            place.answered.append(fn)
            return fn
        return _real(stand_in).disable(fn, *arguments, **settings)

    def get_optimize_ddp_mode() -> str:
        return "ddp_optimizer" if still_late() else str(_real(utils).get_optimize_ddp_mode())

    def clear_lru_cache() -> None:
        if not still_late():
            _real(trace_rules).clear_lru_cache()

    utils = _StandIn(f"{_NAME}.utils", place, get_optimize_ddp_mode=get_optimize_ddp_mode)
    trace_rules = _StandIn(f"{_NAME}.trace_rules", place, clear_lru_cache=clear_lru_cache)
    spec = importlib.util.find_spec(_NAME)
    assert spec is not None
    about: dict[str, Any] = {"__spec__": spec, "__loader__": spec.loader, "__package__": _NAME, "__file__": spec.origin}
    about["__path__"] = list(spec.submodule_search_locations or ())
    own = {"graph_break": graph_break, "disable": disable, "utils": utils, "trace_rules": trace_rules}
    stand_in = _StandIn(_NAME, place, **own, **about)
    place.take(stand_in)
    return stand_in

"""Methods of callbacks and loggers that nothing would call: misspelt hooks. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches

from framework.config import source
from framework.config.schema import Node
from framework.config.suggest import did_you_mean, nearest
from framework.types import Callback, Logger

# A name at least this similar to that of a hook is taken for a misspelt one: `flushh`, `load_statedict`.
_MISSPELT = 0.85


def methods_of(cls: type) -> list[str]:
    """Return the names of the public methods that a class itself defines."""
    return [name for name, value in vars(cls).items() if callable(value) and not name.startswith("_")]


def is_misspelt(name: str, hooks: Collection[str], *, is_own: bool) -> bool:
    """Return True for a method that looks like a hook and is none. is_own: of a subclass of the hooks' base."""
    if name.startswith("_") or name in hooks:
        return False
    return name.startswith("on_") or (is_own and bool(get_close_matches(name, hooks, n=1, cutoff=_MISSPELT)))


def misspelt_hook(key: str, target: str, name: str, hooks: Collection[str]) -> str:
    """Return the message for a misspelt hook."""
    return f"{key}: {target}.{name} isn't a hook and would never be called.{did_you_mean(nearest(name, hooks))}"


def observer_mistakes(callbacks: Mapping[str, Node], loggers: Mapping[str, Node]) -> Iterator[str]:
    """Yield the misspelt hooks that the sources of subclasses of `Callback` and `Logger` show."""
    for section, nodes, base in (("callbacks", callbacks, Callback), ("logger", loggers, Logger)):
        hooks = methods_of(base)
        for name, node in nodes.items():
            methods = _own_methods(node["_target_"], base)
            # A logger without it is one of earlier versions, for which the ranks have an answer of its own.
            if base is Logger and "log" not in methods:
                continue
            for method in methods:
                if is_misspelt(method, hooks, is_own=True):
                    yield misspelt_hook(f"{section}.{name}", node["_target_"], method, hooks)


def _own_methods(target: str, base: type) -> list[str]:
    """Return the methods that a class and its bases below `base` define; none if it isn't certainly a subclass."""
    found = source.look_up(target)
    classes = source.lineage(found) if isinstance(found, source.SourceClass) else None
    places = [owner.name for owner in classes or ()]
    base_name = f"{base.__module__}.{base.__qualname__}"
    if classes is None or base_name not in places or not source.is_ordinary(found):
        return []
    names: list[str] = []
    for owner in classes[: places.index(base_name)]:
        names += source.methods(owner.node)
    return names

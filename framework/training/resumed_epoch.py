"""Which callbacks are called when a resumed run continues in the middle of an epoch.

`on_train_epoch_start` was called when the epoch began. What it set up in the model may be lost with that process; what
it changed in the optimizer is in the checkpoint, and must not be changed again. Only the callback knows: it is called
if it can tell the two apart, that is, if the hook looks at `report.resumed`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from framework.data.object_graph import names_in


def looks_at_resumed(hook: Callable[..., Any]) -> bool:
    """Return True if the hook, or a method or function of the same module that it calls, has the name `resumed`."""
    function = inspect.unwrap(hook)
    owner = getattr(hook, "__self__", None)
    waiting = [getattr(function, "__func__", function)]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen or not isinstance(each, FunctionType):
            continue
        seen.add(id(each))
        names = set(names_in(each.__code__))
        if "resumed" in names:
            return True
        for name in names:
            neighbour = each.__globals__.get(name)
            if getattr(neighbour, "__module__", None) == each.__module__:
                waiting.append(neighbour)
            waiting += [vars(kind).get(name) for kind in type(owner).__mro__]
    return False

"""Call the target of a node of the configuration, and refuse what it must not return."""

from __future__ import annotations

import re
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from framework.config.schema import Node
from framework.config.targets import takes
from framework.errors import DataError, FrameworkError, TargetError


def build_object(key: str, node: Node, *args: Any, **offered: Any) -> Any:
    """Build what is inside the node through Hydra, then call its target.

    In two steps, since Hydra would copy arguments into config containers. Targets get all containers as plain lists and
    dicts: a ListConfig in an optimizer's state would make its checkpoint unreadable.

    offered: keywords that the target gets if it takes them and the node doesn't set them.
    """
    supplied = {name: value for name, value in offered.items() if name not in node and takes(node, name)}
    try:
        factory = instantiate({"_convert_": "all", **node, "_partial_": True})
        return factory(*args, **supplied)
    except Exception as raised:
        place = key
        error: BaseException = raised
        if isinstance(raised, InstantiationException):
            if raised.__cause__ is None:
                # Hydra itself refuses the node.
                raise TargetError(f"{key}: {raised}") from raised
            # Hydra wraps what a target inside the node raised.
            error = raised.__cause__
            inner = re.search(r"^full_key: (\S+)$", str(raised), flags=re.MULTILINE)
            if inner is not None:
                place = f"{key}.{inner[1]}"

    # Raised outside the handler, so that the error keeps its context. A DataError already says where data is missing
    # or wrong.
    if not isinstance(error, DataError):
        _add_line(error, f"While building {place} ({node['_target_']}).")
    raise error


def _add_line(error: BaseException, line: str) -> None:
    # Notes came with Python 3.11.
    if isinstance(error, FrameworkError) or not hasattr(error, "add_note"):
        error.args = (f"{error}\n{line}",)
    else:
        error.add_note(line)


def wrong_result(key: str, node: Node, result: Any, *, expected: str) -> TargetError:
    """Return the error for a target that returned something else."""
    return TargetError(f"{key}: {node['_target_']} returned {described(result)}. It must return {expected}.")


def described(result: Any) -> str:
    """Return what kind of object it is, for an error."""
    if result is None:
        return "None"
    kind = type(result)
    return f"an object of type {kind.__module__}.{kind.__qualname__}"

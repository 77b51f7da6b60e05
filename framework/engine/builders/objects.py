"""Call the target of a node of the configuration, and refuse what it must not return."""

from __future__ import annotations

from typing import Any

from framework.config.instantiate import bind, call_target
from framework.config.schema import Node
from framework.config.targets import takes
from framework.errors import TargetError


def build_object(key: str, node: Node, *args: Any, **offered: Any) -> Any:
    """Build what is inside the node, then call its target.

    offered: keywords that the target gets if it takes them and the node doesn't set them.
    """
    supplied = {name: value for name, value in offered.items() if name not in node and takes(node, name)}
    return call_target(node, bind(node, key=key), *args, key=key, **supplied)


def wrong_result(key: str, node: Node, result: Any, *, expected: str) -> TargetError:
    """Return the error for a target that returned something else."""
    return TargetError(f"{key}: {node['_target_']} returned {described(result)}. It must return {expected}.")


def described(result: Any) -> str:
    """Return what kind of object it is, for an error."""
    if result is None:
        return "None"
    kind = type(result)
    return f"an object of type {kind.__module__}.{kind.__qualname__}"

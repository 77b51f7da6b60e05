"""Build the strategy, and check that callbacks can go with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from framework.config.schema import Node
from framework.config.targets import import_target
from framework.distributed.context import Context
from framework.engine.builders.objects import build_object, wrong_result
from framework.errors import ConfigError
from framework.strategies.base import Strategy
from framework.strategies.callback_rules import CallbackTraits, misfits
from framework.types import Callback


def build_strategy(node: Node, *, context: Context) -> Strategy:
    strategy = build_object("strategy", node, context=context)
    if not isinstance(strategy, Strategy):
        raise wrong_result("strategy", node, strategy, expected="an instance of framework.Strategy: inherit from it")
    return strategy


def check_callbacks_fit(nodes: Mapping[str, Node], strategy: Strategy) -> None:
    """Raise ConfigError for a callback that can't go with the strategy.

    A callback needs of the ranks:

    - with `evaluation_weights`: whole models
    - with `compares_replicas`: whole and equal models
    - with `averages_buffers_by`, unless that keyword is false: equal buffers
    """
    for name, node in nodes.items():
        _check_fit(name, import_target(node["_target_"]), node, strategy)


def check_built_callbacks(callbacks: Mapping[str, Callback], strategy: Strategy) -> None:
    """Raise ConfigError, as `check_callbacks_fit`, for callbacks that aren't in the configuration."""
    for name, callback in callbacks.items():
        _check_fit(name, type(callback), vars(callback), strategy)


def _check_fit(name: str, target: Any, keywords: Mapping[str, Any], strategy: Strategy) -> None:
    """Raise ConfigError if a callback of the class `target` can't go with the strategy."""
    hook = getattr(target, "evaluation_weights", None)
    traits = CallbackTraits(
        compares_replicas=getattr(target, "compares_replicas", None),
        averages_buffers_by=getattr(target, "averages_buffers_by", None),
        keeps_weights=hook is not None and hook is not Callback.evaluation_weights,
    )
    for mistake in misfits(name, keywords, traits, strategy, kind=type(strategy).__name__):
        raise ConfigError(mistake)

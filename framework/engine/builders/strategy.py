"""Build the strategy, and check that callbacks can go with it."""

from __future__ import annotations

from collections.abc import Mapping

from framework.config.schema import Node
from framework.config.targets import import_target
from framework.distributed.context import Context
from framework.engine.builders.objects import build_object, wrong_result
from framework.errors import ConfigError
from framework.strategies.base import Strategy
from framework.types import Callback


def build_strategy(node: Node, *, context: Context) -> Strategy:
    strategy = build_object("strategy", node, context=context)
    if not isinstance(strategy, Strategy):
        raise wrong_result("strategy", node, strategy, expected="an instance of framework.Strategy: inherit from it")
    return strategy


def check_callbacks_fit(nodes: Mapping[str, Node], strategy: Strategy) -> None:
    """Raise ConfigError for a callback that can't go with the strategy.

    One with `evaluation_weights` needs whole models, one with `compares_replicas` equal and whole ones, and one that
    averages buffers (unless its keyword `averages_buffers_by` is false) equal buffers.
    """
    kind = type(strategy).__name__
    for name, node in nodes.items():
        target = import_target(node["_target_"])
        comparing = getattr(target, "compares_replicas", None)
        if strategy.replicas_differ and comparing is not None:
            raise ConfigError(
                f"{comparing} compares what each process has after every step with what one process has, and under "
                f"{kind} each has gradients and weights of its own between two averages.\n"
                "Compare with strategy=allreduce: everything else that depends on the number of processes is the same."
            )
        if strategy.num_stages is not None and comparing is not None:
            raise ConfigError(
                f"strategy={kind.lower()} can't go with {comparing}: it compares what whole models compute, and no "
                "process has one.\nUse strategy=ddp, which gives the same weights as a pipeline."
            )
        keyword = getattr(target, "averages_buffers_by", None)
        has_own_buffers = strategy.buffers_differ and not strategy.replicas_differ
        if has_own_buffers and keyword is not None and node.get(keyword, True):
            raise ConfigError(
                f"callbacks.{name} averages buffers (BatchNorm's statistics) too, and strategy.broadcast_buffers=false "
                "leaves each process its own: a checkpoint has the first one's average, and a resumed run would "
                f"evaluate with that on all.\nUse callbacks.{name}.{keyword}=false, with which each process evaluates "
                "with the buffers it has, or strategy.broadcast_buffers=true."
            )
        hook = getattr(target, "evaluation_weights", None)
        if strategy.forward_communicates and hook is not None and hook is not Callback.evaluation_weights:
            raise ConfigError(
                f"callbacks.{name} keeps a whole copy of the model to evaluate, and strategy={kind.lower()} leaves no "
                f"rank with a whole one.\nLeave the callback out (~callbacks.{name}), or use strategy=ddp."
            )

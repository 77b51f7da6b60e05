"""Which callbacks, adapters and checkpoints can go with which strategies.

Needs no torch: what decides it is read from the classes' sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

from framework.config import source
from framework.config.schema import Config, Node
from framework.strategies.rules import StrategyRules


class CallbackTraits(NamedTuple):
    """What decides with which strategies a callback can go: attributes of its class."""

    # What it compares after every step with what one process has, for messages; None: nothing.
    compares_replicas: str | None
    # Its keyword that has it average buffers, which is true by default; None: it averages none.
    averages_buffers_by: str | None
    # It keeps weights of its own to evaluate: it has the hook `evaluation_weights`.
    keeps_weights: bool


class Replicas(Protocol):
    """How a strategy keeps replicas: what `Strategy` and `StrategyRules` both say."""

    @property
    def forward_communicates(self) -> bool: ...
    @property
    def num_stages(self) -> int | None: ...
    @property
    def buffers_differ(self) -> bool: ...
    @property
    def replicas_differ(self) -> bool: ...


def weight_mistakes(config: Config, strategy: Replicas, *, kind: str) -> Iterator[str]:
    """Yield why adapters or small checkpoints can't go with the strategy. kind: the name of its class."""
    name = f"strategy={kind.lower()}"
    if config.peft is not None and strategy.num_stages is not None:
        yield f"peft can't go with {name}, which cuts the model into stages. Use strategy=ddp or fsdp."
    if config.checkpoint.only_trained and strategy.forward_communicates:
        yield (
            f"checkpoint.only_trained=true can't go with {name}: the files of its checkpoints have a part of every "
            "weight. Use strategy=ddp, or checkpoint.only_trained=false."
        )


def callback_mistakes(nodes: Mapping[str, Node], rules: StrategyRules, *, target: str) -> Iterator[str]:
    """Yield which callbacks can't go with the strategy `target`, as far as their sources show it."""
    kind = target.rpartition(".")[2]
    for name, node in nodes.items():
        found = source.look_up(node["_target_"])
        classes = source.lineage(found) if isinstance(found, source.SourceClass) else None
        if classes is None:
            continue
        traits = CallbackTraits(
            compares_replicas=source.constant(classes, "compares_replicas"),
            averages_buffers_by=source.constant(classes, "averages_buffers_by"),
            keeps_weights=any(
                source.defines(owner, "evaluation_weights") and owner.name != "framework.types.Callback"
                for owner in classes
            ),
        )
        yield from misfits(name, node, traits, rules, kind=kind)


def misfits(name: str, node: Node, traits: CallbackTraits, strategy: Replicas, *, kind: str) -> Iterator[str]:
    """Yield why the callback `name` can't go with the strategy. kind: the name of the strategy's class."""
    comparing = traits.compares_replicas
    if strategy.replicas_differ and comparing is not None:
        yield (
            f"{comparing} compares what each process has after every step with what one process has, and under "
            f"{kind} each has gradients and weights of its own between two averages.\n"
            "Compare with strategy=allreduce: everything else that depends on the number of processes is the same."
        )
    if strategy.num_stages is not None and comparing is not None:
        yield (
            f"strategy={kind.lower()} can't go with {comparing}: it compares what whole models compute, and no "
            "process has one.\nUse strategy=ddp, which gives the same weights as a pipeline."
        )
    keyword = traits.averages_buffers_by
    has_own_buffers = strategy.buffers_differ and not strategy.replicas_differ
    if has_own_buffers and keyword is not None and node.get(keyword, True):
        yield (
            f"callbacks.{name} averages buffers (BatchNorm's statistics) too, and strategy.broadcast_buffers=false "
            "leaves each process its own: a checkpoint has the first one's average, and a resumed run would "
            f"evaluate with that on all.\nUse callbacks.{name}.{keyword}=false, with which each process evaluates "
            "with the buffers it has, or strategy.broadcast_buffers=true."
        )
    if strategy.forward_communicates and traits.keeps_weights:
        yield (
            f"callbacks.{name} keeps a whole copy of the model to evaluate, and strategy={kind.lower()} leaves no "
            f"rank with a whole one.\nLeave the callback out (~callbacks.{name}), or use strategy=ddp."
        )

"""Nodes, GPUs and processes: pure arithmetic, without torch.

L = processes per node, G = GPUs used per node, n = span: GPUs of one process. Local rank l owns GPUs [l·n, (l+1)·n).
"""

from __future__ import annotations

from dataclasses import dataclass

from framework.config.schema import TopologyConfig
from framework.errors import TopologyError


@dataclass(frozen=True)
class Topology:
    """Who is where. With `gpus_per_node` 0, a process owns the CPU `span` times."""

    nnodes: int
    procs_per_node: int
    gpus_per_node: int
    span: int

    @property
    def world_size(self) -> int:
        return self.nnodes * self.procs_per_node

    def ranks(self) -> range:
        return range(self.world_size)

    def rank_of(self, node: int, local_rank: int) -> int:
        """Ranks are numbered node by node. Raises TopologyError for a place that doesn't exist."""
        if not 0 <= node < self.nnodes:
            raise TopologyError(f"There is no node {node}: nodes are 0 to {self.nnodes - 1}.")
        self._check_local_rank(local_rank)
        return node * self.procs_per_node + local_rank

    def device_indices(self, local_rank: int) -> tuple[int, ...]:
        """The GPUs of a local rank, counted among those the node's processes see; empty without GPUs: the CPU."""
        self._check_local_rank(local_rank)
        if self.gpus_per_node == 0:
            return ()
        return tuple(range(local_rank * self.span, (local_rank + 1) * self.span))

    def _check_local_rank(self, local_rank: int) -> None:
        if not 0 <= local_rank < self.procs_per_node:
            raise TopologyError(f"There is no local rank {local_rank}: they are 0 to {self.procs_per_node - 1}.")


def resolve_topology(settings: TopologyConfig, *, gpus: int) -> Topology:
    """Fill in what the settings leave open, for `gpus` GPUs used per node (0: the CPU).

    Raises TopologyError where processes, span and GPUs don't fit, or the span is smaller than the model needs.
    """
    procs, span = settings.procs_per_node, settings.gpus_per_process
    least = settings.min_gpus_per_process
    if span is not None and span < least:
        raise TopologyError(
            f"topology.gpus_per_process={span} is less than the model needs: topology.min_gpus_per_process={least}."
        )
    if gpus == 0:
        return Topology(nnodes=settings.nnodes, procs_per_node=procs or 1, gpus_per_node=0, span=span or least)
    if gpus < least:
        raise TopologyError(
            f"trainer.gpus={gpus} is less than one process needs: topology.min_gpus_per_process={least}.\n"
            f"Use trainer.gpus={least} or a multiple of it, or trainer.gpus=0 to train on the CPU."
        )
    if procs is None:
        span = span or least
        procs = _procs_for(span, gpus=gpus, given=settings.gpus_per_process is not None)
    elif span is None:
        span = _span_for(procs, gpus=gpus, least=least)
    elif procs * span != gpus:
        raise TopologyError(
            f"topology.procs_per_node={procs} times topology.gpus_per_process={span} is {procs * span} GPUs, "
            f"but trainer.gpus={gpus}.\n"
            f"Use trainer.gpus={procs * span}, or leave one of the two out (auto)."
        )
    return Topology(nnodes=settings.nnodes, procs_per_node=procs, gpus_per_node=gpus, span=span)


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _procs_for(span: int, *, gpus: int, given: bool) -> int:
    if gpus % span == 0:
        return gpus // span
    if given:
        raise TopologyError(
            f"topology.gpus_per_process={span} doesn't divide trainer.gpus={gpus}. "
            f"Use one of {_listed(divisors(gpus))}."
        )
    ways = f"Use trainer.gpus={gpus // span * span} or {(gpus // span + 1) * span}"
    raise TopologyError(
        f"trainer.gpus={gpus} can't be dealt to processes of {span} GPUs each (topology.min_gpus_per_process={span}).\n"
        f"{ways}, or topology.procs_per_node=1 to give one process all {gpus}."
    )


def _span_for(procs: int, *, gpus: int, least: int) -> int:
    fitting = _listed([d for d in divisors(gpus) if gpus // d >= least])
    if gpus % procs:
        raise TopologyError(
            f"topology.procs_per_node={procs} doesn't divide trainer.gpus={gpus}. Use one of {fitting}.\n"
            f"For processes on the CPU: trainer.gpus=0 topology.procs_per_node={procs}"
        )
    if gpus // procs < least:
        raise TopologyError(
            f"topology.procs_per_node={procs} leaves {gpus // procs} of trainer.gpus={gpus} to each process, and the "
            f"model needs topology.min_gpus_per_process={least}. Use one of {fitting}."
        )
    return gpus // procs


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))

"""Nodes, GPUs and processes: pure arithmetic, without torch.

N = nodes, L = processes per node, G = GPUs used per node, n = span: GPUs of one process; W = N·L ranks in all. Local
rank l owns GPUs [l·n, (l+1)·n). Where processes share GPUs (L·n > G) the numbers wrap around: (l·n + i) mod G.
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
    own_view: bool = False  # a process sees its own GPUs and no others, as under `srun --gpus-per-task`

    @property
    def world_size(self) -> int:
        return self.nnodes * self.procs_per_node

    @property
    def shares_gpus(self) -> bool:
        """Whether a GPU is used more than once, by several processes or by one."""
        return self.procs_per_node * self.span > self.gpus_per_node > 0

    @property
    def gpus_in_view(self) -> int:
        """GPUs that each process must see."""
        return min(self.span, self.gpus_per_node) if self.own_view else self.gpus_per_node

    def ranks(self) -> range:
        return range(self.world_size)

    def rank_of(self, node: int, local_rank: int) -> int:
        """Ranks are numbered node by node. Raises TopologyError for a place that doesn't exist."""
        if not 0 <= node < self.nnodes:
            raise TopologyError(f"There is no node {node}: nodes are 0 to {self.nnodes - 1}.")
        self._check_local_rank(local_rank)
        return node * self.procs_per_node + local_rank

    def device_indices(self, local_rank: int) -> tuple[int, ...]:
        """The GPUs of a local rank, counted among those the node's processes see; empty without GPUs: the CPU.

        Where GPUs are shared, one may come more than once.
        """
        self._check_local_rank(local_rank)
        if self.gpus_per_node == 0:
            return ()
        begin = 0 if self.own_view else local_rank * self.span
        return tuple(position % self.gpus_per_node for position in range(begin, begin + self.span))

    def devices_label(self, local_rank: int) -> str:
        """The devices of a local rank as a person reads them: `GPU 0, GPU 1`, or `CPU`."""
        return ", ".join(f"GPU {index}" for index in self.device_indices(local_rank)) or "CPU"

    def _check_local_rank(self, local_rank: int) -> None:
        if not 0 <= local_rank < self.procs_per_node:
            raise TopologyError(f"There is no local rank {local_rank}: they are 0 to {self.procs_per_node - 1}.")


def resolve_topology(settings: TopologyConfig, *, gpus: int) -> Topology:
    """Fill in what the settings leave open, for `gpus` GPUs used per node (0: the CPU).

    Without GPUs `share_gpus` changes nothing: processes share the CPU. Raises TopologyError where processes, span and
    GPUs don't fit, or the span is smaller than the model needs.
    """
    procs, span = settings.procs_per_node, settings.gpus_per_process
    least = settings.min_gpus_per_process
    if span is not None and span < least:
        raise TopologyError(
            f"topology.gpus_per_process={span} is less than the model needs: topology.min_gpus_per_process={least}."
        )
    if gpus == 0:
        return Topology(nnodes=settings.nnodes, procs_per_node=procs or 1, gpus_per_node=0, span=span or least)
    if settings.share_gpus:
        return _shared(settings, gpus=gpus)
    if gpus < least:
        raise TopologyError(_too_few(settings, gpus=gpus))
    if procs is None:
        span = span or least
        procs = _procs_for(span, gpus=gpus, given=settings.gpus_per_process is not None, least=least)
    elif span is None:
        span = _span_for(procs, gpus=gpus, least=least)
    elif procs * span != gpus:
        raise TopologyError(
            f"topology.procs_per_node={procs} times topology.gpus_per_process={span} is {procs * span} GPUs, "
            f"but trainer.gpus={gpus}.\n"
            f"Use trainer.gpus={procs * span}, or leave one of the two out (auto)"
            + (", or let processes share GPUs: topology.share_gpus=true." if procs * span > gpus else ".")
        )
    return Topology(nnodes=settings.nnodes, procs_per_node=procs, gpus_per_node=gpus, span=span)


def _shared(settings: TopologyConfig, *, gpus: int) -> Topology:
    """Processes that may outnumber the GPUs; as many as it takes to use each once where their number is left open."""
    span = settings.gpus_per_process
    if span is None:
        raise TopologyError(
            f"topology.share_gpus=true needs topology.gpus_per_process: say how many of the {gpus} GPUs each process "
            f"uses, topology.gpus_per_process=1 for instance."
        )
    procs = settings.procs_per_node or -(-gpus // span)
    if procs * span < gpus:
        raise TopologyError(
            f"topology.procs_per_node={procs} times topology.gpus_per_process={span} uses {procs * span} of "
            f"trainer.gpus={gpus} GPUs, so there is nothing to share.\n"
            f"Use trainer.gpus={procs * span}, or topology.procs_per_node={-(-gpus // span)} or more."
        )
    return Topology(nnodes=settings.nnodes, procs_per_node=procs, gpus_per_node=gpus, span=span)


def _sharing(span: int) -> str:
    return f"topology.share_gpus=true topology.gpus_per_process={span}"


def _too_few(settings: TopologyConfig, *, gpus: int) -> str:
    procs, span = settings.procs_per_node, settings.gpus_per_process or settings.min_gpus_per_process
    multiple = "" if procs and settings.gpus_per_process else " or a multiple of it"
    return (
        f"trainer.gpus={gpus} is less than one process needs: "
        f"topology.min_gpus_per_process={settings.min_gpus_per_process}.\n"
        f"Use trainer.gpus={span * (procs or 1)}{multiple}, or trainer.gpus=0 to train on the CPU, "
        f"or use a GPU more than once: {_sharing(span)}"
    )


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _procs_for(span: int, *, gpus: int, given: bool, least: int) -> int:
    if gpus % span == 0:
        return gpus // span
    if given:
        raise TopologyError(
            f"topology.gpus_per_process={span} doesn't divide trainer.gpus={gpus}. "
            f"Use one of {_listed([d for d in divisors(gpus) if d >= least])}."
        )
    ways = f"Use trainer.gpus={gpus // span * span} or {(gpus // span + 1) * span}"
    raise TopologyError(
        f"trainer.gpus={gpus} can't be dealt to processes of {span} GPUs each (topology.min_gpus_per_process={span}).\n"
        f"{ways}, or topology.procs_per_node=1 to give one process all {gpus}."
    )


def _span_for(procs: int, *, gpus: int, least: int) -> int:
    """Return the GPUs of each of `procs` processes. Errors suggest `least` for each, which fits every model."""
    most = gpus // least
    fewer = f"topology.procs_per_node={most}" + (f" trainer.gpus={most * least}" if gpus % least else "")
    if procs * least > gpus:
        raise TopologyError(
            f"topology.procs_per_node={procs} needs {procs * least} GPUs, as topology.min_gpus_per_process={least}, "
            f"but trainer.gpus={gpus}.\n"
            f"Use {fewer}, or let processes share GPUs: {_sharing(least)}; "
            f"for processes on the CPU: trainer.gpus=0 topology.procs_per_node={procs}"
        )
    if gpus % procs:
        fitting = _listed([d for d in divisors(gpus) if gpus // d >= least])
        raise TopologyError(
            f"topology.procs_per_node={procs} doesn't divide trainer.gpus={gpus}.\n"
            f"Use trainer.gpus={procs * least}, or {fewer}; "
            f"if the model takes any number of devices, topology.procs_per_node may be one of {fitting}."
        )
    return gpus // procs


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


_SHARDING = {"FSDP": "fsdp", "Pipeline": "pipeline"}  # strategies that shard the model: class → option


def check_strategy_fits(strategy: str, topology: Topology, *, backend: str) -> None:
    """Raise TopologyError if a built-in strategy can't run with these processes or their backend.

    strategy: the name of its class, so that the command can check it without torch, before it starts any process.
    """
    if strategy == "Single" and topology.world_size > 1:
        one = "topology.nnodes=1 " if topology.nnodes > 1 else ""
        one += "topology.procs_per_node=1" + (f" trainer.gpus={topology.span}" if topology.gpus_per_node else "")
        raise TopologyError(
            f"strategy=single is for one process, and there are {topology.world_size}.\n"
            f"Use strategy=ddp (or auto), or {one}."
        )
    if strategy not in _SHARDING:
        return
    if topology.span > 1:
        raise TopologyError(
            f"strategy={_SHARDING[strategy]} needs processes of one device each, and these have {topology.span}.\n"
            "Use topology.gpus_per_process=1 topology.min_gpus_per_process=1."
        )
    if topology.gpus_per_node and backend == "gloo":
        nccl = "backend=nccl"
        if topology.shares_gpus:
            own = "topology.share_gpus=false topology.procs_per_node=auto topology.gpus_per_process=auto"
            nccl = f"a GPU for each process, {own} backend=auto"
        raise TopologyError(
            f"strategy={_SHARDING[strategy]} sends from GPU to GPU, which backend=gloo can't.\n"
            f"Use {nccl}, or trainer.gpus=0."
        )

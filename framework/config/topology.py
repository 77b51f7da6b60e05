"""Which process runs on which node and GPUs. Pure arithmetic.

N nodes with L processes each make a world size W = N·L. Of the G GPUs used per node, local rank l owns the n GPUs
[l·n, (l+1)·n). If processes share GPUs (L·n > G), indices wrap around: (l·n + i) mod G.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from framework.config.schema import TopologyConfig
from framework.errors import TopologyError


@dataclass(frozen=True)
class Topology:
    """The processes and GPUs of a run."""

    nnodes: int
    procs_per_node: int
    # 0: the run uses the CPU.
    gpus_per_node: int
    # GPUs per process; on the CPU, how many times a process counts it.
    span: int
    # A process sees only its own GPUs, as under `srun --gpus-per-task`.
    own_view: bool = False

    @property
    def world_size(self) -> int:
        return self.nnodes * self.procs_per_node

    @property
    def shares_gpus(self) -> bool:
        """True if a GPU is used more than once, by several processes or by one."""
        return self.procs_per_gpu > 1

    @property
    def procs_per_gpu(self) -> int:
        """The most processes that use the same GPU; 1 on the CPU."""
        if self.gpus_per_node == 0:
            return 1
        return math.ceil(self.procs_per_node * self.span / self.gpus_per_node)

    @property
    def gpus_in_view(self) -> int:
        """Number of GPUs that each process must see."""
        if self.own_view:
            return min(self.span, self.gpus_per_node)
        return self.gpus_per_node

    def rank_of(self, node: int, local_rank: int) -> int:
        """Return the rank; ranks are numbered node by node."""
        return node * self.procs_per_node + local_rank

    def device_indices(self, local_rank: int) -> tuple[int, ...]:
        """Return the GPUs of a local rank, as indices into those it sees; empty for the CPU.

        If GPUs are shared, an index may occur more than once.
        """
        if self.gpus_per_node == 0:
            return ()
        begin = 0 if self.own_view else local_rank * self.span
        return tuple(position % self.gpus_per_node for position in range(begin, begin + self.span))

    def devices_label(self, local_rank: int) -> str:
        """Return the devices of a local rank for messages: `GPU 0, GPU 1`, or `CPU`."""
        return ", ".join(f"GPU {index}" for index in self.device_indices(local_rank)) or "CPU"


def resolve_topology(settings: TopologyConfig, *, gpus: int) -> Topology:
    """Resolve `auto` settings for `gpus` GPUs per node (0: the CPU, which processes always share).

    Raises TopologyError if processes and GPUs don't fit, or a process has fewer GPUs than the model needs.
    """
    procs = settings.procs_per_node
    span = settings.gpus_per_process
    least = settings.min_gpus_per_process
    if span is not None and span < least:
        raise TopologyError(
            f"topology.gpus_per_process={span} is less than the model needs: topology.min_gpus_per_process={least}."
        )
    if gpus == 0:
        procs = procs or 1
        span = span or least
    elif settings.share_gpus:
        if span is None:
            raise TopologyError(
                f"topology.share_gpus=true needs topology.gpus_per_process: say how many of the {gpus} GPUs each "
                "process uses, topology.gpus_per_process=1 for instance."
            )
        # With fewer processes, some GPUs would be idle.
        fewest_procs = math.ceil(gpus / span)
        procs = procs or fewest_procs
        if procs < fewest_procs:
            raise TopologyError(
                f"topology.procs_per_node={procs} times topology.gpus_per_process={span} uses {procs * span} of "
                f"trainer.gpus={gpus} GPUs, so there is nothing to share.\n"
                f"Use trainer.gpus={procs * span}, or topology.procs_per_node={fewest_procs} or more."
            )
    else:
        if procs is None:
            span = span or least
            procs = gpus // span
        elif span is None:
            span = gpus // procs
        if span < least or procs * span != gpus:
            raise TopologyError(_misfit(settings, gpus=gpus))
    return Topology(nnodes=settings.nnodes, procs_per_node=procs, gpus_per_node=gpus, span=span)


def _misfit(settings: TopologyConfig, *, gpus: int) -> str:
    """Say what doesn't fit, and which number of GPUs, processes or GPUs per process would."""
    procs = settings.procs_per_node
    span = settings.gpus_per_process
    least = settings.min_gpus_per_process

    shown = []
    if procs is not None:
        shown.append(f"topology.procs_per_node={procs}")
    if span is not None:
        shown.append(f"topology.gpus_per_process={span}")
    elif procs is None or least > 1:
        shown.append(f"topology.min_gpus_per_process={least}")

    # The number of GPUs that would fit: with any number of processes, a multiple of what one needs.
    needed = (procs or 1) * (span or least)
    fitting_gpus = needed
    if procs is None:
        fitting_gpus = max(gpus // needed, 1) * needed
    ways = [f"trainer.gpus={fitting_gpus}"]

    # The numbers of GPUs per process that divide what is there.
    spans = [number for number in range(least, gpus + 1) if gpus % number == 0]
    if procs is not None and span is not None:
        ways.append("leave one of the two out (auto)")
    elif spans and span is not None:
        numbers = " or ".join(str(number) for number in spans)
        ways.append(f"topology.gpus_per_process={numbers}")
    elif spans:
        numbers = " or ".join(str(gpus // number) for number in spans)
        ways.append(f"topology.procs_per_node={numbers}")
    if needed > gpus:
        ways.append(f"share GPUs: topology.share_gpus=true topology.gpus_per_process={span or least}")
        ways.append("the CPU: trainer.gpus=0")
    return f"trainer.gpus={gpus} can't be split into processes with {' and '.join(shown)}.\nUse {', or '.join(ways)}."

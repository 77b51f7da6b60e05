"""Checks of the processes that a strategy gets, and of their devices."""

from __future__ import annotations

from framework.distributed.context import Context
from framework.errors import TopologyError


def check_one_device(context: Context, *, option: str) -> None:
    """Raise TopologyError if the processes have several devices each."""
    if len(context.devices) > 1:
        raise TopologyError(
            f"{option} needs processes of one device each, and these have {len(context.devices)}.\n"
            "Use topology.gpus_per_process=1 topology.min_gpus_per_process=1."
        )


def check_gpus_are_connected(context: Context, *, option: str) -> None:
    """Raise TopologyError for GPUs whose backend exchanges tensors by way of the CPU."""
    if context.topology.gpus_per_node and context.backend == "gloo":
        raise TopologyError(
            f"{option} sends from GPU to GPU, which backend=gloo can't.\n"
            "Use backend=nccl with a GPU for each process, or trainer.gpus=0."
        )

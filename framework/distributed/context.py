"""A rank's place in the run, passed to whatever needs it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import get_args

import torch
import torch.distributed as dist

from framework.config.schema import BackendName
from framework.config.topology import Topology
from framework.errors import RequestError, TopologyError


@dataclass(frozen=True)
class Context:
    """The place of a rank, and what it owns."""

    topology: Topology
    rank: int
    local_rank: int
    node_rank: int
    devices: tuple[torch.device, ...]
    # The name that torch.distributed has for it.
    backend: str

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    @property
    def device(self) -> torch.device:
        """The first device: batches and what is reduced over ranks live there."""
        return self.devices[0]

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def description(self) -> str:
        """The rank's place in the run and its devices, for logs."""
        devices = ", ".join(str(device) for device in self.devices)
        return (
            f"rank {self.rank}, local rank {self.local_rank}, world size {self.world_size}, backend {self.backend}, "
            f"node {self.node_rank} ({socket.gethostname()}), devices {devices}"
        )

    def wait_for_devices(self) -> None:
        """Wait until they have finished all queued work; a CPU queues none."""
        for device in self.devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)


def make_context(topology: Topology, *, node_rank: int, local_rank: int, backend_name: BackendName) -> Context:
    """Return the context of one rank. Makes no process group and opens no GPU.

    Raises RequestError for a backend that this torch lacks, TopologyError if torch sees fewer GPUs than the topology
    names.
    """
    devices = _devices(topology, local_rank)
    return Context(
        topology=topology,
        rank=topology.rank_of(node_rank, local_rank),
        local_rank=local_rank,
        node_rank=node_rank,
        devices=devices,
        backend=_backend(backend_name, device=devices[0], topology=topology),
    )


def _devices(topology: Topology, local_rank: int) -> tuple[torch.device, ...]:
    indices = topology.device_indices(local_rank)
    if not indices:
        return (torch.device("cpu"),) * topology.span
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count()
    if accelerator is None or count < topology.gpus_in_view:
        raise TopologyError(
            f"trainer.gpus={topology.gpus_per_node}, but torch {torch.__version__} sees {count}.\n"
            "Install a build of torch for this machine's driver, or use trainer.gpus=0 for the CPU."
        )
    return tuple(torch.device(accelerator.type, index) for index in indices)


def accelerator_name(device: torch.device) -> str:
    """Return what its driver calls a device, as `NVIDIA H100 80GB HBM3`; empty for a CPU, or if it has no name."""
    module = torch.get_device_module(device)
    if not hasattr(module, "get_device_name"):
        return ""
    return str(module.get_device_name(device))


def _backend(name: BackendName, *, device: torch.device, topology: Topology) -> str:
    if name == "auto":
        backend = _default_backend(device, topology)
    else:
        backend = name
    if not dist.is_backend_available(backend):
        available = [other for other in get_args(BackendName) if other == "auto" or dist.is_backend_available(other)]
        raise RequestError(
            f"backend.name={backend} isn't in this torch, {torch.__version__}. Use one of {', '.join(available)}."
        )
    return backend


def _default_backend(device: torch.device, topology: Topology) -> str:
    # nccl needs a whole GPU for each process.
    if topology.shares_gpus:
        return "gloo"
    backend = dist.get_default_backend_for_device(device)
    # One process sends nothing, so any backend will do.
    if topology.world_size == 1 and not dist.is_backend_available(backend):
        return "gloo"
    return str(backend)

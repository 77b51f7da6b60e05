"""Choose the launcher, the topology and the backend of a request: once, into a `Placement`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from framework.checkpoint import find, find_weights
from framework.config.schema import BackendName, Config
from framework.config.topology import Topology, resolve_topology
from framework.errors import ConfigError, RequestError, TopologyError
from framework.launch.external import external_topology
from framework.launch.handshake import ExternalRanks
from framework.system.hardware import count_gpus, resolve_gpus


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a run are, what starts them, and how they communicate."""

    # A module of `framework.launch`, never `auto`.
    launcher: str
    topology: Topology
    # On NVIDIA GPUs or the CPU, never `auto`.
    backend: BackendName


def place(
    config: Config,
    *,
    external_ranks: ExternalRanks | None = None,
    is_swept: bool = False,
    is_planned: bool = False,
) -> Placement:
    """Return the placement, after every check that needs neither torch nor a run directory. Raises FrameworkError.

    Args:
        external_ranks: those of which this process is rank 0, if something else has started them.
        is_swept: the run is one of a sweep's.
        is_planned: the run is only shown, so neither `trainer.gpus` nor the rendezvous endpoint has to exist.
    """
    if config.init_from is not None and config.resume is None:
        weights = Path(config.init_from)
        if find_weights(weights) is None:
            find(weights)

    launcher = _launcher(config, external_ranks, is_planned=is_planned)
    if external_ranks is None:
        topology = _own_topology(config, launcher, is_planned=is_planned)
    else:
        topology = _external_topology(config, external_ranks, is_planned=is_planned)
    if topology.nnodes > 1 and external_ranks is None:
        _check_several_nodes(config, is_swept=is_swept)
    backend = _backend(config, topology)
    return Placement(launcher, topology, backend)


def _launcher(config: Config, external_ranks: ExternalRanks | None, *, is_planned: bool) -> str:
    """Return the launcher that is configured, or that `auto` becomes. Raises ConfigError if it can't be used here."""
    name = config.launcher.name
    topology = config.topology
    if external_ranks is not None:
        if name in ("auto", "external"):
            return "external"
        raise ConfigError(
            f"launcher={name} is configured, but {external_ranks.cluster.starter} has started this process as one of "
            f"{external_ranks.cluster.world_size} ranks.\n"
            f"Use launcher=auto; or type launcher={name} to let each process start a run of its own."
        )
    if name == "external":
        raise ConfigError(
            "launcher=external, but this process isn't one of several that torchrun, srun or a Kubernetes PyTorchJob "
            "has started.\nStart the command with one of them, or leave launcher=external out."
        )
    if name == "auto":
        name = "elastic" if topology.nnodes > 1 or config.launcher.max_restarts > 0 else "local"
    if name == "elastic" and topology.nnodes > 1 and topology.rdzv_endpoint is None and not is_planned:
        raise ConfigError(
            f"topology.nnodes={topology.nnodes} needs topology.rdzv_endpoint=HOST:PORT: the name or address of node 0 "
            "and a free port on it, such as 29400, the same on every node."
        )
    return name


def _own_topology(config: Config, launcher: str, *, is_planned: bool) -> Topology:
    """Return the topology of ranks that the framework starts."""
    gpus = config.trainer.gpus
    if not is_planned:
        gpus = resolve_gpus(gpus)
    elif gpus is None:
        gpus = count_gpus()
    topology = resolve_topology(config.topology, gpus=gpus)
    if launcher == "in_process" and topology.world_size > 1:
        raise TopologyError(
            f"launcher=in_process runs one process, and {topology.world_size} are requested.\n"
            "Use launcher=local, or topology.procs_per_node=1."
        )
    return topology


def _external_topology(config: Config, ranks: ExternalRanks, *, is_planned: bool) -> Topology:
    """Return the topology of ranks that something else has started."""
    gpus = config.trainer.gpus
    if gpus == 0:
        visible = 0
    elif is_planned and gpus is not None:
        visible = gpus
    else:
        visible = count_gpus()
    return external_topology(config, ranks.cluster, visible_gpus=visible)


def _check_several_nodes(config: Config, *, is_swept: bool) -> None:
    nnodes = config.topology.nnodes
    if is_swept:
        raise ConfigError(
            f"A sweep (-m) runs on one node, and topology.nnodes={nnodes}. Leave -m out, or use one node."
        )
    if config.backend.init_method == "file":
        raise ConfigError(
            f"backend.init_method=file is for ranks of one machine, and topology.nnodes={nnodes}.\n"
            "Use backend.init_method=env."
        )


def _backend(config: Config, topology: Topology) -> BackendName:
    """Return the backend that the ranks will use. Raises RequestError: NCCL without GPUs."""
    name = config.backend.name
    has_gpus = topology.gpus_per_node > 0
    if name == "auto":
        return "nccl" if has_gpus and not topology.shares_gpus else "gloo"
    if name == "nccl" and not has_gpus:
        raise RequestError(
            "backend.name=nccl needs GPUs, and these processes run on the CPU (trainer.gpus=0, or auto without any).\n"
            "Use backend.name=gloo or backend.name=auto."
        )
    return name

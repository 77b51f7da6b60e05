"""Choose the launcher and the topology of a request; show the same run as commands for other launchers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from framework.checkpoint import find, find_weights
from framework.command.request import Request
from framework.config.saved import key_of
from framework.config.schema import BackendName, Config
from framework.config.topology import Topology, check_strategy_fits, resolve_topology
from framework.distributed.store import LOOPBACK
from framework.errors import ConfigError, RequestError, TopologyError
from framework.launch.external import external_topology
from framework.launch.plan import rank_environment
from framework.system.hardware import count_gpus, resolve_gpus

_ENDPOINT = "HOST:29400"
# Keys that don't define the run: how its ranks are started, and the settings of other jobs.
_OWN_KEYS = (
    *("launcher", "job", "plan", "parity", "tune", "export", "runs", "report"),
    *("topology.node_rank", "topology.rdzv_endpoint"),
)


def checked_topology(request: Request, *, is_planned: bool = False) -> Topology:
    """Return the topology, after every check that needs no run directory. Raises FrameworkError.

    is_planned: the run is only shown, so neither `trainer.gpus` nor the rendezvous endpoint has to exist.
    """
    config = request.config
    if config.init_from is not None and config.resume is None:
        path = Path(config.init_from)
        if find_weights(path) is None:
            find(path)
    topology = _topology(request, is_planned=is_planned)
    backend = backend_name(config, topology)
    module, _, strategy = config.strategy["_target_"].rpartition(".")
    if module == "framework.strategies":
        check_strategy_fits(strategy, topology, backend=backend)
    return topology


def backend_name(config: Config, topology: Topology) -> BackendName:
    """Return the backend that the ranks will use, on NVIDIA GPUs or the CPU. Raises RequestError: NCCL without GPUs."""
    name, gpus = config.backend.name, topology.gpus_per_node
    if name == "auto":
        return "nccl" if gpus and not topology.shares_gpus else "gloo"
    if name == "nccl" and gpus == 0:
        raise RequestError(
            "backend.name=nccl needs GPUs, and these processes run on the CPU (trainer.gpus=0, or auto without any).\n"
            "Use backend.name=gloo or backend.name=auto."
        )
    return name


def chosen_launcher(request: Request, *, is_planned: bool = False) -> str:
    """Return the launcher that is configured, or that `auto` becomes. Raises ConfigError if it can't be used here."""
    config, external_ranks = request.config, request.external_ranks
    name, topology = config.launcher.name, config.topology
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


def _topology(request: Request, *, is_planned: bool) -> Topology:
    config, launcher = request.config, chosen_launcher(request, is_planned=is_planned)
    gpus = config.trainer.gpus
    if request.external_ranks is not None:
        visible = gpus if is_planned and gpus is not None else count_gpus() if gpus != 0 else 0
        return external_topology(config, request.external_ranks.cluster, visible_gpus=visible)
    if not is_planned:
        gpus = resolve_gpus(gpus)
    topology = resolve_topology(config.topology, gpus=count_gpus() if gpus is None else gpus)
    if launcher == "in_process" and topology.world_size > 1:
        raise TopologyError(
            f"launcher=in_process runs one process, and {topology.world_size} are requested.\n"
            "Use launcher=local, or topology.procs_per_node=1."
        )
    if topology.nnodes > 1:
        if request.sub_run is not None:
            raise ConfigError(
                f"A sweep (-m) runs on one node, and topology.nnodes={topology.nnodes}. Leave -m out, or use one node."
            )
        if config.backend.init_method == "file":
            raise ConfigError(
                f"backend.init_method=file is for ranks of one machine, and topology.nnodes={topology.nnodes}.\n"
                "Use backend.init_method=env."
            )
    return topology


# The same run as other commands


def commands(request: Request, topology: Topology) -> dict[str, list[str]]:
    """Return the words of each equivalent command. `framework` and `torchrun` are typed on every node."""
    config, procs = request.config, topology.procs_per_node
    endpoint = config.topology.rdzv_endpoint or _ENDPOINT
    run = [text for text in request.overrides if not _is_of(text, _OWN_KEYS)]
    launching = [
        text for text in request.overrides if _is_of(text, ["launcher"]) and config.launcher.name != "external"
    ]
    framework = ["python", "-m", "framework", *run, *launching]
    torchrun = ["torchrun", "--standalone", f"--nproc-per-node={procs}"]
    srun = ["srun", f"--nodes={topology.nnodes}", f"--ntasks-per-node={procs}"]
    if topology.nnodes > 1:
        quoted = f"'{endpoint}'" if "[" in endpoint else endpoint  # Hydra would take an IPv6 address for a list
        framework += ["topology.node_rank=NODE", f"topology.rdzv_endpoint={quoted}"]
        torchrun[1:2] = [f"--nnodes={topology.nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
    if config.launcher.max_restarts:
        torchrun.append(f"--max-restarts={config.launcher.max_restarts}")
    if topology.gpus_per_node:
        srun.append(f"--gpus-per-node={topology.gpus_per_node}")
    return {
        "framework": framework,
        "torchrun": [*torchrun, "-m", "framework", *run],
        "srun": [*srun, "python", "-m", "framework", *run],
    }


def environment(config: Config, topology: Topology) -> dict[str, dict[str, str]]:
    """Return the ranks' environment variables: those common to all, and those of the first and the last rank.

    All are empty for `launcher=in_process`, whose rank is the command's own process.
    """
    if config.launcher.name == "in_process":
        return {"common": {}, "first_rank": {}, "last_rank": {}}
    host, port = LOOPBACK, "(a free port)"
    if topology.nnodes > 1:
        host, _, port = (config.topology.rdzv_endpoint or _ENDPOINT).rpartition(":")
    first, last = (
        {**rank_environment(topology, rank=rank, host=host.strip("[]"), port=0), "MASTER_PORT": port}
        for rank in (0, topology.world_size - 1)
    )
    own = ("RANK", "LOCAL_RANK", "GROUP_RANK")
    return {
        "common": {name: value for name, value in first.items() if name not in own},
        "first_rank": {name: first[name] for name in own},
        "last_rank": {name: last[name] for name in own},
    }


def _is_of(override: str, sections: Sequence[str]) -> bool:
    """Return True if an override such as `a.b=1`, `+a.b=1` or `a@place=x` sets a key of one of the sections."""
    key = key_of(override).partition("@")[0]
    return any(key == section or key.startswith((f"{section}.", f"{section}/")) for section in sections)

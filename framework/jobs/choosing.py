"""Which launcher a request gets, and who then runs where: the same for a run and for its plan."""

from __future__ import annotations

from pathlib import Path

from framework.checkpoint import find
from framework.config.schema import BackendName, Config, InitMethod
from framework.errors import ConfigError, RequestError
from framework.hardware import count_gpus, resolve_gpus
from framework.jobs.equivalents import launcher_name
from framework.jobs.request import Request
from framework.launch.errand import ask
from framework.launch.in_place import check_one_process
from framework.launch.placement import placed_topology
from framework.topology import Topology, check_strategy_fits, resolve_topology


def checked_topology(request: Request, *, is_planned: bool = False) -> Topology:
    """Who runs where, once all is checked that can be before anything is made. Raises FrameworkError.

    is_planned: the run is only shown, so `trainer.gpus` needn't be there, nor a place where nodes meet be named.
    """
    config = request.config
    if config.init_from is not None and config.resume is None:
        find(Path(config.init_from))
    topology = _topology(request, is_planned=is_planned)
    backend = backend_name(config, topology)
    module, _, strategy = config.strategy["_target_"].rpartition(".")
    if module == "framework.strategies":
        check_strategy_fits(strategy, topology, backend=backend.value)
    if backend is BackendName.MPI:
        ask(  # only torch knows if its build has it
            request.warm,
            "framework.distributed.context:answer_available",
            {"backend": BackendName.MPI.value},
            timeout_s=config.backend.init_timeout,
            purpose="look for the backend",
        )
    return topology


def backend_name(config: Config, topology: Topology) -> BackendName:
    """Return the backend that the ranks will use, on NVIDIA GPUs or the CPU. Raises RequestError: NCCL without GPUs."""
    name, gpus = config.backend.name, topology.gpus_per_node
    if name is BackendName.AUTO:
        return BackendName.NCCL if gpus and not topology.shares_gpus else BackendName.GLOO
    if name is BackendName.NCCL and gpus == 0:
        raise RequestError(
            "backend.name=nccl needs GPUs, and these processes run on the CPU (trainer.gpus=0, or auto without any).\n"
            "Use backend.name=gloo or backend.name=auto."
        )
    return name


def _topology(request: Request, *, is_planned: bool) -> Topology:
    config, launcher = request.config, chosen_launcher(request, is_planned=is_planned)
    gpus = config.trainer.gpus
    if request.leader is not None:
        visible = gpus if is_planned and gpus is not None else count_gpus() if gpus != 0 else 0
        return placed_topology(config, request.leader.place, visible_gpus=visible)
    if not is_planned:
        gpus = resolve_gpus(gpus)
    topology = resolve_topology(config.topology, gpus=count_gpus() if gpus is None else gpus)
    if launcher == "in_place":
        check_one_process(topology)
    if topology.nnodes > 1:
        _check_several_nodes(request)
    return topology


def chosen_launcher(request: Request, *, is_planned: bool = False) -> str:
    """The launcher that is asked for, or that `auto` becomes. Raises ConfigError for one that can't be used here."""
    name, leader = request.config.launcher.name, request.leader
    if leader is not None:
        if name in ("auto", "adopted"):
            return "adopted"
        raise ConfigError(
            f"launcher={name} is configured, but {leader.place.starter} has started this process as one of "
            f"{leader.place.world_size} ranks.\n"
            f"Use launcher=auto, or type launcher={name}: then each of them begins a run of its own."
        )
    if name == "adopted":
        raise ConfigError(
            "launcher=adopted, but this process isn't one of several that torchrun, srun or a Kubernetes PyTorchJob "
            "has started.\nStart the command with one of them, or leave launcher=adopted out."
        )
    name, topology = launcher_name(request.config), request.config.topology
    if name == "elastic" and topology.nnodes > 1 and topology.rdzv_endpoint is None and not is_planned:
        raise ConfigError(
            f"topology.nnodes={topology.nnodes} needs topology.rdzv_endpoint=HOST:PORT, the place on node 0 where all "
            f"nodes meet: its name or address and a free port, such as 29400, the same on every node."
        )
    return name


def _check_several_nodes(request: Request) -> None:
    """Raise ConfigError for what the framework's own launcher can't do on several nodes."""
    config = request.config
    if request.place is not None:
        raise ConfigError(
            f"-m makes several runs, and topology.nnodes={config.topology.nnodes} nodes can meet for one only.\n"
            "Leave -m out, or use one node."
        )
    if config.backend.init_method is InitMethod.FILE:
        raise ConfigError(
            f"backend.init_method=file is for ranks of one machine, and topology.nnodes={config.topology.nnodes}.\n"
            "Use backend.init_method=env."
        )

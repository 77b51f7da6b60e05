"""How else the same run is started: the command for each node, for torchrun and for SLURM; and what ranks are told."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from framework.config.schema import Config
from framework.errors import TopologyError
from framework.hardware import count_gpus
from framework.jobs.request import Request
from framework.launch.endpoint import LOOPBACK
from framework.launch.plan import rank_environment
from framework.topology import Topology

_ENDPOINT = "HOST:29400"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ONE_NODE_PORT = "(a free port)"
# Keys that are no part of what is run: how ranks are started where this command does that, and what is planned.
_LAUNCHING = ("launcher",)
_OWN_KEYS = (*_LAUNCHING, "job", "plan", "parity", "tune", "export", "topology.node_rank", "topology.rdzv_endpoint")


def launcher_name(config: Config) -> str:
    """The launcher that `auto` becomes where nothing else has started the ranks."""
    if config.launcher.name != "auto":
        return config.launcher.name
    return "elastic" if config.topology.nnodes > 1 or config.launcher.max_restarts > 0 else "local"


def commands(request: Request, topology: Topology) -> dict[str, list[str]]:
    """The words of each command line. The first is typed on every node, with its number for NODE, torchrun's too."""
    config = request.config
    endpoint = config.topology.rdzv_endpoint or _ENDPOINT
    several = topology.nnodes > 1
    run = [text for text in request.overrides if not _is_of(_key(text), _OWN_KEYS)]
    launching = [
        text for text in request.overrides if _is_of(_key(text), _LAUNCHING) and config.launcher.name != "adopted"
    ]
    quoted = f"'{endpoint}'" if "[" in endpoint else endpoint  # of an IPv6 address, which Hydra would take for a list
    meeting_here = ["topology.node_rank=NODE", f"topology.rdzv_endpoint={quoted}"] if several else []
    procs = topology.procs_per_node
    meeting = [f"--nnodes={topology.nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
    restarts = [f"--max-restarts={config.launcher.max_restarts}"] if config.launcher.max_restarts else []
    gpus = [f"--gpus-per-node={topology.gpus_per_node}"] if topology.gpus_per_node else []
    return {
        "framework": ["python", "-m", "framework", *run, *launching, *meeting_here],
        "torchrun": [
            "torchrun",
            *(meeting if several else ["--standalone"]),
            f"--nproc-per-node={procs}",
            *restarts,
            *("-m", "framework", *run),
        ],
        "srun": [
            "srun",
            f"--nodes={topology.nnodes}",
            f"--ntasks-per-node={procs}",
            *gpus,
            *("python", "-m", "framework", *run),
        ],
    }


def environment(config: Config, topology: Topology) -> dict[str, dict[str, str]]:
    """What ranks find in their environment: what is common to all, and what the first and the last have of their own.

    All empty for `launcher=in_place`, whose rank is the command's own process.
    """
    if launcher_name(config) == "in_place":
        return {"common": {}, "first_rank": {}, "last_rank": {}}
    host, port = LOOPBACK, _ONE_NODE_PORT
    if topology.nnodes > 1:
        host, _, port = (config.topology.rdzv_endpoint or _ENDPOINT).rpartition(":")
    first, last = (
        {**rank_environment(topology, rank=rank, host=host.strip("[]"), port=0), "MASTER_PORT": port}
        for rank in (0, topology.world_size - 1)
    )
    own = ("RANK", "LOCAL_RANK", "GROUP_RANK")
    return {
        "common": {**_visible(topology), **{name: value for name, value in first.items() if name not in own}},
        "first_rank": {name: first[name] for name in own},
        "last_rank": {name: last[name] for name in own},
    }


def hidden_gpus(topology: Topology) -> list[str]:
    """A note where this machine's CUDA_VISIBLE_DEVICES shows other GPUs than the run's, which then are elsewhere."""
    value = os.environ.get(_VISIBLE)
    if value is None or topology.gpus_per_node == 0 or _visible(topology):
        return []
    return [
        f"This machine's {_VISIBLE}={value} shows another number of GPUs than the {topology.gpus_per_node} that the "
        "run uses on each node: it isn't part of the environment above."
    ]


def _visible(topology: Topology) -> dict[str, str]:
    """The variable that the numbers of GPUs are counted in, where it shows exactly as many as are used."""
    value = os.environ.get(_VISIBLE)
    if value is None or topology.gpus_per_node == 0:
        return {}
    with suppress(TopologyError):  # a driver that doesn't answer: the GPUs that are planned with are elsewhere
        if count_gpus() == topology.gpus_in_view:
            return {_VISIBLE: value}
    return {}


def _key(override: str) -> str:
    """What an override sets: `+a.b=1` sets a.b, `group@place=x` the group."""
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def _is_of(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or key.startswith((f"{section}.", f"{section}/")) for section in sections)

"""The same run as commands for other launchers, and the environment of its ranks: what job=plan shows."""

from __future__ import annotations

from collections.abc import Sequence

from framework.command.request import Request
from framework.config.overrides import key_of
from framework.config.schema import Config
from framework.config.topology import Topology
from framework.distributed.store import LOOPBACK
from framework.launch.base import launcher_class
from framework.launch.rank_environment import rank_environment

_ENDPOINT = "HOST:29400"
# Keys that don't define a training, but how its ranks are started.
_STARTING_KEYS = ("launcher", "job", "topology.node_rank", "topology.rdzv_endpoint")
# Variables that differ between ranks.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK")


def commands(request: Request, topology: Topology, *, own_keys: Sequence[str]) -> dict[str, list[str]]:
    """Return the words of each command that trains so. `framework` and `torchrun` are typed on every node.

    own_keys: the sections that only the request's job reads; they are left out.
    """
    config = request.config
    procs = topology.procs_per_node
    endpoint = config.topology.rdzv_endpoint or _ENDPOINT
    run = [text for text in request.overrides if not _is_of(text, [*_STARTING_KEYS, *own_keys])]
    launching = []
    if launcher_class(config.launcher).starts_ranks:
        launching = [text for text in request.overrides if _is_of(text, ["launcher"])]
    framework = ["python", "-m", "framework", *run, *launching]
    torchrun = ["torchrun", "--standalone", f"--nproc-per-node={procs}"]
    srun = ["srun", f"--nodes={topology.nnodes}", f"--ntasks-per-node={procs}"]
    if topology.nnodes > 1:
        quoted = endpoint
        if "[" in endpoint:
            # Unquoted, Hydra would take an IPv6 address for a list.
            quoted = f"'{endpoint}'"
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

    All are empty for a rank in the command's own process.
    """
    if launcher_class(config.launcher).runs_in_command:
        return {"common": {}, "first_rank": {}, "last_rank": {}}
    host = LOOPBACK
    port = "(a free port)"
    if topology.nnodes > 1:
        host, _, port = (config.topology.rdzv_endpoint or _ENDPOINT).rpartition(":")
    first = rank_environment(topology, rank=0, host=host.strip("[]"), port=0)
    last = rank_environment(topology, rank=topology.world_size - 1, host=host.strip("[]"), port=0)
    common = {name: value for name, value in first.items() if name not in _RANK_VARIABLES}
    common["MASTER_PORT"] = port
    return {
        "common": common,
        "first_rank": {name: first[name] for name in _RANK_VARIABLES},
        "last_rank": {name: last[name] for name in _RANK_VARIABLES},
    }


def _is_of(override: str, sections: Sequence[str]) -> bool:
    """Return True if an override such as `a.b=1`, `+a.b=1` or `a@place=x` sets a key of one of the sections."""
    key = key_of(override).partition("@")[0]
    return any(key == section or key.startswith((f"{section}.", f"{section}/")) for section in sections)

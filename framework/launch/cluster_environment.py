"""Detect a rank that torchrun, SLURM's srun or a Kubernetes PyTorchJob started, by its environment variables.

Every command does this before anything else, so it imports the standard library only.

A SLURM job also has shells with the same variables that are no ranks: a batch script has no SLURM_STEP_ID, salloc's
interactive shell has one that SLURM reserves, and `srun --pty bash` has SLURM_PTY_PORT and one task.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from framework.config.renamed import present_override
from framework.distributed.store import LOOPBACK, SECRET
from framework.errors import TopologyError

_SECRET_KEY = "topology.rdzv_secret"
# Step numbers from here on are SLURM's: batch script, interactive shell, ...
_RESERVED_STEPS = 0xFFFFFFF0
# These ports are below those that Linux gives to outgoing connections.
_FIRST_PORT = 15_000
_PORTS = 15_000


class ReportedByRankZeroError(TopologyError):
    """A mistake that rank 0 sees and prints too, so this rank doesn't."""


@dataclass(frozen=True)
class ClusterEnvironment:
    """This process as one of the ranks that `starter` has started. Ranks are numbered node by node."""

    # torchrun, srun, Kubernetes, or "the environment" if scripts set torchrun's variables.
    starter: str
    rank: int
    local_rank: int
    nnodes: int
    procs_per_node: int
    # The address of the store.
    host: str
    port: int
    # True if torchrun's agent hosts the store; otherwise rank 0 does.
    agent_store: bool = False
    # How often torchrun has restarted the ranks.
    attempt: int = 0

    @property
    def world_size(self) -> int:
        return self.nnodes * self.procs_per_node

    @property
    def node_rank(self) -> int:
        return self.rank // self.procs_per_node

    @property
    def store_host(self) -> str:
        """Where ranks connect to the store: on one node rank 0 hosts it on loopback, whatever `host` is."""
        return LOOPBACK if self.nnodes == 1 and not self.agent_store else self.host

    @property
    def prints_for_node(self) -> bool:
        """True if this rank prints the errors that all ranks of its node have.

        Rank 0 doesn't unless it is alone on its node: it may have ended.
        """
        if self.node_rank == 0 and self.procs_per_node > 1:
            return self.local_rank == 1
        return self.local_rank == 0


def chooses_own_ranks(arguments: Sequence[str]) -> bool:
    """Return True if another launcher is typed: then every process starts a run of its own, whatever started it."""
    if typed_value(arguments, "launcher._target_") is not None:
        return True
    present = [present_override(text) for text in arguments]
    return typed_value(present, "launcher") not in (None, "auto", "external")


def typed_value(arguments: Sequence[str], key: str) -> str | None:
    """Return the last `key=VALUE` of a command that isn't composed yet; None if there is none or it is null."""
    values = [text.partition("=")[2] for text in arguments if text.partition("=")[0] == key]
    if not values or values[-1] in ("", "null"):
        return None
    return values[-1]


def without_secret(arguments: Sequence[str], environ: MutableMapping[str, str]) -> list[str]:
    """Return the arguments of a command without its secret, which is moved to the environment.

    So it is in no configuration that is saved, printed or sent; ranks inherit the variable.
    """
    others = []
    for text in arguments:
        key, _, value = text.partition("=")
        if key.lstrip("+") == _SECRET_KEY:
            environ[SECRET] = "" if value == "null" else value.strip("'\"")
        else:
            others.append(text)
    return others


def detect(environ: Mapping[str, str], *, endpoint: str | None = None) -> ClusterEnvironment | None:
    """Return what the environment says of this process, or None if nothing has started it as a rank.

    A single task of srun's and a single pod are no ranks: the framework's own launcher starts them there. Raises
    TopologyError for variables that contradict each other or are incomplete.

    Args:
        endpoint: topology.rdzv_endpoint, if it is typed.
    """
    try:
        cluster = _detect(environ, endpoint=endpoint)
    except TopologyError as error:
        rank = environ.get("RANK", environ.get("SLURM_PROCID", "0"))
        if rank.isdecimal() and int(rank) > 0:
            raise ReportedByRankZeroError(str(error)) from error
        raise
    if cluster is not None:
        _check_rank(cluster, environ)
    return cluster


def _detect(environ: Mapping[str, str], *, endpoint: str | None) -> ClusterEnvironment | None:
    if "TORCHELASTIC_RUN_ID" in environ:
        return _torch_variables(environ, starter="torchrun")
    if "TORCHELASTIC_USE_AGENT_STORE" in environ:
        # One of the framework's own ranks has started this command.
        return None
    if _is_slurm_step(environ):
        return _slurm(environ, endpoint=endpoint)
    if "LOCAL_RANK" not in environ:
        # One process per pod, whose command isn't torchrun.
        _check_torchrun_isnt_expected(environ)
    if "RANK" in environ and _number(environ, "WORLD_SIZE", default=1) > 1:
        starter = "the environment" if "LOCAL_RANK" in environ else "Kubernetes"
        return _torch_variables(environ, starter=starter)
    return None


def _torch_variables(environ: Mapping[str, str], *, starter: str) -> ClusterEnvironment:
    """Read torchrun's variables. The training operator of Kubernetes sets no local ones: one process per pod."""
    world = _number(environ, "WORLD_SIZE")
    local_rank = 0
    local_world = 1
    if "LOCAL_RANK" in environ:
        local_rank = _number(environ, "LOCAL_RANK")
        local_world = _number(environ, "LOCAL_WORLD_SIZE")
    nnodes = _number(environ, "GROUP_WORLD_SIZE", default=world // max(1, local_world))
    if nnodes * local_world != world:
        raise TopologyError(
            f"WORLD_SIZE={world} isn't LOCAL_WORLD_SIZE={local_world} times {nnodes}, the number of nodes.\n"
            "Start the same number of processes on every node (torchrun: --nproc-per-node)."
        )
    return ClusterEnvironment(
        starter=starter,
        rank=_number(environ, "RANK"),
        local_rank=local_rank,
        nnodes=nnodes,
        procs_per_node=local_world,
        host=_text(environ, "MASTER_ADDR"),
        port=_number(environ, "MASTER_PORT"),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", default=0),
    )


def _check_torchrun_isnt_expected(environ: Mapping[str, str]) -> None:
    """Raise TopologyError for PET_ variables, options for torchrun: without it every pod would train by itself."""
    procs = environ.get("PET_NPROC_PER_NODE", "")
    nodes = environ.get("PET_NNODES", "")
    several_procs = procs.isdecimal() and int(procs) > 1
    several_nodes = nodes not in ("", "1") and "RANK" not in environ
    option = None
    if several_procs:
        option = f"PET_NPROC_PER_NODE={procs}"
    elif several_nodes:
        option = f"PET_NNODES={nodes}"
    if option is not None:
        raise TopologyError(
            f"{option} is an option for torchrun, and this command wasn't started by it.\n"
            "Let the pod's command be `torchrun -m framework ...`, or type launcher=local for a run of this pod alone."
        )


# SLURM


def _is_slurm_step(environ: Mapping[str, str]) -> bool:
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    return (
        step.isdecimal()
        and int(step) < _RESERVED_STEPS
        and "SLURM_PTY_PORT" not in environ
        and "SLURM_PROCID" in environ
        and _number(environ, "SLURM_STEP_NUM_TASKS", default=1) > 1
    )


def _slurm(environ: Mapping[str, str], *, endpoint: str | None) -> ClusterEnvironment:
    per_node = tasks_per_node(_text(environ, "SLURM_STEP_TASKS_PER_NODE"))
    tasks = sum(per_node)
    nnodes = len(per_node)
    if len(set(per_node)) > 1:
        raise TopologyError(
            f"srun has put different numbers of tasks on its nodes: {environ['SLURM_STEP_TASKS_PER_NODE']} "
            f"({tasks} tasks on {nnodes} nodes).\nUse --ntasks-per-node, so that every node has the same number."
        )
    host, port = _slurm_endpoint(environ, endpoint, nnodes=nnodes)
    return ClusterEnvironment(
        starter="srun",
        rank=_number(environ, "SLURM_PROCID"),
        local_rank=_number(environ, "SLURM_LOCALID"),
        nnodes=nnodes,
        procs_per_node=per_node[0],
        host=host,
        port=port,
    )


def _slurm_endpoint(environ: Mapping[str, str], endpoint: str | None, *, nnodes: int) -> tuple[str, int]:
    """Return where the tasks of a step meet, the same for all: host and port."""
    typed_host = None
    typed_port = None
    if endpoint is not None:
        typed_host, typed_port = split_endpoint(endpoint)
    host = environ.get("MASTER_ADDR") or typed_host
    if host is None:
        host = LOOPBACK if nnodes == 1 else first_host(_text(environ, "SLURM_STEP_NODELIST"))
    if environ.get("MASTER_PORT"):
        return host, _number(environ, "MASTER_PORT")
    if typed_port is not None:
        return host, typed_port
    reserved = re.match(r"\d+", environ.get("SLURM_STEP_RESV_PORTS", ""))
    if reserved is not None:
        return host, int(reserved[0])
    job = _number(environ, "SLURM_JOB_ID", default=0)
    step = _number(environ, "SLURM_STEP_ID", default=0)
    return host, _FIRST_PORT + (61 * job + step) % _PORTS


def tasks_per_node(text: str) -> list[int]:
    """Return [4, 4, 3] for `4(x2),3`. Raises TopologyError."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise TopologyError(f"SLURM_STEP_TASKS_PER_NODE={text} can't be read; it looks like 4(x2),3.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """Return the first of a SLURM list of nodes: gpu01 for `gpu[01-04,07],cpu1`."""
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", "" if first is None else first[0])


# Common parts


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Split `HOST:PORT` or `[::1]:PORT`. Raises TopologyError."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise TopologyError(f"topology.rdzv_endpoint={endpoint} must be HOST:PORT, such as node0:29400.")
    return host.strip("[]"), int(port)


def _check_rank(cluster: ClusterEnvironment, environ: Mapping[str, str]) -> None:
    """Raise TopologyError if this rank's own numbers don't fit those of all."""
    rank = cluster.rank
    local = cluster.local_rank
    local_world = cluster.procs_per_node
    is_slurm = cluster.starter == "srun"
    node = environ.get("SLURM_NODEID" if is_slurm else "GROUP_RANK", str(cluster.node_rank))
    if rank >= cluster.world_size or str(cluster.node_rank) != node or rank % local_world != local:
        advice = "\nUse srun --distribution=block." if is_slurm else ""
        raise TopologyError(
            f"Rank {rank} is local rank {local} of node {node}, and would be local rank {rank % local_world} of node "
            f"{cluster.node_rank} if {cluster.world_size} ranks were numbered node by node, {local_world} on each."
            f"{advice}"
        )
    ours = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": cluster.world_size, "LOCAL_WORLD_SIZE": local_world}
    # Scripts often set torchrun's variables from SLURM's.
    for name, number in ours.items():
        if is_slurm and environ.get(name, str(number)) != str(number):
            raise TopologyError(
                f"{name}={environ[name]}, but srun says {number}.\nUnset {name}, or type launcher=local for a run of "
                "this process alone."
            )


def _text(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        known = ", ".join(f"{key}={environ[key]}" for key in ("RANK", "WORLD_SIZE", "SLURM_PROCID") if key in environ)
        raise TopologyError(
            f"{name} isn't set, but {known} is: this process seems to be one of several.\n"
            f"Set {name}, or type launcher=local for a run of this process alone."
        )
    return value


def _number(environ: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    if default is not None and not environ.get(name):
        return default
    value = _text(environ, name)
    if not value.isdecimal():
        raise TopologyError(f"{name}={value} must be a whole number.")
    return int(value)

"""Whether something else has started this process as a rank: torchrun, SLURM's srun or a Kubernetes PyTorchJob.

Read from the variables they set. Nothing but Python's own modules here: every command asks this before anything else.

A SLURM job also has shells that are no ranks, with the same variables: a batch script has no SLURM_STEP_ID, salloc's
interactive shell has a number that SLURM keeps for itself, and `srun --pty bash` has SLURM_PTY_PORT and one task.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from framework.errors import TopologyError

_RESERVED_STEPS = 0xFFFFFFF0  # step numbers from here on are SLURM's: batch script, interactive shell, ...
_FIRST_PORT, _PORTS = 15_000, 15_000  # below what Linux gives to outgoing connections


class ToldByRankZeroError(TopologyError):
    """A mistake that rank 0 meets too and tells: it isn't printed a second time."""


@dataclass(frozen=True)
class Place:
    """Where this process stands among the ranks that `starter` has started; ranks are numbered node by node.

    host, port: where they meet. agent_store: somebody else hosts the store there; otherwise rank 0 does. port_from: the
    variable that `port` comes from. attempt: how often torchrun has started the ranks anew.
    """

    starter: str
    rank: int
    local_rank: int
    nnodes: int
    procs_per_node: int
    host: str
    port: int
    port_from: str
    agent_store: bool = False
    attempt: int = 0

    @property
    def world_size(self) -> int:
        return self.nnodes * self.procs_per_node

    @property
    def node_rank(self) -> int:
        return self.rank // self.procs_per_node

    @property
    def speaks(self) -> bool:
        """Whether it tells for its node what rank 0 may not be there to tell."""
        return self.local_rank == (1 if self.node_rank == 0 and self.procs_per_node > 1 else 0)


def chooses_own_ranks(arguments: Sequence[str]) -> bool:
    """Whether another launcher is typed: every process then begins a run of its own, whatever has started it."""
    typed = [text.partition("=")[2] for text in arguments if text.partition("=")[0] in ("launcher", "launcher.name")]
    return bool(typed) and typed[-1] not in ("auto", "adopted")


def without_launch_arguments(arguments: Sequence[str]) -> list[str]:
    """Without `--local_rank N`, which old launchers add to every command: ranks learn theirs from the environment."""
    kept: list[str] = []
    value_follows = False
    for text in arguments:
        if not value_follows or not text.isdecimal():
            name, _, value = text.partition("=")
            value_follows = name in ("--local_rank", "--local-rank") and not value
            if name not in ("--local_rank", "--local-rank"):
                kept.append(text)
        else:
            value_follows = False
    return kept


def typed_value(arguments: Sequence[str], key: str) -> str | None:
    """The last `key=VALUE` of a command, before anything is composed; None where there is none, or it is null."""
    typed = [text.partition("=")[2] for text in arguments if text.partition("=")[0] == key]
    return typed[-1] if typed and typed[-1] not in ("", "null") else None


def detect(environ: Mapping[str, str], *, endpoint: str | None = None) -> Place | None:
    """The place of this process; None where it is no rank of anybody's.

    A single task of srun's, and a single pod, are none: the framework's own launcher starts the ranks there.
    endpoint: HOST:PORT that was typed for ranks to meet at. Raises TopologyError for variables that contradict each
    other or are incomplete.
    """
    try:
        place = _detect(environ, endpoint=endpoint)
        if place is not None:
            _check_endpoint(environ, endpoint)
    except TopologyError as error:
        rank = environ.get("RANK", environ.get("SLURM_PROCID", "0"))
        if rank.isdecimal() and int(rank) > 0:
            raise ToldByRankZeroError(str(error)) from error
        raise
    if place is not None:
        _check_position(place, environ)
    return place


def _detect(environ: Mapping[str, str], *, endpoint: str | None) -> Place | None:
    if "TORCHELASTIC_RUN_ID" in environ:
        return _torchrun(environ)
    if "TORCHELASTIC_USE_AGENT_STORE" in environ:
        return None  # a command that one of the framework's own ranks has started
    if _is_slurm_step(environ):
        return _slurm(environ, endpoint=endpoint)
    if "RANK" in environ and _number(environ, "WORLD_SIZE", default=1) > 1:
        return _kubernetes(environ) if "LOCAL_RANK" not in environ else _by_hand(environ)
    _check_torchrun_isnt_expected(environ)
    return None


# torchrun


def _torchrun(environ: Mapping[str, str]) -> Place:
    world, local_world = _number(environ, "WORLD_SIZE"), _number(environ, "LOCAL_WORLD_SIZE")
    nnodes = _number(environ, "GROUP_WORLD_SIZE", default=world // max(1, local_world))
    if nnodes * local_world != world:
        raise TopologyError(
            f"torchrun has started WORLD_SIZE={world} processes on {nnodes} nodes, {local_world} of them on this one: "
            "not the same number on each.\nUse the same --nproc-per-node on every node."
        )
    return Place(
        starter="torchrun",
        rank=_number(environ, "RANK"),
        local_rank=_number(environ, "LOCAL_RANK"),
        nnodes=nnodes,
        procs_per_node=local_world,
        host=_text(environ, "MASTER_ADDR"),
        port=_number(environ, "MASTER_PORT"),
        port_from="--master-port",
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", default=0),
    )


def _by_hand(environ: Mapping[str, str]) -> Place:
    """What torchrun sets, without torchrun: scripts that set it for each process."""
    world, local_world = _number(environ, "WORLD_SIZE"), _number(environ, "LOCAL_WORLD_SIZE")
    if local_world < 1 or world % local_world:
        raise TopologyError(
            f"WORLD_SIZE={world} isn't a multiple of LOCAL_WORLD_SIZE={local_world}.\n"
            "Start the same number of processes on every node."
        )
    return Place(
        starter="the environment",
        rank=_number(environ, "RANK"),
        local_rank=_number(environ, "LOCAL_RANK"),
        nnodes=world // local_world,
        procs_per_node=local_world,
        host=_text(environ, "MASTER_ADDR"),
        port=_number(environ, "MASTER_PORT"),
        port_from="MASTER_PORT",
    )


# Kubernetes


def _kubernetes(environ: Mapping[str, str]) -> Place:
    """One process for each pod, as the training operator's PyTorchJob starts them."""
    _check_torchrun_isnt_expected(environ)
    rank = _number(environ, "RANK")
    return Place(
        starter="Kubernetes",
        rank=rank,
        local_rank=0,
        nnodes=_number(environ, "WORLD_SIZE"),
        procs_per_node=1,
        host=_text(environ, "MASTER_ADDR"),
        port=_number(environ, "MASTER_PORT"),
        port_from="MASTER_PORT",
    )


def _check_torchrun_isnt_expected(environ: Mapping[str, str]) -> None:
    """Variables named PET_ are options for torchrun; without it, every pod would train a model of its own."""
    procs, nodes = environ.get("PET_NPROC_PER_NODE", ""), environ.get("PET_NNODES", "")
    several_procs = procs.isdecimal() and int(procs) > 1
    several_nodes = nodes not in ("", "1") and "RANK" not in environ
    if several_procs or several_nodes:
        name, value = ("PET_NPROC_PER_NODE", procs) if several_procs else ("PET_NNODES", nodes)
        raise TopologyError(
            f"{name}={value} is an option for torchrun, and this command wasn't started by it.\n"
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


def _slurm(environ: Mapping[str, str], *, endpoint: str | None) -> Place:
    tasks, nnodes = _number(environ, "SLURM_STEP_NUM_TASKS"), _number(environ, "SLURM_STEP_NUM_NODES")
    per_node = tasks_per_node(_text(environ, "SLURM_STEP_TASKS_PER_NODE"))
    if len(per_node) != nnodes or sum(per_node) != tasks:
        raise TopologyError(
            f"SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']} is {sum(per_node)} tasks on "
            f"{len(per_node)} nodes, but SLURM_STEP_NUM_TASKS={tasks} and SLURM_STEP_NUM_NODES={nnodes}."
        )
    if len(set(per_node)) > 1:
        raise TopologyError(
            f"srun has put different numbers of tasks on its nodes: {environ['SLURM_STEP_TASKS_PER_NODE']} "
            f"({tasks} tasks on {nnodes} nodes).\nUse --ntasks-per-node, so that every node has the same number."
        )
    _check_torch_variables(environ, {"WORLD_SIZE": tasks, "LOCAL_WORLD_SIZE": per_node[0]})
    host, port, port_from = _slurm_endpoint(environ, endpoint, nnodes=nnodes)
    return Place(
        starter="srun",
        rank=_number(environ, "SLURM_PROCID"),
        local_rank=_number(environ, "SLURM_LOCALID"),
        nnodes=nnodes,
        procs_per_node=per_node[0],
        host=host,
        port=port,
        port_from=port_from,
    )


def _slurm_endpoint(environ: Mapping[str, str], endpoint: str | None, *, nnodes: int) -> tuple[str, int, str]:
    """Where the tasks of a step meet, the same for all of them: host, port, and what names the port."""
    typed_host, typed_port = (None, None) if endpoint is None else split_endpoint(endpoint)
    host = environ.get("MASTER_ADDR") or typed_host
    if host is None:
        host = "127.0.0.1" if nnodes == 1 else first_host(_text(environ, "SLURM_STEP_NODELIST"))
    if environ.get("MASTER_PORT"):
        return host, _number(environ, "MASTER_PORT"), "MASTER_PORT"
    if typed_port is not None:
        return host, typed_port, "topology.rdzv_endpoint"
    reserved = re.match(r"\d+", environ.get("SLURM_STEP_RESV_PORTS", ""))
    if reserved is not None:
        return host, int(reserved[0]), "SLURM_STEP_RESV_PORTS"
    job, step = _number(environ, "SLURM_JOB_ID", default=0), _number(environ, "SLURM_STEP_ID", default=0)
    return host, _FIRST_PORT + (61 * job + step) % _PORTS, "the job's number"


def tasks_per_node(text: str) -> list[int]:
    """`4(x2),3` → [4, 4, 3]. Raises TopologyError."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise TopologyError(f"SLURM_STEP_TASKS_PER_NODE={text} can't be read; it looks like 4(x2),3.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """The first of a SLURM list of nodes: `gpu[01-04,07],cpu1` → gpu01."""
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", "" if first is None else first[0])


# What all have in common


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """`HOST:PORT`, `[::1]:PORT`. Raises TopologyError."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise TopologyError(f"topology.rdzv_endpoint={endpoint} must be HOST:PORT, such as node0:29400.")
    return host.strip("[]"), int(port)


def _check_endpoint(environ: Mapping[str, str], endpoint: str | None) -> None:
    given = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if endpoint is None or None in given:
        return
    if endpoint != f"{given[0]}:{given[1]}":
        raise TopologyError(
            f"topology.rdzv_endpoint={endpoint}, but these processes meet at MASTER_ADDR:MASTER_PORT="
            f"{given[0]}:{given[1]}.\nLeave topology.rdzv_endpoint out."
        )


def _check_position(place: Place, environ: Mapping[str, str]) -> None:
    """Raise TopologyError where this rank's own numbers don't fit those of all."""
    rank, local, world, local_world = place.rank, place.local_rank, place.world_size, place.procs_per_node
    if rank >= world or local >= local_world:
        raise TopologyError(
            f"Rank {rank}, local rank {local} can't be: {place.starter} has started {world} processes, "
            f"{local_world} on each node."
        )
    node = environ.get("SLURM_NODEID" if place.starter == "srun" else "GROUP_RANK", str(place.node_rank))
    if str(place.node_rank) != node or place.rank % local_world != local:
        advice = "\nUse srun --distribution=block." if place.starter == "srun" else ""
        raise TopologyError(
            f"Rank {rank} is local rank {local} of node {node}, and would be local rank {rank % local_world} of node "
            f"{place.node_rank} if ranks were numbered node by node, {local_world} on each.{advice}"
        )
    if place.starter == "srun":
        _check_torch_variables(environ, {"RANK": rank, "LOCAL_RANK": local})


def _check_torch_variables(environ: Mapping[str, str], slurm: Mapping[str, int]) -> None:
    """Scripts often set torchrun's variables from SLURM's: then they must say the same."""
    for name, number in slurm.items():
        if name in environ and environ[name] != str(number):
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

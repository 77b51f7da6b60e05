"""What a launcher is handed and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.config.schema import InitMethod
from framework.launch.report import FailureReport
from framework.launch.warm import WarmServer
from framework.run_dir import RunDir
from framework.topology import Topology


@dataclass(frozen=True)
class LaunchPlan:
    """One run to start: `entry` ("module:function") is called in every rank as `entry(RankArguments)`."""

    entry: str
    run_dir: RunDir
    topology: Topology
    init_method: InitMethod
    start_timeout_s: float
    grace_s: float
    terminal: bool  # rank 0's output goes there as well as to its log
    warm: WarmServer | None


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its exit status, and a report where it failed."""

    status: int
    failure: FailureReport | None = None


@dataclass(frozen=True)
class RankArguments:
    """What one rank is told; everything else it reads from the run directory.

    `rendezvous` is a URL for `init_process_group`, or None for a group of one that meets nobody.
    """

    run_dir: str
    topology: Topology
    rank: int
    rendezvous: str | None

    @property
    def local_rank(self) -> int:
        return self.rank % self.topology.procs_per_node

    @property
    def node_rank(self) -> int:
        return self.rank // self.topology.procs_per_node

    def to_plain(self) -> dict[str, Any]:
        topology = self.topology
        return {
            "run_dir": self.run_dir,
            "topology": [topology.nnodes, topology.procs_per_node, topology.gpus_per_node, topology.span],
            "rank": self.rank,
            "rendezvous": self.rendezvous,
        }

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> RankArguments:
        topology = Topology(*plain["topology"])
        return RankArguments(plain["run_dir"], topology, rank=plain["rank"], rendezvous=plain["rendezvous"])


def rendezvous_url(method: InitMethod, *, host: str, port: int, folder: Path) -> str:
    """The URL that ranks meet at. With `env` and `tcp` it is the keeper's store, with `file` a file in `folder`.

    A rendezvous file can't be used twice, so `folder` must be new. torch cuts the path at `#` and `?` and undoes no
    quoting: it can't be in the run directory, which the user names.
    """
    return {
        InitMethod.ENV: "env://",
        InitMethod.TCP: f"tcp://{host}:{port}",
        InitMethod.FILE: f"file://{folder}/rendezvous",
    }[method]


def rank_environment(topology: Topology, *, rank: int, host: str, port: int) -> dict[str, str]:
    """The variables torchrun sets, for libraries that read them, and for `env://`.

    TORCHELASTIC_USE_AGENT_STORE makes every rank a client of the store at MASTER_ADDR:MASTER_PORT, also rank 0.
    """
    local_world = topology.procs_per_node
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % local_world),
        "GROUP_RANK": str(rank // local_world),
        "WORLD_SIZE": str(topology.world_size),
        "LOCAL_WORLD_SIZE": str(local_world),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }

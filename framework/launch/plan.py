"""What a launcher is handed and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.config.schema import InitMethod
from framework.launch.report import FailureReport
from framework.launch.warm import WarmServer
from framework.launch.watch import Limits
from framework.run_dir import RunDir
from framework.topology import Topology

if TYPE_CHECKING:
    from framework.launch.leader import Leader


@dataclass(frozen=True)
class LaunchPlan:
    """One run to start: `entry` ("module:function") is called in every rank as `entry(RankArguments, Link)`.

    It gives None when its work is done, EXIT_STOPPED when it was stopped on request and can be gone on with.
    """

    entry: str
    run_dir: RunDir
    topology: Topology
    init_method: InitMethod
    limits: Limits
    terminal: bool  # rank 0's output goes there as well as to its log
    warm: WarmServer | None
    node: int = 0  # this machine's
    endpoint: tuple[str, int] | None = None  # host and port of node 0, where several nodes meet
    max_restarts: int = 0
    leader: Leader | None = None  # in rank 0 of ranks that something else has started
    names: tuple[str, ...] = ()  # what every rank needs and the fork server doesn't load by itself


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its exit status, and a report where it failed.

    stopped_by: the signal for which it stopped, with EXIT_STOPPED. late: whom others waited for, and how long.
    restarts: how often it was started anew.
    """

    status: int
    failure: FailureReport | None = None
    stopped_by: int = 0
    late: tuple[Mapping[str, Any], ...] = ()
    restarts: int = 0


@dataclass(frozen=True)
class RankArguments:
    """What one rank is told; everything else it reads from the run directory.

    `rendezvous` is a URL for `init_process_group`, or None for a group of one that meets nobody. `attempt` counts the
    times the run was started anew after a failure; such a beginning goes on from the run's last checkpoint.
    """

    run_dir: str
    topology: Topology
    rank: int
    rendezvous: str | None
    attempt: int = 0

    @property
    def local_rank(self) -> int:
        return self.rank % self.topology.procs_per_node

    @property
    def node_rank(self) -> int:
        return self.rank // self.topology.procs_per_node

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> RankArguments:
        return RankArguments(**{**plain, "topology": Topology(**plain["topology"])})


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


def rank_environment(topology: Topology, *, rank: int, host: str, port: int, attempt: int = 0) -> dict[str, str]:
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
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }

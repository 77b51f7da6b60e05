"""What a launcher is given and returns, and what it gives to each rank."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import psutil

from framework.config.schema import InitMethod
from framework.config.topology import Topology
from framework.distributed.store import LOOPBACK
from framework.launch.handshake import ExternalRanks, RunSpec
from framework.monitoring.node_monitor import Limits
from framework.monitoring.rank_status import RankStatus
from framework.monitoring.report import FailureReport
from framework.system.files import read_text
from framework.system.run_dir import RunDir

if TYPE_CHECKING:
    from framework.distributed.store import RunStore
    from framework.launch.fork_server import ForkServer


@dataclass(frozen=True, kw_only=True)
class NodeSetup:
    """One node's place in a run, known before there is a run directory."""

    topology: Topology
    limits: Limits
    init_method: InitMethod
    fork_server: ForkServer | None  # None: one is started if the launcher needs it
    terminal: bool  # rank 0's output goes there as well as to its log
    node: int = 0  # this machine's
    endpoint: tuple[str, int] | None = None  # host and port of the store on node 0; None on one node
    max_restarts: int = 0
    # The arguments of the command, which must be the same on every node.
    arguments: tuple[str, ...] = ()
    # Set in rank 0 of ranks that something else has started.
    external_ranks: ExternalRanks | None = None


@dataclass(frozen=True, kw_only=True)
class LaunchPlan(NodeSetup):
    """One run to start: `entry` ("module:function") is called in every rank as `entry(RankArguments, MonitorLink)`.

    The entry returns None when its work is done, EXIT_STOPPED if it was stopped on request and can be resumed.
    """

    entry: str
    run_dir: RunDir
    names: tuple[str, ...] = ()  # of what every rank needs besides the fork server's preload

    def spec(self) -> RunSpec:
        """Return what other nodes, or other external ranks, need to run their part."""
        secrets = self.run_dir.secrets_file
        return RunSpec(
            entry=self.entry,
            run_dir=str(self.run_dir.path),
            topology=self.topology,
            limits=self.limits,
            config=read_text(self.run_dir.config_file),
            overrides=read_text(self.run_dir.overrides_file),
            secrets=read_text(secrets) if secrets.exists() else "",
        )


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its exit status, and a report if it failed."""

    status: int
    failure: FailureReport | None = None
    late: tuple[Mapping[str, Any], ...] = ()  # ranks that others waited for and that caught up


@dataclass(frozen=True)
class RankArguments:
    """What one rank is given; it reads everything else from the run directory."""

    run_dir: str
    topology: Topology
    rank: int
    rendezvous: str | None  # URL for `init_process_group`; None for a group of one without a store
    attempt: int = 0  # counts restarts after failures; they resume from the last checkpoint

    @property
    def local_rank(self) -> int:
        return self.rank % self.topology.procs_per_node

    @property
    def node_rank(self) -> int:
        return self.rank // self.topology.procs_per_node


@final
@dataclass(frozen=True)
class MonitorLink:
    """A rank's connections to the monitor: its status, and the run's store for requests to stop.

    `open_store` opens a new connection to the store; None for a rank in the command's own process.
    `record_failure` tells the monitor what ends this rank; the first call counts.
    """

    rank_status: RankStatus
    open_store: Callable[[], RunStore] | None = None
    record_failure: Callable[[BaseException], None] = lambda _error: None

    @property
    def is_watched(self) -> bool:
        """True if a launcher monitors the rank; False with `launcher=in_process`."""
        return self.open_store is not None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record an exception that leaves the block, before anything around it is closed.

        A library may abort the process while it closes: NCCL's watchdog does so 0.1 s after a GPU error.
        """
        try:
            yield
        except BaseException as error:
            self.record_failure(error)
            raise


def rank_environment(topology: Topology, *, rank: int, host: str, port: int, attempt: int = 0) -> dict[str, str]:
    """Return the variables that torchrun sets, for `env://` and for libraries that read them.

    With TORCHELASTIC_USE_AGENT_STORE, rank 0 too is a client of the store at MASTER_ADDR:MASTER_PORT.
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


_LOOPBACK = ("127.", "localhost")
_ELSEWHERE = "192.0.2.1"  # an address for documentation (RFC 5737): only the route is looked up


def network_environment(host: str, *, nnodes: int) -> dict[str, str]:
    """Return GLOO_SOCKET_IFNAME for ranks that meet at `host`, unless the user has set it: loopback on one node.

    Debian gives a machine's own name the address 127.0.1.1, so other nodes would connect to themselves. Empty if the
    interface isn't found: IPv6 only, or a system other than Linux.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    host = LOOPBACK if nnodes == 1 else host
    try:
        address = _own_address(host)
        if address.startswith(_LOOPBACK) and not host.startswith(_LOOPBACK):
            address = _own_address(_ELSEWHERE)  # node 0's own name is a loopback address
    except OSError:  # an unknown name, or no route
        return {}
    for interface, addresses in psutil.net_if_addrs().items():
        if address in [each.address for each in addresses]:
            return {"GLOO_SOCKET_IFNAME": interface}
    return {}


def _own_address(host: str) -> str:
    """Return the IPv4 address that this machine would send from. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # a datagram socket only looks up the route
        return str(probe.getsockname()[0])

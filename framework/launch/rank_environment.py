"""The environment variables that a rank gets."""

from __future__ import annotations

import os
import socket

import psutil

from framework.config.schema import LauncherConfig
from framework.config.topology import Topology
from framework.distributed.store import LOOPBACK
from framework.launch.base import launcher_class

_LOOPBACK = ("127.", "localhost")
# An address for documentation (RFC 5737): only the route to it is looked up.
_ELSEWHERE = "192.0.2.1"


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


def become_first_rank(launcher: LauncherConfig, topology: Topology) -> None:
    """Give this process the variables of rank 0, which the user's code may read, where it only looks at a training.

    A rank in the command's own process has none.
    """
    if not launcher_class(launcher).runs_in_command:
        os.environ.update(rank_environment(topology, rank=0, host=LOOPBACK, port=0))


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
            # Node 0's own name is a loopback address.
            address = _own_address(_ELSEWHERE)
    except OSError:
        # An unknown name, or no route.
        return {}
    for interface, addresses in psutil.net_if_addrs().items():
        if any(other.address == address for other in addresses):
            return {"GLOO_SOCKET_IFNAME": interface}
    return {}


def _own_address(host: str) -> str:
    """Return the IPv4 address that this machine would send from. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # A datagram socket only looks up the route.
        probe.connect((host, 9))
        return str(probe.getsockname()[0])

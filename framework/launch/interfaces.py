"""Find the network interface for gloo, which by default takes that of the host name, whatever it leads to."""

from __future__ import annotations

import os
import socket

import psutil

from framework.launch.environment import LOOPBACK

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

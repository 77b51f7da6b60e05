"""Which network device leads to the other nodes: gloo would take that of the machine's own name, often loopback."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from ipaddress import ip_address

_SIOCGIFADDR = 0x8915  # netdevice(7)
_ELSEWHERE = ("192.0.2.1", 9)  # of a network for documentation (RFC 5737); nothing is sent, only the route looked up


def network_environment(host: str, *, nnodes: int) -> dict[str, str]:
    """GLOO_SOCKET_IFNAME for ranks of several nodes that meet at `host`, where the user hasn't set it.

    Debian gives a machine's own name the address 127.0.1.1, so other nodes were told to connect to themselves.
    Empty on one node, and where the device isn't known: IPv6 only, or a system other than Linux.
    """
    if nnodes == 1 or "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    device = _device_towards(host)
    return {} if device is None else {"GLOO_SOCKET_IFNAME": device}


def _device_towards(host: str) -> str | None:
    address = _own_address((host, 9))
    if address is None:
        return None
    if _is_loopback(address) and not _is_loopback(host):
        address = _own_address(_ELSEWHERE)  # node 0 knows itself by a loopback address: by which does the world?
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if address is not None and _address(name) == address), None)


def _own_address(target: tuple[str, int]) -> str | None:
    """The address that this machine would send from."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(target)  # of a datagram socket: it looks up the route and sends nothing
        except OSError:
            return None
        address: str = probe.getsockname()[0]
        return address


def _is_loopback(host: str) -> bool:
    """Whether the user named the loopback device, as for nodes that are all on this machine."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _address(device: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", device.encode()[:15]))
        except OSError:  # it has no IPv4 address
            return None
    return socket.inet_ntoa(answer[20:24])

from __future__ import annotations

import socket

import pytest

from framework.launch import interfaces
from framework.launch.interfaces import network_environment

OUTWARD = next(
    (name for _, name in socket.if_nameindex() if interfaces._address(name) not in (None, "127.0.0.1")), None
)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


def test_one_node_needs_none() -> None:
    assert network_environment("192.0.2.77", nnodes=1) == {}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_nodes_that_meet_on_loopback_use_it(host: str) -> None:
    assert network_environment(host, nnodes=2) == {"GLOO_SOCKET_IFNAME": "lo"}


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert network_environment("127.0.0.1", nnodes=2) == {}


def test_a_name_that_nobody_knows_gives_none() -> None:
    assert network_environment("no-such-host.invalid", nnodes=2) == {}


@pytest.mark.skipif(OUTWARD is None, reason="this machine has no network device but loopback")
def test_a_machine_that_knows_itself_by_loopback_uses_the_device_that_leads_outward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert OUTWARD is not None
    own = interfaces._address(OUTWARD)
    routes = {"node0": "127.0.1.1", "192.0.2.1": own}
    monkeypatch.setattr(interfaces, "_own_address", lambda target: routes[target[0]])
    assert network_environment("node0", nnodes=2) == {"GLOO_SOCKET_IFNAME": OUTWARD}

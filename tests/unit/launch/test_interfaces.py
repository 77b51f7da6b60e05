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


@pytest.mark.parametrize(
    ("host", "nnodes", "set_by_user", "expected"),
    [
        ("192.0.2.77", 1, None, {}),
        ("127.0.0.1", 2, None, {"GLOO_SOCKET_IFNAME": "lo"}),
        ("localhost", 2, None, {"GLOO_SOCKET_IFNAME": "lo"}),
        ("127.0.0.1", 2, "ib0", {}),
        ("no-such-host.invalid", 2, None, {}),
    ],
)
def test_nodes_meet_on_the_device_of_the_endpoint_unless_the_user_names_one(
    monkeypatch: pytest.MonkeyPatch, host: str, nnodes: int, set_by_user: str | None, expected: dict[str, str]
) -> None:
    if set_by_user is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", set_by_user)
    assert network_environment(host, nnodes=nnodes) == expected


@pytest.mark.skipif(OUTWARD is None, reason="this machine has no network device but loopback")
def test_a_machine_that_knows_itself_by_loopback_uses_the_device_that_leads_outward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert OUTWARD is not None
    own = interfaces._address(OUTWARD)
    routes = {"node0": "127.0.1.1", "192.0.2.1": own}
    monkeypatch.setattr(interfaces, "_own_address", lambda target: routes[target[0]])
    assert network_environment("node0", nnodes=2) == {"GLOO_SOCKET_IFNAME": OUTWARD}

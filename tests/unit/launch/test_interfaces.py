from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.helpers.internals import network_environment


@dataclass(frozen=True, kw_only=True)
class Network:
    host: str
    nnodes: int = 2
    set_by_user: str | None = None
    expected: dict[str, str]


@pytest.mark.parametrize(
    "network",
    [
        Network(host="192.0.2.77", nnodes=1, expected={"GLOO_SOCKET_IFNAME": "lo"}),
        Network(host="127.0.0.1", expected={"GLOO_SOCKET_IFNAME": "lo"}),
        Network(host="localhost", expected={"GLOO_SOCKET_IFNAME": "lo"}),
        Network(host="127.0.0.1", set_by_user="ib0", expected={}),
        Network(host="no-such-host.invalid", expected={}),
    ],
)
def test_nodes_meet_on_the_endpoints_device(monkeypatch: pytest.MonkeyPatch, network: Network) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if network.set_by_user is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", network.set_by_user)
    assert network_environment(network.host, nnodes=network.nnodes) == network.expected

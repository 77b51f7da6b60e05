from __future__ import annotations

import pytest

from tests.helpers.internals import network_environment


@pytest.mark.parametrize(
    ("host", "nnodes", "set_by_user", "expected"),
    [
        ("192.0.2.77", 1, None, {"GLOO_SOCKET_IFNAME": "lo"}),
        ("127.0.0.1", 2, None, {"GLOO_SOCKET_IFNAME": "lo"}),
        ("localhost", 2, None, {"GLOO_SOCKET_IFNAME": "lo"}),
        ("127.0.0.1", 2, "ib0", {}),
        ("no-such-host.invalid", 2, None, {}),
    ],
)
def test_nodes_meet_on_the_endpoints_device(
    monkeypatch: pytest.MonkeyPatch, host: str, nnodes: int, set_by_user: str | None, expected: dict[str, str]
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if set_by_user is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", set_by_user)
    assert network_environment(host, nnodes=nnodes) == expected

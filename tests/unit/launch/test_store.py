"""What is read from the run's store was written by this run, and its port is open where it is used."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from tests.helpers.internals import SECRET, RunStore, UnverifiedError, listen


def test_a_value_needs_its_secret_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setenv(SECRET, "one")
    ours = RunStore(store)
    ours.set("alarm", {"node": 1})
    assert ours.get("alarm") == {"node": 1}
    assert RunStore(store).get("report") is None
    for secret in ("other", ""):
        monkeypatch.setenv(SECRET, secret)
        with pytest.raises(UnverifiedError, match=f"alarm in the run's store was refused(.|\n)*{SECRET}"):
            RunStore(store).get("alarm")
    for forged in ("true", "0" * 64 + "true", store.get("framework/0/alarm").decode()):
        store.set("framework/0/report", forged)
        with pytest.raises(UnverifiedError):
            ours.get("report")


def test_a_store_listens_where_it_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(host: str) -> str:
        with listen(host, 0) as listener:
            return str(listener.getsockname()[0])

    assert [address(host) for host in ("127.0.0.1", "localhost", "127.0.0.2")] == ["127.0.0.1"] * 2 + ["127.0.0.2"]
    with pytest.raises(OSError, match="Cannot assign"):
        # The address is reserved for documentation: nobody has it.
        address("192.0.2.1")
    found = socket.getaddrinfo("127.0.1.1", 0, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert address("debian") == "0.0.0.0"

"""The server that ranks are forked from: what it reports of its children, what they have, and that none outlives it."""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from framework.errors import LaunchError, RunError
from tests.helpers import processes
from tests.helpers.internals import Child, ForkServer, Message, OwnForkServer, RunServer, call_in_child
from tests.helpers.stopping import wait_until

DEADLINE_S = 60.0


@pytest.fixture
def start() -> Iterator[Callable[..., RunServer]]:
    """Start a server for a run."""
    servers: list[ForkServer | RunServer] = []

    def call(*preload: str) -> RunServer:
        parent = OwnForkServer(preload)
        servers.append(parent)
        server = parent.fork()
        servers.append(server)
        return server

    yield call
    for server in servers:
        server.close()


def child(entry: str, *, key: str = "one", log: Path | None = None, **arguments: Any) -> Child:
    return Child(f"tests.unit.launch.fork_entries:{entry}", arguments, log=log, key=key)


def ends(server: RunServer, *, count: int = 1) -> dict[str, Message]:
    """The next ends of children: key → event."""
    events: list[Message] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(events) < count:
        left = deadline - time.monotonic()
        assert left > 0, f"only these ended: {events}"
        if select.select([server], [], [], left)[0]:
            events.append(server.next_event())
    return {event["key"]: event for event in events}


def waiting(server: RunServer, folder: Path, *keys: str) -> list[psutil.Process]:
    """Children of these keys that wait to be killed."""
    for key in keys:
        server.spawn(child("wait_long", key=key, ready=str(folder / key)))
    wait_until(lambda: all((folder / key).exists() for key in keys))
    return [psutil.Process(int((folder / key).read_text())) for key in keys]


def settled(children: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that still run after the deadline."""

    def running() -> list[psutil.Process]:
        return [each for each in children if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]

    return processes.settle(running, within_s=DEADLINE_S)


def test_every_ending_has_its_status_and_output(
    start: Callable[..., RunServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that can't be loaded is the failure of the child that needs it."""
    (tmp_path / "broken_library.py").write_text("raise OSError('libcudart.so: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = start("broken_library")
    # None: a rank that leaves in the middle of a training has not finished it
    ways = {"raise": 1, "kill": -signal.SIGKILL, "no data here": 1, None: 1, 4: 4}
    for how in ways:
        server.spawn(child("end", key=str(how), log=tmp_path / str(how), how=how))
    server.spawn(Child("no_such_module:main", {}, key="missing"))
    ended = {key: event["status"] for key, event in ends(server, count=6).items()}
    assert ended == {**{str(how): status for how, status in ways.items()}, "missing": 1}
    logs = {str(how): (tmp_path / str(how)).read_text() for how in ways}
    assert all("from a descriptor\n" in text and "printed" in text for text in logs.values())
    assert "ValueError: a mistake in the child" in logs["raise"]
    assert "no data here" in logs["no data here"]


def test_a_signal_reaches_only_its_child(start: Callable[..., RunServer], tmp_path: Path) -> None:
    server = start()
    _, other = waiting(server, tmp_path, "one", "other")
    server.kill("never")
    server.kill("one")
    assert {key: event["status"] for key, event in ends(server).items()} == {"one": -signal.SIGKILL}
    # A key may be reused; requests are served in order.
    server.spawn(child("end", how=5))
    assert ends(server)["one"]["status"] == 5
    assert other.is_running()
    server.close()
    # The child ignores SIGTERM and is ended nevertheless.
    assert settled([other]) == []


def test_a_dead_server_is_noticed_and_ends_children(start: Callable[..., RunServer], tmp_path: Path) -> None:
    server = start()
    children = waiting(server, tmp_path, "one")
    parent = children[0].parent()
    assert parent is not None
    parent.kill()
    with pytest.raises(LaunchError, match="The process that forks the ranks ended"):
        ends(server)
    assert settled(children) == []
    with pytest.raises(LaunchError, match="ended"):
        server.spawn(child("end", how=0))


def test_a_command_may_leave_without_the_answer(
    start: Callable[..., RunServer], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The server ends everything once, and prints what the children left behind, as nobody else can."""
    server = start()
    children = waiting(server, tmp_path, "one", "other")
    parent = children[0].parent()
    assert parent is not None
    server.spawn(child("leave_behind", key="leaver", started=str(tmp_path / "left")))
    assert ends(server)["leaver"]["status"] == 0
    pid = int((tmp_path / "left").read_text())
    server.end()
    server.close()
    assert settled([parent, *children]) == []
    assert capfd.readouterr().err == f"Left behind by the ranks, and ended: pid {pid} (sleep 120)\n"


def test_a_child_cleans_up_only_what_it_has_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that was loaded before keeps a temporary folder for every child."""
    (tmp_path / "keeps_folder.py").write_text(
        f"import tempfile\nFOLDER = tempfile.TemporaryDirectory(dir={str(tmp_path)!r})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    kept = set()
    with closing(OwnForkServer(())) as parent:
        parent.load(["keeps_folder"])
        with closing(parent.fork()) as server:
            for key in ("one", "two"):
                seen = tmp_path / key
                server.spawn(child("see_folders", key=key, seen=str(seen), place=str(tmp_path)))
                assert ends(server)[key]["status"] == 0
                of_library, own = seen.read_text().splitlines()
                kept.add(of_library)
                assert not Path(own).exists()
    (folder,) = kept
    assert Path(folder).is_dir()


@pytest.mark.parametrize(
    ("entry", "says"),
    [("signal:raise_signal", "was killed by SIGSEGV."), ("math:sqrt", "ended without an answer; its error is above.")],
)
def test_how_a_child_has_ended_is_said(entry: str, says: str) -> None:
    arguments: Any = signal.SIGSEGV if entry.startswith("signal") else -1.0
    with closing(OwnForkServer(())) as parent, pytest.raises(RunError, match=says):
        call_in_child(parent, entry, arguments, timeout_s=DEADLINE_S)

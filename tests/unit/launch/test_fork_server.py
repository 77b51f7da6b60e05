"""The server that ranks are forked from: what it tells of its children, what they have, and that none outlives it."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

import framework
from framework.errors import LaunchError
from framework.launch.warm import Child, WarmServer
from framework.launch.wire import Message
from tests.helpers import processes

_DEADLINE_S = 60.0
ROOT = Path(framework.__file__).parents[1]


@pytest.fixture
def start() -> Iterator[Callable[..., WarmServer]]:
    """Starts servers that are closed at the end."""
    servers: list[WarmServer] = []

    def call(preload: Sequence[str] = ()) -> WarmServer:
        servers.append(WarmServer.start(preload))
        return servers[-1]

    yield call
    for server in servers:
        server.close()


@pytest.fixture
def server(start: Callable[..., WarmServer]) -> WarmServer:
    return start()


def child(entry: str, *, key: str = "one", log: Path | None = None, **arguments: Any) -> Child:
    return Child(key, f"tests.unit.launch.fork_entries:{entry}", arguments, log=log)


def ends(server: WarmServer, *, count: int = 1) -> dict[str, Message]:
    """The next ends of children: key → event."""
    events: list[Message] = []
    deadline = time.monotonic() + _DEADLINE_S
    while len(events) < count:
        left = deadline - time.monotonic()
        assert left > 0, f"only these ended: {events}"
        if select.select([server], [], [], left)[0]:
            events += server.events()
    assert len(events) == count
    return {event["key"]: event for event in events}


def status_of(server: WarmServer, wanted: Child) -> int:
    server.spawn(wanted)
    status: int = ends(server)[wanted.key]["status"]
    return status


def wait_for(path: Path) -> int:
    """The process id in a file that a child writes once it is ready."""
    deadline = time.monotonic() + _DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline, "the child wasn't ready in time"
        time.sleep(0.01)
    return int(path.read_text())


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("how", "status", "logged"),
    [
        ("raise", 1, "ValueError: a mistake in the child"),
        ("kill", -signal.SIGKILL, ""),
        (4, 4, ""),
        (None, 1, ""),  # a rank that leaves in the middle of a training has not finished it
        ("no data here", 1, "no data here"),
    ],
)
def test_every_way_to_end_has_its_status_and_the_output_is_kept(
    server: WarmServer, tmp_path: Path, how: object, status: int, logged: str
) -> None:
    with (tmp_path / "given").open("w") as file:
        server.spawn(child("end", key="one", log=tmp_path / "log", how=how), fd=file.fileno())
    server.spawn(child("describe", key="other", file=str(tmp_path / "seen")))
    before = time.time()
    ended = ends(server, count=2)
    assert {key: event["status"] for key, event in ended.items()} == {"one": status, "other": 0}
    assert before - 1.0 <= ended["one"]["time"] <= time.time()
    text = (tmp_path / "log").read_text()
    assert "from a descriptor\n" in text
    assert "printed" in text
    assert logged in text
    assert (tmp_path / "given").read_text() == "to the descriptor"
    assert json.loads((tmp_path / "seen").read_text())["fd"] is None


@pytest.mark.parametrize("entry", ["tests.unit.launch.fork_entries:missing", "no_such_module:main"])
def test_an_entry_that_is_not_there_fails(server: WarmServer, entry: str) -> None:
    assert status_of(server, Child("one", entry, {})) == 1


@pytest.mark.parametrize("users", [None, "ACTIVE"])
def test_openmp_does_not_spin_if_cores_are_shared_unless_the_user_says_so(
    start: Callable[..., WarmServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, users: str | None
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if users is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", users)
    monkeypatch.setattr("framework.launch.warm.openmp_environment", lambda: {"OMP_WAIT_POLICY": "PASSIVE"})
    assert status_of(start(), child("describe", file=str(tmp_path / "seen"))) == 0
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen["environment"]["OMP_WAIT_POLICY"] == (users or "PASSIVE")


def test_a_child_has_nothing_of_the_servers_own(server: WarmServer, tmp_path: Path) -> None:
    """Its socket kept open would hide the server's end, its signal set-up would wake the wrong process."""
    assert status_of(server, child("describe", file=str(tmp_path / "seen"))) == 0
    seen = json.loads((tmp_path / "seen").read_text())
    assert (seen["sockets"], seen["wakeup_fd"], seen["sigchld"]) == ([], -1, True)
    assert seen["parent"] == server._process.pid


def test_a_signal_reaches_only_the_child_of_that_key(server: WarmServer, tmp_path: Path) -> None:
    for key in ("one", "other"):
        server.spawn(child("wait_long", key=key, ready=str(tmp_path / key)))
        wait_for(tmp_path / key)
    server.kill("one", signal.SIGTERM)
    assert {key: event["status"] for key, event in ends(server).items()} == {"one": -signal.SIGTERM}
    for key in ("one", "never"):
        server.kill(key, signal.SIGKILL)
    # Requests are served in order: this one's answer comes after both. A key may be used again.
    assert status_of(server, child("leave_with", key="one", status=5)) == 5
    assert is_alive(int((tmp_path / "other").read_text()))
    server.kill("other", signal.SIGKILL)
    assert ends(server)["other"]["status"] == -signal.SIGKILL


def test_many_children_that_end_at_the_same_time_are_all_reported(server: WarmServer) -> None:
    """Signals of the same kind aren't counted by the kernel, so one wake-up may stand for several ends."""
    keys = [str(number) for number in range(12)]
    for key in keys:
        server.spawn(child("leave_with", key=key, status=int(key)))
    assert {key: event["status"] for key, event in ends(server, count=12).items()} == {key: int(key) for key in keys}


def modules(folder: Path, **sources: str) -> None:
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)


def test_children_find_loaded_what_is_named_and_what_fails_to_load_ends_nothing(
    start: Callable[..., WarmServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is served between two imports; `load` has the rest done before the next child. A library that can't be
    loaded is an OSError: the child that needs it reports it as its own failure."""
    gate = "import pathlib, time\nwhile not pathlib.Path(__file__ + '.open').exists(): time.sleep(0.01)\n"
    modules(
        tmp_path,
        broken_library="raise OSError('libcudart.so: cannot open shared object file')\n",
        first=gate,
        other="",
        lazy="def __getattr__(name):\n    global got\n    got = name\n",
        asks="import sys\ndef main(arguments, fd): return 10 + sys.modules['lazy'].got.count('Name')\n",
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = start(["first", "other"])
    monkeypatch.syspath_prepend(tmp_path)
    server.spawn(child("describe", file=str(tmp_path / "seen")))
    (tmp_path / "first.py.open").touch()
    assert ends(server)["one"]["status"] == 0
    assert "other" not in json.loads((tmp_path / "seen").read_text())["modules"]
    server.load(["lazy.Name", "no_such_module_anywhere"])
    assert status_of(server, child("describe", file=str(tmp_path / "seen"))) == 0
    assert {"first", "other", "lazy"} <= set(json.loads((tmp_path / "seen").read_text())["modules"])
    assert status_of(server, Child("one", "asks:main", {})) == 11
    assert status_of(start(["broken_library"]), child("leave_with", status=3)) == 3


def test_closing_ends_every_child_also_one_that_ignores_sigterm(server: WarmServer, tmp_path: Path) -> None:
    pids = []
    for key in ("one", "other"):
        server.spawn(child("wait_long", key=key, stubborn=True, ready=str(tmp_path / key)))
        pids.append(wait_for(tmp_path / key))
    server.close()
    assert server._process.poll() is not None
    assert processes.settle(lambda: [pid for pid in pids if is_alive(pid)], within_s=_DEADLINE_S) == []
    server.close()


def test_the_end_of_the_server_is_noticed(server: WarmServer, tmp_path: Path) -> None:
    server.spawn(child("wait_long", ready=str(tmp_path / "ready")))
    pid = wait_for(tmp_path / "ready")
    server._process.kill()
    with pytest.raises(LaunchError, match=r"The fork server \(pid \d+\) ended"):
        ends(server)
    assert processes.settle(lambda: [pid] if is_alive(pid) else [], within_s=_DEADLINE_S) == []
    with pytest.raises(LaunchError, match="ended"):
        server.spawn(child("leave_with", status=0))


_PARENT = """
import sys, time
from framework.launch.warm import Child, WarmServer
server = WarmServer.start([])
server.spawn(Child("one", "tests.unit.launch.fork_entries:wait_long", {"ready": sys.argv[1]}))
print(server._process.pid, flush=True)
time.sleep(60)
"""


def test_the_end_of_the_parent_ends_the_server_and_its_children(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PARENT, str(tmp_path / "ready")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        server_pid = int(parent.stdout.readline())
        pids = [server_pid, wait_for(tmp_path / "ready")]
        assert all(is_alive(pid) for pid in pids)
        parent.kill()
        assert processes.settle(lambda: [pid for pid in pids if is_alive(pid)], within_s=_DEADLINE_S) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_signals_that_ask_a_run_to_stop_end_children_but_not_the_server(
    server: WarmServer, tmp_path: Path, number: signal.Signals
) -> None:
    """Schedulers send them to every process of a job; the parent decides for all."""
    server.spawn(child("leave_with", key="first", status=0))
    assert ends(server)["first"]["status"] == 0  # it serves by now
    server._process.send_signal(number)
    server.spawn(child("wait_long", ready=str(tmp_path / "ready")))
    wait_for(tmp_path / "ready")
    server.kill("one", number)
    assert ends(server)["one"]["status"] == (1 if number == signal.SIGINT else -number)
    assert server.alive

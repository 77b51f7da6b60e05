from __future__ import annotations

import json
import os
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

_DEADLINE_S = 20.0
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
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, "the child wasn't ready in time"
        time.sleep(0.01)
    return int(path.read_text())


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("status", [0, 1, 75])
def test_an_exit_status_is_passed_on(server: WarmServer, status: int) -> None:
    before = time.time()
    server.spawn(child("leave_with", status=status))
    event = ends(server)["one"]
    assert event["event"] == "exited"
    assert event["status"] == status
    assert before <= event["time"] <= time.time()


def test_every_way_to_end_has_its_status(server: WarmServer) -> None:
    assert status_of(server, child("fail")) == 1
    assert status_of(server, child("kill_itself")) == -signal.SIGKILL
    assert status_of(server, child("exit_early", code=4)) == 4
    assert status_of(server, Child("one", "tests.unit.launch.fork_entries:missing", {})) == 1
    assert status_of(server, Child("one", "no_such_module:main", {})) == 1


def test_a_mistake_keeps_its_traceback_in_the_log(server: WarmServer, tmp_path: Path) -> None:
    status_of(server, child("fail", log=tmp_path / "log"))
    text = (tmp_path / "log").read_text()
    assert text.startswith("Traceback")
    assert "ValueError: a mistake in the child" in text


def test_leaving_without_a_status_is_no_success(server: WarmServer) -> None:
    """A rank that leaves in the middle of a training has not finished it."""
    assert status_of(server, child("exit_early", code=None)) == 1


def test_sys_exit_with_a_text_shows_it(server: WarmServer, tmp_path: Path) -> None:
    assert status_of(server, child("exit_early", log=tmp_path / "log", code="no data here")) == 1
    assert "no data here" in (tmp_path / "log").read_text()


def test_what_is_printed_is_flushed_and_descriptors_are_logged_too(server: WarmServer, tmp_path: Path) -> None:
    status_of(server, child("say", log=tmp_path / "log"))
    text = (tmp_path / "log").read_text()
    assert "unflushed" in text
    assert "from a descriptor\n" in text


def test_a_child_lives_in_the_parents_present_world(
    server: WarmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SET_AFTER_THE_START", "yes")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(sys, "argv", ["framework", "recipe=some"])
    wanted = child("describe", file=str(tmp_path / "seen"), read_stdin=True)
    server.spawn(Child(wanted.key, wanted.entry, wanted.arguments, environment={"RANK": "3"}))
    assert ends(server)["one"]["status"] == 0
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen["cwd"] == str(tmp_path)
    assert seen["argv"] == ["framework", "recipe=some"]
    assert seen["environment"]["SET_AFTER_THE_START"] == "yes"
    assert seen["environment"]["RANK"] == "3"
    assert "HOME" not in seen["environment"]
    assert seen["environment"]["OPENBLAS_NUM_THREADS"] == os.environ.get("OPENBLAS_NUM_THREADS", "1")
    assert seen["stdin"] == ""
    assert seen["fd"] is None


@pytest.mark.parametrize("users", [None, "ACTIVE"])
def test_openmp_is_told_not_to_spin_where_cores_are_shared_unless_the_user_has_said(
    start: Callable[..., WarmServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, users: str | None
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if users is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", users)
    monkeypatch.setattr("framework.launch.warm.openmp_environment", lambda: {"OMP_WAIT_POLICY": "PASSIVE"})
    wanted = child("describe", file=str(tmp_path / "seen"), read_stdin=True)
    assert status_of(start(), wanted) == 0
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen["environment"]["OMP_WAIT_POLICY"] == (users or "PASSIVE")


def test_a_child_has_nothing_of_the_servers_own(server: WarmServer, tmp_path: Path) -> None:
    """Its socket kept open would hide the server's end, its signal set-up would wake the wrong process."""
    status_of(server, child("describe", file=str(tmp_path / "seen")))
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen["sockets"] == []
    assert seen["wakeup_fd"] == -1
    assert seen["sigchld"]
    assert seen["parent"] == server._process.pid


def test_a_file_descriptor_is_handed_to_the_child_that_asked(server: WarmServer, tmp_path: Path) -> None:
    with (tmp_path / "given").open("w") as file:
        server.spawn(child("write_to_fd", key="writer"), fd=file.fileno())
        server.spawn(child("describe", key="other", file=str(tmp_path / "seen")))
        ended = ends(server, count=2)
    assert [event["status"] for event in ended.values()] == [0, 0]
    assert (tmp_path / "given").read_text() == "hello"
    assert json.loads((tmp_path / "seen").read_text())["fd"] is None


def test_a_signal_reaches_the_child_of_that_key_alone(server: WarmServer, tmp_path: Path) -> None:
    for key in ("one", "other"):
        server.spawn(child("wait_long", key=key, ready=str(tmp_path / key)))
        wait_for(tmp_path / key)
    server.kill("one", signal.SIGTERM)
    assert {key: event["status"] for key, event in ends(server).items()} == {"one": -signal.SIGTERM}
    assert is_alive(int((tmp_path / "other").read_text()))
    server.kill("other", signal.SIGKILL)
    assert ends(server)["other"]["status"] == -signal.SIGKILL


def test_a_key_that_has_ended_or_never_was_is_not_killed(server: WarmServer, tmp_path: Path) -> None:
    assert status_of(server, child("leave_with", key="one", status=0)) == 0
    server.spawn(child("wait_long", key="other", ready=str(tmp_path / "other")))
    pid = wait_for(tmp_path / "other")
    server.kill("one", signal.SIGKILL)
    server.kill("never", signal.SIGKILL)
    # Requests are served in order: this one's answer comes after both.
    assert status_of(server, child("leave_with", key="after", status=5)) == 5
    assert is_alive(pid)
    assert server._process.poll() is None


def test_a_key_may_be_used_again(server: WarmServer, tmp_path: Path) -> None:
    assert status_of(server, child("leave_with", status=0)) == 0
    server.spawn(child("wait_long", ready=str(tmp_path / "ready")))
    wait_for(tmp_path / "ready")
    server.kill("one", signal.SIGKILL)
    assert ends(server)["one"]["status"] == -signal.SIGKILL


def test_many_children_that_end_at_once_are_all_reported(server: WarmServer) -> None:
    """Signals of the same kind aren't counted by the kernel, so one wake-up may stand for several ends."""
    keys = [str(number) for number in range(12)]
    for key in keys:
        server.spawn(child("leave_with", key=key, status=int(key)))
    assert {key: event["status"] for key, event in ends(server, count=12).items()} == {key: int(key) for key in keys}


def modules(folder: Path, **sources: str) -> None:
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)


def test_a_missing_module_to_preload_ends_nothing(start: Callable[..., WarmServer]) -> None:
    server = start(["json", "no_such_module_anywhere", "colorsys"])
    assert status_of(server, child("leave_with", status=3)) == 3


@pytest.mark.parametrize("error", ["OSError('libcudart.so: cannot open shared object file')", "RuntimeError('odd')"])
def test_a_module_that_fails_to_load_ends_nothing(
    start: Callable[..., WarmServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """A library that can't be loaded is an OSError. The child that needs it reports it as its own failure."""
    modules(tmp_path, broken_library=f"raise {error}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = start(["broken_library"])
    time.sleep(0.3)
    assert status_of(server, child("leave_with", status=3)) == 3


def test_children_find_loaded_what_was_preloaded(
    start: Callable[..., WarmServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules(
        tmp_path,
        heavy="import os\nPID = os.getpid()\n",
        asks="import heavy, os\ndef main(arguments, fd): return 10 if heavy.PID == os.getppid() else 20\n",
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = start(["heavy"])
    monkeypatch.syspath_prepend(tmp_path)
    assert status_of(server, Child("warm-up", "asks:main", {})) in (10, 20)
    assert status_of(server, Child("one", "asks:main", {})) == 10


def test_what_is_to_be_loaded_is_there_before_the_next_child(
    start: Callable[..., WarmServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what is left of the server's own; a name in a module is one too, and one that fails ends nothing."""
    noted = "import os, time\ntime.sleep(0.2)\nPID = os.getpid()\n"
    asks = "import sys\nfirst, other, lazy = (sys.modules.get(n) for n in ('first', 'other', 'lazy'))\n"
    modules(
        tmp_path,
        first=noted,
        other=noted,
        lazy="def __getattr__(name):\n    global got\n    got = name\n",
        asks=f"{asks}def main(arguments, fd): return 10 if first and other and lazy.got == 'Name' else 20\n",
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = start(["first", "other"])
    monkeypatch.syspath_prepend(tmp_path)
    server.load(["lazy.Name", "no_such_module_anywhere"])
    assert status_of(server, Child("one", "asks:main", {})) == 10


def test_a_request_is_served_between_two_imports(
    start: Callable[..., WarmServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = "import time\nfrom pathlib import Path\ntime.sleep(0.3)\nPath(__file__ + '.loaded').touch()\n"
    modules(tmp_path, **{f"slow_{number}": slow for number in range(8)})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = start([f"slow_{number}" for number in range(8)])
    assert status_of(server, child("leave_with", status=3)) == 3
    assert len(list(tmp_path.glob("*.loaded"))) < 8


def test_closing_ends_every_child_even_one_that_ignores_requests(server: WarmServer, tmp_path: Path) -> None:
    pids = []
    for key in ("one", "other"):
        server.spawn(child("wait_long", key=key, stubborn=True, ready=str(tmp_path / key)))
        pids.append(wait_for(tmp_path / key))
    server.close()
    assert server._process.poll() is not None
    assert processes.settle(lambda: [pid for pid in pids if is_alive(pid)], within_s=5.0) == []
    server.close()


def test_the_end_of_the_server_is_told(server: WarmServer, tmp_path: Path) -> None:
    server.spawn(child("wait_long", ready=str(tmp_path / "ready")))
    pid = wait_for(tmp_path / "ready")
    server._process.kill()
    with pytest.raises(LaunchError, match=r"The fork server \(pid \d+\) ended"):
        ends(server)
    assert processes.settle(lambda: [pid] if is_alive(pid) else [], within_s=5.0) == []
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
        assert processes.settle(lambda: [pid for pid in pids if is_alive(pid)], within_s=5.0) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_signals_that_ask_a_run_to_stop_end_children_but_not_the_server(
    server: WarmServer, tmp_path: Path, number: signal.Signals
) -> None:
    """Schedulers send them to every process of a job; the parent decides for all."""
    server.spawn(child("leave_with", key="first", status=0))
    assert ends(server)["first"]["status"] == 0  # it serves by now
    server._process.send_signal(number)
    ready = tmp_path / "ready"
    server.spawn(child("wait_long", ready=str(ready)))
    deadline = time.monotonic() + _DEADLINE_S
    while not ready.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.kill("one", number)
    assert ends(server)["one"]["status"] == (1 if number == signal.SIGINT else -number)
    assert server.alive

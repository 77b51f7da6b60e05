"""Several hosts on one machine: network namespaces on a switch, each with its own addresses and host name.

The switch is a namespace with a bridge, so nothing of it is seen outside and any number of networks may use the same
addresses. Names hold the pid and start time of who made them: what a killed test has left is cleared by the next one.
Needs root and iproute2.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import final

from tests.helpers.command import Started, started_program

_PREFIX = "fxt"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-")
# `ip netns exec NAME` shows what lies in NAME/ here as /etc.
_CONFIG = Path("/etc/netns")
_LIMIT_S = 20.0
_PROGRAMS = ("ip", "unshare", "hostname")
_count = itertools.count()


@cache
def why_not() -> str | None:
    """Why there can be no network namespaces here; None where there can."""
    lacking = [program for program in _PROGRAMS if shutil.which(program) is None]
    if lacking:
        return f"no {' and no '.join(lacking)} found. On Debian: apt-get install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with network(1) as (host,), host.started("true") as started:
            started.wait(timeout=_LIMIT_S)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces can't be made here: {error} {getattr(error, 'stderr', '')}".strip()
    return None


@final
@dataclass(frozen=True)
class Host:
    """One host of a network. `namespace` is its name for `ip netns`, `name` and `address` those the others know."""

    namespace: str
    name: str
    address: str
    switch: str
    port: str

    def command(self, *command: str) -> list[str]:
        """What runs `command` on this host: as the same process, under the host's own name."""
        renamed = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.name]
        return ["ip", "netns", "exec", self.namespace, *renamed, *command]

    @contextmanager
    def started(
        self, *command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> Iterator[Started]:
        """`command`, running on this host; see `started_program`."""
        with started_program(*self.command(*command), cwd=cwd, env=env) as started:
            yield started

    @contextmanager
    def started_framework(
        self, *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> Iterator[Started]:
        """`python -m framework` with these arguments, running on this host."""
        with self.started(sys.executable, "-m", "framework", *arguments, cwd=cwd, env=env) as started:
            yield started

    def cut(self) -> None:
        """Let whatever this host sends, and is sent, vanish at the switch: to either end the link looks whole."""
        _ip("-netns", self.switch, "link", "set", self.port, "nomaster")


@contextmanager
def network(num_hosts: int) -> Iterator[list[Host]]:
    """Hosts that reach each other by address and by name; at the end they are gone, with all that runs on them.

    Raises CalledProcessError where the system refuses.
    """
    _remove_leftovers()
    prefix = _own_prefix() + str(next(_count))
    switch = f"{prefix}-switch"
    numbers = range(1, num_hosts + 1)
    hosts = [Host(f"{prefix}-{i}", f"host{i}", f"10.77.0.{i}", switch=switch, port=f"port{i}") for i in numbers]
    try:
        _ip("netns", "add", switch)
        _ip("-netns", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-netns", switch, "link", "set", "bridge", "up")
        for host in hosts:
            _make_host(host, hosts)
        yield hosts
    finally:
        for name in (*(host.namespace for host in hosts), switch):
            _remove(name)


def _make_host(host: Host, hosts: list[Host]) -> None:
    folder = _CONFIG / host.namespace
    folder.mkdir(parents=True)
    known = "".join(f"{each.address} {each.name}\n" for each in hosts)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
    _ip("netns", "add", host.namespace)
    peer = ("peer", "name", host.port, "netns", host.switch)
    _ip("link", "add", "eth0", "netns", host.namespace, "type", "veth", *peer)
    _ip("-netns", host.switch, "link", "set", host.port, "master", "bridge", "up")
    inside = ("-netns", host.namespace)
    _ip(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _ip(*inside, "link", "set", device, "up")


def _remove(name: str) -> None:
    """Kill what runs in a namespace, and delete it; nothing where there is none."""
    if name in namespaces():
        pids = [int(word) for word in _ip("netns", "pids", name).split()]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _ip("netns", "delete", name)
    shutil.rmtree(_CONFIG / name, ignore_errors=True)
    with suppress(OSError):
        # Folders of others may be in it, or it doesn't exist.
        _CONFIG.rmdir()


def _remove_leftovers() -> None:
    """Clear away the namespaces of processes that were killed before they could."""
    names = namespaces()
    if _CONFIG.is_dir():
        names |= {folder.name for folder in _CONFIG.iterdir()}
    for name in names:
        owner = _NAME.match(name)
        if owner and _start_ticks(int(owner[1])) != int(owner[2]):
            _remove(name)


def namespaces() -> set[str]:
    """Return the namespaces that this module has made, in any process."""
    lines = _ip("netns", "list").splitlines()
    return {line.split()[0] for line in lines if line.startswith(f"{_PREFIX}-")}


def _own_prefix() -> str:
    return f"{_PREFIX}-{os.getpid()}-{_start_ticks(os.getpid())}-"


def _start_ticks(pid: int) -> int | None:
    """When the process began, in the kernel's ticks; None where there is none. A pid is used again, not with this."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def _ip(*arguments: str) -> str:
    """What `ip` prints. Raises CalledProcessError where it fails."""
    done = subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=_LIMIT_S)
    return done.stdout

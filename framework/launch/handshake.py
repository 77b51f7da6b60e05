"""How ranks, or nodes, that were started one by one agree on what to run.

"Number" means the rank or the node. Only number 0 composes the configuration. It writes a fingerprint of what it was
started with to the store. The others compare theirs with it, and write the differences. Number 0 reads them and sends
all the same answer: what to run, or an exit status.

    handshake/fingerprint     of number 0
    handshake/here/N          {host, differences}
    handshake/answer          {spec} or {status}
    handshake/left/N          number N doesn't need the store any more
    handshake/met/N           number N has come to this attempt
    handshake/all_met         all have
    handshake/done/N          number N has done its work
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import os
import platform
import shlex
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from framework.config.assets import config_dir, user_config_dir
from framework.config.saved import resume_argument
from framework.config.topology import Topology
from framework.distributed.store import (
    PROBE_S,
    SECRET,
    STORE_TIMEOUT_S,
    RunStore,
    StoreGoneError,
    UnverifiedError,
    await_listener,
    call_with_deadline,
    connect,
    host_store,
    listen,
)
from framework.errors import EXIT_STOPPED, EXIT_WRONG_REQUEST, ConfigError, FrameworkError, RunError, TopologyError
from framework.launch.environment import ClusterEnvironment
from framework.monitoring.node_monitor import Limits
from framework.monitoring.report import list_ranks
from framework.system.files import read_text
from framework.system.run_dir import RunDir, write_atomically
from framework.system.versions import installed_versions

if TYPE_CHECKING:
    from torch.distributed import Store

WAIT_S = 600.0
"""How long ranks wait for one another if no backend.init_timeout is known."""

_POLL_S = 0.05
_CLOSE_TIMEOUT_S = 60.0  # for the others to leave, if this process hosts the store
_CLOSE_TIMEOUT_AFTER_FAILURE_S = 5.0
_SHOWN = 6


Fingerprint = dict[str, str]
"""What a process was started with: arguments by their keys, hashes of files, versions of packages."""


def fingerprint(arguments: Sequence[str], *, working_dir: Path) -> Fingerprint:
    """Return the fingerprint of this process. arguments: of the command."""
    typed = {key: value for key, _, value in (text.partition("=") for text in arguments) if key != "topology.node_rank"}
    own = user_config_dir(working_dir)
    folders = {"conf": config_dir()} if own is None else {"the framework's conf": config_dir(), "conf": own}
    files = {f"{name}/{key}": value for name, folder in folders.items() for key, value in _hashes(folder, "**/*.yaml")}
    for pattern in ("*.py", "*/*.py"):  # where most of what `_target_` names is
        files |= dict(_hashes(working_dir, pattern))
    versions = {"python": ".".join(platform.python_version_tuple()[:2]), **installed_versions(("framework", "torch"))}
    return {**typed, **files, **versions}


def differences(theirs: Fingerprint, ours: Fingerprint, *, noun: str = "rank") -> list[str]:
    """Return a line for each thing that differs, with both values. `ours` is of number 0."""
    return [
        f"{name}: {theirs.get(name, 'missing')}; {noun} 0 has {ours.get(name, 'none')}"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]


@dataclass(frozen=True)
class RunSpec:
    """What to run."""

    entry: str
    run_dir: str
    topology: Topology
    limits: Limits
    config: str  # the text of the run directory's file, as is `overrides`
    overrides: str
    secrets: str  # empty if there are none

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> RunSpec:
        parsed = {"topology": Topology(**plain["topology"]), "limits": Limits(**plain["limits"])}
        return RunSpec(**{**plain, **parsed})


@final
class Handshake:
    """One side of the handshake, for number 0 or another one. Closing it tells the others.

    Calls that use the store may raise torch's DistError, a RuntimeError, if it is gone.
    """

    def __init__(
        self,
        own: Fingerprint,
        *,
        number: int,
        count: int,
        endpoint: tuple[str, int],
        noun: str,
        named: str,
        port_option: str,
        attempt: int = 0,
        hosted_elsewhere: bool = False,
    ) -> None:
        """Numbers run from 0 to `count` - 1.

        Args:
            noun: what is counted, "rank" or "node".
            endpoint, named: where they meet, and how messages call it.
            port_option: what the user sets for another port.
            hosted_elsewhere: the store is neither hosted by number 0 nor ends with it.
        """
        self._own = own
        self._number, self._count, self._endpoint, self._attempt = number, count, endpoint, attempt
        self._noun, self._named = noun, named
        self._self, self._zero = f"{noun.capitalize()} {number}", f"{noun.capitalize()} 0"
        self._other_port = f"Set {port_option} to a free port of that machine, the same for every {noun}."
        self._other_secret = (
            f"its secret isn't {noun} 0's: set {SECRET}, or type topology.rdzv_secret, the same for every {noun}"
        )
        self._is_host = number == 0 and not hosted_elsewhere
        self._hosted_elsewhere = hosted_elsewhere
        self._store: Store | None = None
        self._differences: list[str] = []
        self._is_compared = self._is_answered = False

    def open(self, *, timeout_s: float) -> Store:
        """Return the store: host it, or connect once its host listens. Raises RunError, TopologyError."""
        if self._store is None:
            self._store = self._host() if self._is_host else self._reach(timeout_s)
            self._keys = RunStore(self._store, attempt=self._attempt)
            if self._number == 0:  # also for those that come again later
                self._keys.set("handshake/fingerprint", self._own)
        return self._store

    def close(self, status: int) -> None:
        """Leave, with an exit status.

        Number 0 sends it to the others if they have no answer yet. If it hosts the store, which ends with it, it waits
        for them to leave.
        """
        with suppress(FrameworkError, RuntimeError, StoreGoneError):  # it was printed, or is why this process ends
            if self._number > 0:
                if self._store is not None:
                    call_with_deadline(lambda: self._keys.set(f"handshake/left/{self._number}", True))
                return
            if not self._is_answered:
                self.open(timeout_s=_CLOSE_TIMEOUT_S)
                self._keys.set("handshake/answer", {"status": status})
            if self._is_host:
                # Before the comparison, wait for those that haven't come yet, too. After a failure some never leave.
                has_failed = self._is_compared and status not in (0, EXIT_STOPPED)
                others = range(1, self._count)
                awaited = [number for number in others if not self._is_compared or self._statement(number)]
                limit_s = _CLOSE_TIMEOUT_AFTER_FAILURE_S if has_failed else _CLOSE_TIMEOUT_S
                _await(self._has_left, awaited, timeout_s=limit_s)

    # Number 0

    def compare(self, *, timeout_s: float) -> None:
        """Wait until all the others have compared themselves with this process.

        Raises ConfigError naming who differs in what, RunError naming who hasn't come within `timeout_s`, and what
        `open` raises.
        """
        self.open(timeout_s=timeout_s)
        self._is_compared = True
        self._await_all(self._statement, range(1, self._count), timeout_s=timeout_s)
        differing: dict[tuple[str, ...], list[tuple[int, str]]] = {}
        for number in range(1, self._count):
            said = self._statement(number)
            if said["differences"]:
                differing.setdefault(tuple(said["differences"]), []).append((number, said["host"]))
        if differing:
            raise self._refusal(differing)

    def send(self, spec: RunSpec) -> None:
        """Answer the others with what to run."""
        self.open(timeout_s=WAIT_S)
        self._keys.set("handshake/answer", {"spec": asdict(spec)})
        self._is_answered = True

    def sent_before(self, attempt: int) -> RunSpec | None:
        """Return what ran in an earlier attempt, if the store has outlived it. Raises RunError."""
        answer = RunStore(self.open(timeout_s=WAIT_S), attempt=attempt).get("handshake/answer") or {}
        return RunSpec.from_plain(answer["spec"]) if "spec" in answer else None

    # The others

    def follow(self, *, timeout_s: float) -> RunSpec | int:
        """Compare this process with number 0, and return its answer: what to run, or the exit status to leave with.

        Number 0 prints the differences of all. Raises RunError if it can't be reached, ends, or says nothing in time.
        """
        deadline = time.monotonic() + timeout_s
        self.open(timeout_s=timeout_s)
        try:  # with a deadline of its own: if the link to the store is cut, torch's calls don't return
            return call_with_deadline(lambda: self._compare_and_receive(deadline), timeout_s=timeout_s + PROBE_S)
        except (TimeoutError, StoreGoneError) as error:
            has = f"has waited {timeout_s:g} s for" if isinstance(error, TimeoutError) else "has lost"
            raise RunError(
                f"{self._self} {has} {self._noun} 0 at {self._named}, which hadn't said what to run.\n"
                f"Look at what {self._noun} 0 printed; type backend.init_timeout=TIME if it only needs longer."
            ) from error

    def refusal(self, status: int) -> FrameworkError:
        """Return the error of one that number 0 has answered with this exit status."""
        if self._differences:
            return self._refusal({tuple(self._differences): [(self._number, socket.gethostname())]})
        kind = ConfigError if status == EXIT_WRONG_REQUEST else RunError
        return kind(f"{self._zero} at {self._named} has ended before the run began. Look at what it printed.")

    # All

    def meet(self, *, max_restarts: int, timeout_s: float) -> int:
        """Wait until all have come to the next attempt, and return its number. Raises RunError.

        A process that was restarted ends the attempt that its predecessor was part of.
        """
        store = self.open(timeout_s=timeout_s)
        number = 0
        while RunStore(store, attempt=number).get("handshake/all_met"):
            number += 1
        if number > 0:
            before = RunStore(store, attempt=number - 1)
            if before.get("alarm") is None:
                before.set("alarm", {"node": self._number, "cause": f"{self._self} was restarted"})
        if number > max_restarts:
            raise RunError("A node was restarted, and no restart was left: launcher.max_restarts allows for more.")
        self._present = present = RunStore(store, attempt=number)
        present.set(f"handshake/met/{self._number}", True)
        self._await_all(lambda other: present.get(f"handshake/met/{other}"), range(self._count), timeout_s=timeout_s)
        present.set("handshake/all_met", True)
        return number

    def all_done(self) -> bool:
        """Report that this one has done its work in the attempt; return True if all have."""
        self._present.set(f"handshake/done/{self._number}", True)
        return all(self._present.get(f"handshake/done/{number}") for number in range(self._count))

    def _statement(self, number: int) -> Any:
        """Return what another number wrote when it came, or None; of one with another secret only that."""
        try:
            return self._keys.get(f"handshake/here/{number}")
        except UnverifiedError:
            return {"host": "an unknown host", "differences": [self._other_secret]}

    def _has_left(self, number: int) -> bool:
        try:
            return bool(self._keys.get(f"handshake/left/{number}"))
        except UnverifiedError:  # it has been refused, and needs nothing more
            return True

    def _await_all(self, has_come: Callable[[int], Any], numbers: Iterable[int], *, timeout_s: float) -> None:
        missing = _await(has_come, numbers, timeout_s=timeout_s)
        if missing:
            raise RunError(
                f"{list_ranks(missing, noun=self._noun).capitalize()} of {self._count} didn't come to {self._named} "
                f"within backend.init_timeout={timeout_s:g} s.\n"
                "Check that they were started with this same command and can reach this machine."
            )

    def _host(self) -> Store:
        host, port = self._endpoint
        try:
            return host_store(listen(host, port), host)
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise TopologyError(
                    f"{self._zero} doesn't reach itself at {self._named}.\n"
                    f"Name {self._noun} 0 by an address that is its own, as the other {self._noun}s know it."
                ) from error
            raise RunError(
                f"{self._zero} can't host the store of the run at {self._named}: {os.strerror(error.errno or 0)}.\n"
                f"{self._other_port}"
            ) from error

    def _reach(self, timeout_s: float) -> Store:
        importlib.import_module("torch.distributed")  # while number 0 composes
        host, port = self._endpoint
        deadline = time.monotonic() + timeout_s
        # torchrun's agent listens before it starts this process; if it doesn't, it has been killed.
        limit_s = min(timeout_s, STORE_TIMEOUT_S) if self._hosted_elsewhere else timeout_s
        reason = await_listener(host, port, timeout_s=limit_s)
        if reason is not None:
            raise RunError(
                f"{self._self} could not reach {self._named} within {limit_s:g} s ({reason}).\n"
                f"Check that {self._noun} 0 was started there and can be reached from this machine."
            )
        left_s = max(PROBE_S, deadline - time.monotonic())
        try:  # torch's client waits forever if something else listens there and says nothing
            return call_with_deadline(partial(connect, host, port, timeout_s=left_s), timeout_s=left_s)
        except StoreGoneError as error:
            raise RunError(
                f"{self._self} got no answer from a store at {self._named} within {timeout_s:g} s: something else may "
                f"have that port.\nLook at what {self._noun} 0 printed. {self._other_port}"
            ) from error

    def _compare_and_receive(self, deadline: float) -> RunSpec | int:
        self._keys.set(f"handshake/left/{self._number}", False)  # true if an earlier process of this number has left
        own_host = socket.gethostname()
        try:
            zeros = self._keys.wait_for("handshake/fingerprint", timeout_s=deadline - time.monotonic())
            self._differences = differences(self._own, zeros, noun=self._noun)
        except UnverifiedError:  # nor could the answer be verified
            self._keys.set(f"handshake/here/{self._number}", None)
            raise self._refusal({(self._other_secret,): [(self._number, own_host)]}) from None
        self._keys.set(f"handshake/here/{self._number}", {"host": own_host, "differences": self._differences})
        answer = self._keys.wait_for("handshake/answer", timeout_s=deadline - time.monotonic())
        if "spec" in answer and not self._differences:
            return RunSpec.from_plain(answer["spec"])
        return int(answer.get("status", EXIT_WRONG_REQUEST))

    def _refusal(self, differing: Mapping[tuple[str, ...], Sequence[tuple[int, str]]]) -> ConfigError:
        lines = [f"The {self._noun}s were started differently, so nothing was run:"]
        for found, who in differing.items():
            hosts = sorted({host for _, host in who})
            numbers = list_ranks([number for number, _ in who], noun=self._noun)
            lines.append(f"{numbers.capitalize()} on {', '.join(hosts)}:")
            more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
            lines += [f"  {line}" for line in (*found[:_SHOWN], *more)]
        lines.append(f"Start every {self._noun} with the same command, the same files and the same versions.")
        return ConfigError("\n".join(lines))


def _await(is_done: Callable[[int], Any], numbers: Iterable[int], *, timeout_s: float) -> list[int]:
    """Wait until `is_done` holds for each of the numbers; return those for which it doesn't after that time."""
    deadline = time.monotonic() + timeout_s
    while (numbers := [number for number in numbers if not is_done(number)]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return list(numbers)


def make_visible(run_dir: RunDir, spec: RunSpec) -> None:
    """Make the run directory if this node, with a disk of its own, doesn't see rank 0's. Raises ConfigError.

    Every rank of the node does it, each file atomically and with the same content, so none has to wait for another.
    """
    with suppress(FileNotFoundError):
        if read_text(run_dir.config_file) == spec.config:
            return
    try:
        run_dir.logs.mkdir(parents=True, exist_ok=True)
        if spec.secrets:
            write_atomically(run_dir.secrets_file, spec.secrets, is_private=True)
        write_atomically(run_dir.overrides_file, spec.overrides)
        write_atomically(run_dir.config_file, spec.config)
    except OSError as error:
        raise ConfigError(
            f"{socket.gethostname()} can't make the run directory {run_dir.path}: {error.strerror or error}.\n"
            "Use a folder that every node can write: path.outputs=FOLDER"
        ) from error


def _hashes(folder: Path, pattern: str) -> Iterable[tuple[str, str]]:
    for file in sorted(folder.glob(pattern)):
        if os.access(file, os.R_OK) and file.is_file():
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            yield file.relative_to(folder).as_posix(), f"sha256 {digest[:16]}"


# Ranks that torchrun, srun or Kubernetes started


@final
class ExternalRanks:
    """This rank's connection to the others. arguments: of the command, what rank 0 composes."""

    def __init__(self, cluster: ClusterEnvironment, arguments: Sequence[str]) -> None:
        self.cluster = cluster
        self.arguments = list(arguments)
        self.handshake = Handshake(
            fingerprint(arguments, working_dir=Path.cwd()),
            number=cluster.rank,
            count=cluster.world_size,
            endpoint=(cluster.store_host, cluster.port),
            noun="rank",
            named=f"{cluster.host}:{cluster.port}",
            port_option="--master-port" if cluster.starter == "torchrun" else "MASTER_PORT",
            attempt=cluster.attempt,
            hosted_elsewhere=cluster.agent_store,
        )

    def resume_previous_attempt(self) -> None:
        """After torchrun has restarted the ranks, resume the run of an earlier attempt if it has a checkpoint.

        Only the agent's store outlives an attempt. Raises RunError if it can't be reached.
        """
        for attempt in reversed(range(self.cluster.attempt if self.cluster.agent_store else 0)):
            spec = self.handshake.sent_before(attempt)
            if spec is not None:
                if any(RunDir(Path(spec.run_dir)).checkpoints.glob("step_*")):
                    own = [
                        text
                        for text in self.arguments
                        if text.partition("=")[0] not in ("resume", "rerun", "init_from", "trust")
                    ]
                    self.arguments = [*own, *shlex.split(resume_argument(spec.run_dir)), "trust=true"]  # its own run
                return

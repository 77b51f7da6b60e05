"""What rank 0 offers the other ranks to run, after all have compared what they were started with.

Only rank 0 composes. The others have the same command, configuration files and versions, or the run is refused: each
leaves its fingerprint in the store, rank 0 compares, and answers all of them at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from framework.config.assets import config_dir, user_config_dir
from framework.errors import ConfigError, RunError
from framework.launch.watch import Limits
from framework.run_dir import RunDir, write_atomically
from framework.topology import Topology
from framework.versions import installed_versions

if TYPE_CHECKING:
    from torch.distributed import Store

_PACKAGES = ("framework", "torch")
_OWN_TO_A_NODE = ("topology.node_rank",)  # what is typed differently on every node, by parents of several nodes
_RUN_DIR = "framework/run_dir"
_POLL_S = 0.05
_LONG_POLL_S = 0.5
_BEAT_S = 0.5
_SILENT_S = 5.0  # without a beat: the process has died, or is stopped
_JOIN_S = 1.0
_OTHER_NUMBER = {
    "node": "Give every node a topology.node_rank of its own.",
    "rank": "Give every process a RANK of its own.",
}
_SHOWN = 6


@dataclass(frozen=True)
class Fingerprint:
    """What a process was started with.

    files: name → hash of the YAML that configurations come from, and of the working directory's Python files.
    """

    arguments: tuple[str, ...]
    files: Mapping[str, str]
    versions: Mapping[str, str]

    @property
    def digest(self) -> str:
        return _hash(json.dumps(asdict(self), sort_keys=True).encode())

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> Fingerprint:
        return Fingerprint(tuple(plain["arguments"]), plain["files"], plain["versions"])


def fingerprint(arguments: Sequence[str], *, working_dir: Path) -> Fingerprint:
    """Of this process. arguments: those of the command, without the ones that old launchers add."""
    own = user_config_dir(working_dir)
    folders = {"conf": config_dir()} if own is None else {"the framework's conf": config_dir(), "conf": own}
    files = {f"{name}/{key}": value for name, folder in folders.items() for key, value in _hashes(folder, "**/*.yaml")}
    for pattern in ("*.py", "*/*.py"):  # what a configuration names as `_target_` is there, mostly
        files |= dict(_hashes(working_dir, pattern))
    kept = tuple(text for text in arguments if text.partition("=")[0] not in _OWN_TO_A_NODE)
    return Fingerprint(
        kept, files, {"python": ".".join(platform.python_version_tuple()[:2]), **installed_versions(_PACKAGES)}
    )


def differences(theirs: Fingerprint, ours: Fingerprint, *, noun: str = "rank") -> list[str]:
    """One line for each thing that differs, with both values: theirs, then ours, which are `noun` 0's."""
    lines = []
    if theirs.arguments != ours.arguments:
        more, fewer = Counter(theirs.arguments), Counter(ours.arguments)
        only_theirs, only_ours = list((more - fewer).elements()), list((fewer - more).elements())
        if only_theirs or only_ours:
            lines.append(f"arguments: {_words(only_theirs)}; {noun} 0 has {_words(only_ours)}")
        else:
            lines.append(f"arguments: in another order: {_words(theirs.arguments)}")
    for name in sorted(theirs.files.keys() | ours.files.keys()):
        if name not in ours.files:
            lines.append(f"{name} is there; {noun} 0 doesn't have it")
        elif name not in theirs.files:
            lines.append(f"{name} isn't there; {noun} 0 has it")
        elif theirs.files[name] != ours.files[name]:
            lines.append(f"{name} isn't the same as {noun} 0's")
    for name in ours.versions:
        if theirs.versions.get(name) != ours.versions[name]:
            lines.append(f"{name} {theirs.versions.get(name)}; {noun} 0 has {ours.versions[name]}")
    return lines


@dataclass(frozen=True)
class Offer:
    """What to run, and with what. config, overrides: the texts of the run directory's files of that name."""

    entry: str
    run_dir: str
    topology: Topology
    limits: Limits
    config: str
    overrides: str

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> Offer:
        parsed = {"topology": Topology(**plain["topology"]), "limits": Limits(**plain["limits"])}
        return Offer(**{**plain, **parsed})


@final
class Agreement:
    """The keys of the store through which ranks, or parents of several nodes, agree on what to run.

    `number` counts from 0, which is whoever composes; `count` is how many there are. Every call may raise torch's
    DistError, a RuntimeError, where the store is gone.
    """

    def __init__(
        self, store: Store, *, count: int, attempt: int = 0, noun: str = "rank", place: str | None = None
    ) -> None:
        """noun: what is counted. place: where they meet, for messages."""
        self._noun = noun
        self._to, self._of = ("", "") if place is None else (f" to {place}", f" in the run of {place}")
        self._store = store
        self._count = count
        self._prefix = f"framework/{attempt}/offer"
        self._number: int | None = None  # once it has come
        self._token = secrets.token_hex(8)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Show that this process lives, from before it comes: its place isn't given to another meanwhile."""
        over = threading.Event()

        def beat() -> None:
            with suppress(RuntimeError):  # the store is gone, and who would look
                while not over.is_set():
                    self._store.add(self._key(f"beat/{self._token}"), 1)
                    over.wait(_BEAT_S)

        thread = threading.Thread(target=beat, name="presence", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(_JOIN_S)  # no longer: where the link is cut, torch's call doesn't return

    def come(self, number: int, *, own: Fingerprint, host: str) -> None:
        """Take the place of that number, and say what one was started with. To be called while `beating`.

        Raises ConfigError where another process has the place and lives; of one that has died it is taken over, after
        a few seconds.
        """
        self._take_place(number, host=host)
        self._number = number
        self._store.delete_key(self._key(f"left/{number}"))  # of who had the place before
        # The same for most: what is known by its hash is stored once, not once for each rank.
        self._store.set(self._key(f"fingerprint/{own.digest}"), json.dumps(asdict(own)))
        self._store.set(self._key(f"here/{number}"), json.dumps({"digest": own.digest, "host": host}))

    def show(self, own: Fingerprint) -> None:
        """For number 0: let who comes see what it was started with, also one who comes again after `compare`."""
        self._store.set(self._key("shown"), json.dumps(asdict(own)))

    def check_against_shown(self, own: Fingerprint, *, timeout_s: float) -> None:
        """Compare with number 0, once it has shown itself. Raises ConfigError naming what differs, TimeoutError."""
        shown = Fingerprint.from_plain(json.loads(self._get_later("shown", timeout_s=timeout_s)))
        found = differences(own, shown, noun=self._noun)
        if found:
            lines = [f"This {self._noun} was not started with the same as {self._noun} 0, so nothing was run:"]
            raise ConfigError("\n".join([*lines, *(f"  {line}" for line in found[:_SHOWN]), self._advice]))

    def compare(self, own: Fingerprint, *, timeout_s: float) -> None:
        """Wait for all the others, and compare each with number 0.

        Raises ConfigError naming who differs in what, RunError naming who hasn't come within `timeout_s`.
        """
        if not self._all_have("here", range(1, self._count), timeout_s=timeout_s):
            raise self._missing(timeout_s)
        differing: dict[str, list[tuple[int, str]]] = {}
        for number in range(1, self._count):
            said = json.loads(self._store.get(self._key(f"here/{number}")))
            if said["digest"] != own.digest:
                differing.setdefault(said["digest"], []).append((number, said["host"]))
        if differing:
            raise ConfigError(self._told(differing, own))

    def make(self, offer: Offer) -> None:
        """Tell the others what to run."""
        self._answer({"offer": asdict(offer)})

    def end(self, status: int) -> None:
        """Tell the others that there is nothing to run, and the exit status to leave with."""
        self._answer({"end": status})

    def take(self, *, timeout_s: float) -> Offer | int:
        """Wait for what number 0 answers: an offer, or an exit status. Raises TimeoutError."""
        answer = json.loads(self._get_later("answer", timeout_s=timeout_s))
        return Offer.from_plain(answer["offer"]) if "offer" in answer else int(answer["end"])

    def remember(self, run_dir: str) -> None:
        """Keep the run directory for attempts to come; as long as the store lives."""
        self._store.set(_RUN_DIR, run_dir)

    def remembered(self) -> str | None:
        """The run directory of the attempt before this one, where it came to have one."""
        return str(self._store.get(_RUN_DIR).decode()) if self._store.check([_RUN_DIR]) else None

    def leave(self) -> None:
        """Say that one needs the store no more; nothing where one has no place."""
        if self._number is not None:
            self._store.set(self._key(f"left/{self._number}"), "")

    def wait_for_all_to_leave(self, *, timeout_s: float, latecomers: bool = False) -> None:
        """For number 0 where it hosts the store: it would end with it. Gives up in silence.

        latecomers: wait also for those that have yet to come.
        """
        awaited = [each for each in range(1, self._count) if latecomers or self._has("here", each)]
        self._all_have("left", awaited, timeout_s=timeout_s)

    @property
    def _advice(self) -> str:
        return f"Start every {self._noun} with the same command, the same files and the same versions."

    def _get_later(self, name: str, *, timeout_s: float) -> bytes:
        # `wait` of torch's stores prints a warning for each time-out, and hears no Ctrl-C before.
        key, deadline, pause = self._key(name), time.monotonic() + timeout_s, _POLL_S
        while not self._store.check([key]):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            time.sleep(min(left, pause))
            pause = min(2 * pause, _LONG_POLL_S)  # thousands of ranks ask one store
        return self._store.get(key)

    def _take_place(self, number: int, *, host: str) -> None:
        key = self._key(f"place/{number}")
        mine = json.dumps({"host": host, "pid": os.getpid(), "token": self._token})
        before = ""
        while (there := self._store.compare_set(key, before, mine).decode()) != mine:
            holder = json.loads(there)
            if self._lives(holder["token"]):
                raise ConfigError(
                    f"{self._noun.capitalize()} {number} of {self._count} is there already{self._of}: process "
                    f"{holder['pid']} on {holder['host']}.\n{_OTHER_NUMBER[self._noun]}"
                )
            before = there

    def _lives(self, token: str) -> bool:
        """Whether who took a place under this name still beats. Takes a few seconds where it doesn't."""
        key, deadline = self._key(f"beat/{token}"), time.monotonic() + _SILENT_S
        first = self._store.add(key, 0)
        while self._store.add(key, 0) == first:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _has(self, name: str, number: int) -> bool:
        return self._store.check([self._key(f"{name}/{number}")])

    def _all_have(self, name: str, numbers: Iterable[int], *, timeout_s: float) -> bool:
        """Wait until each of the numbers has left a key of this name; False where that takes too long."""
        deadline = time.monotonic() + timeout_s
        for number in numbers:
            while not self._has(name, number):
                if time.monotonic() > deadline:
                    return False
                time.sleep(_POLL_S)
        return True

    def _answer(self, answer: Mapping[str, Any]) -> None:
        self._store.set(self._key("answer"), json.dumps(answer))
        self._store.check([self._key("answer")])  # `set` awaits no answer, and this process may leave now

    def _missing(self, timeout_s: float) -> RunError:
        missing = [number for number in range(1, self._count) if not self._has("here", number)]
        return RunError(
            f"{_numbered(self._noun, missing)} of {self._count} didn't come{self._to} within "
            f"backend.init_timeout={timeout_s:g} s.\n"
            "Look whether they were started with this same command, and can reach this machine."
        )

    def _told(self, differing: Mapping[str, Sequence[tuple[int, str]]], own: Fingerprint) -> str:
        lines = [f"The {self._noun}s were not started with the same, so nothing was run:"]
        for digest, who in list(differing.items())[:_SHOWN]:
            theirs = Fingerprint.from_plain(json.loads(self._store.get(self._key(f"fingerprint/{digest}"))))
            hosts = sorted({host for _, host in who})
            lines.append(f"{_numbered(self._noun, [number for number, _ in who])} on {_words(hosts, ', ')}:")
            found = differences(theirs, own, noun=self._noun)
            lines += [f"  {line}" for line in found[:_SHOWN]]
            if len(found) > _SHOWN:
                lines.append(f"  and {len(found) - _SHOWN} more")
        if len(differing) > _SHOWN:
            lines.append(f"and {len(differing) - _SHOWN} more kinds")
        return "\n".join([*lines, self._advice])

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"


def make_visible(run_dir: RunDir, offer: Offer) -> None:
    """Make the run directory where this node doesn't see rank 0's: its disk is its own. May raise OSError.

    Every rank of the node does it, each file at once and with the same content, so that none has to wait for another.
    """
    with suppress(FileNotFoundError):
        if run_dir.config_file.read_text() == offer.config:
            return
    run_dir.logs.mkdir(parents=True, exist_ok=True)
    write_atomically(run_dir.overrides_file, offer.overrides)
    write_atomically(run_dir.config_file, offer.config)


def _hashes(folder: Path, pattern: str) -> Iterable[tuple[str, str]]:
    for file in sorted(folder.glob(pattern)):
        if os.access(file, os.R_OK) and file.is_file():
            yield file.relative_to(folder).as_posix(), _hash(file.read_bytes())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _words(texts: Sequence[str], between: str = " ") -> str:
    return between.join(texts) if texts else "nothing there"


def _numbered(noun: str, numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"{noun.capitalize()}{'s' if len(numbers) > 1 else ''} {shown}"

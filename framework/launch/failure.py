"""What is known of one rank's failure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Kind(Enum):
    """How a rank failed. Its value is what `failure.json` says."""

    EXCEPTION = "exception"
    EXIT = "exit"
    SIGNAL = "signal"
    HUNG = "hung"
    STOPPED = "stopped"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True)
class RankFailure:
    """One rank's failure. time: seconds since the epoch. phase, step: where it was; step counts optimizer steps done.

    status: of the process, minus the number for a signal; None while it lives. waited_s: how long others waited for it.
    stacks: Python's, of all its threads, as the report was made, of a rank that lived; or as compiled code failed.
    """

    rank: int
    kind: Kind
    node: int
    host: str
    local_rank: int
    pid: int
    devices: str
    phase: str
    step: int
    time: float
    log: str
    status: int | None = None
    exception: str | None = None  # "RuntimeError: message"
    traceback: str | None = None
    expected: bool = False  # a FrameworkError: its message says everything
    exit_status: int = 1
    is_final: bool = False  # another attempt would fail alike
    signal: str | None = None
    oom: bool = False
    waited_s: float | None = None
    stacks: str | None = None
    waited_in: str | None = None  # the phase the others waited in
    lost_peer: bool = False  # it failed because another rank was gone or didn't come: a consequence
    timed_out: bool = False

    @property
    def cause(self) -> str:
        match self.kind:
            case Kind.EXCEPTION:
                return str(self.exception)
            case Kind.EXIT if self.status == 0:
                return "left early with exit status 0, before its work was done"
            case Kind.EXIT if self.status is None:
                return "its process is gone: killed, or left without a word" + (
                    "; the system was out of memory" if self.oom else ""
                )
            case Kind.EXIT:
                return f"left with exit status {self.status} without saying why"
            case Kind.SIGNAL:
                return f"killed by {self.signal}" + (": the system was out of memory" if self.oom else "")
            case Kind.UNREACHABLE:
                silent = f" for {self.waited_s:.0f} s" if self.waited_s and self.waited_s >= 1 else ""
                return f"its node hasn't answered{silent}: link cut, machine down, or its processes gone"
            case _:
                what = "was stopped (SIGSTOP)" if self.kind is Kind.STOPPED else "hung"
                waited = "" if self.waited_s is None else f"; the others waited {self.waited_s:.0f} s"
                return what + waited + ("" if self.waited_in is None else f" in {self.waited_in}")

    def to_plain(self) -> dict[str, Any]:
        return {**asdict(self), "kind": self.kind.value, "cause": self.cause}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> RankFailure:
        known = {key: value for key, value in plain.items() if key != "cause"}
        return RankFailure(**{**known, "kind": Kind(plain["kind"])})

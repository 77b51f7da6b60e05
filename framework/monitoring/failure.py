"""One rank's failure, and what to try after it."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from framework.errors import EXIT_STOPPED
from framework.monitoring.rank_status import CRASH


class FailureKind(str, Enum):
    """How a rank failed. The value is what `failure.json` says."""

    EXCEPTION = "exception"
    EXIT = "exit"
    SIGNAL = "signal"
    HUNG = "hung"
    STOPPED = "stopped"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True)
class RankFailure:
    """One rank's failure."""

    rank: int
    kind: FailureKind
    node: int
    time: float  # seconds since the epoch
    log: str
    host: str = ""
    local_rank: int = 0
    pid: int = 0
    devices: str = ""
    phase: str = "unknown"
    step: int = 0  # optimizer steps done
    status: int | None = None  # of the process, minus the number of a signal; None while it lives, or if unknown
    exception: str | None = None  # "RuntimeError: message"
    traceback: str | None = None
    expected: bool = False  # a FrameworkError: its message says everything
    exit_status: int = 1
    is_final: bool = False  # another attempt would fail with the same error
    signal: str | None = None
    oom: bool = False
    said: str | None = None  # why compiled code aborted it, as far as its log says
    waited_s: float | None = None  # how long the others waited for it
    still_s: float | None = None  # of a rank that hung and nobody waited for: how long it has made no progress
    stacks: str | None = None  # of all threads, when the report was made, or when compiled code crashed
    waited_in: str | None = None  # the phase in which the others waited
    lost_peer: bool = False  # it failed because another rank was gone or didn't come: a consequence
    timed_out: bool = False

    @property
    def is_independent(self) -> bool:
        """True if the rank failed by itself, not because of another one."""
        ended = self.kind in (FailureKind.EXCEPTION, FailureKind.EXIT, FailureKind.SIGNAL)
        return ended and not self.lost_peer and not self.timed_out

    @property
    def cause(self) -> str:
        match self.kind:
            case FailureKind.EXCEPTION:
                return str(self.exception)
            case FailureKind.EXIT if self.status == 0:
                return "exited with status 0 before its work was done"
            case FailureKind.EXIT if self.status is not None:
                return f"exited with status {self.status} and without an error"
            case FailureKind.EXIT | FailureKind.SIGNAL:
                unseen = "its process is gone: killed, or exited without an error"
                what = unseen if self.signal is None else f"killed by {self.signal}"
                what += "" if self.said is None else f": {self.said}"
                return what + ("; the system was out of memory" if self.oom else "")
            case FailureKind.UNREACHABLE:
                silent = f" for {self.waited_s:.0f} s" if self.waited_s and self.waited_s >= 1 else ""
                return f"its node hasn't answered{silent}: link cut, machine down, or its processes gone"
            case _:
                what = "was stopped (SIGSTOP)" if self.kind is FailureKind.STOPPED else "hung"
                waited = "" if self.waited_s is None else f"; the others waited {self.waited_s:.0f} s"
                if self.still_s is not None:
                    waited = f": no progress for {self.still_s:.0f} s"
                return what + waited + ("" if self.waited_in is None else f" in {self.waited_in}")

    def to_plain(self) -> dict[str, Any]:
        return {**asdict(self), "cause": self.cause}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> RankFailure:
        known = {key: value for key, value in plain.items() if key != "cause"}
        return RankFailure(**{**known, "kind": FailureKind(plain["kind"])})


# How it failed

# What only gloo, NCCL and the store say: to a rank whose peer is gone, and to one whose wait timed out.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed the connection|broken pipe|socket (closed|timeout)"
    r"|pair closure|timed out (waiting|after|while)|wait timeout|(got|sent) 0 bytes|failed to (recv|send)"
    r"|ncclRemoteError|remote process exited|communicator (was|is) aborted|not connected"
    r"|no route to host|network is unreachable|could not join the process group",
    re.IGNORECASE,
)
_NCCL_TIMEOUT = "Watchdog caught collective operation timeout"
# What torch's threads print before they abort the process: a GPU error, or else the error of NCCL's watchdog.
_ABORTED = (
    re.compile(r"(?:CUDA|HIP) error: .*"),
    re.compile(r"watchdog thread terminated with exception: (.*)"),
    re.compile(r".*device-side assert.*"),
)
_TIMED_OUT = re.compile(r"timed out|time-?out|could not join the process group", re.IGNORECASE)
_CRASHES = {
    signal.strsignal(number): number.name
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
}


def failure_facts(
    record: Mapping[str, Any] | None,
    end: Mapping[str, Any] | None,
    *,
    stacks: str | None = None,
    oom: bool = False,
    log: str = "",
) -> dict[str, Any] | None:
    """Return how a rank failed, as fields of `RankFailure`; None if it hasn't failed by itself.

    Args:
        record: what it raised, as `RankStatus.record_failure` was given it.
        end: how its process ended: status (None: unknown), time, early.
        stacks: written when compiled code crashed, or of a rank that raised and has hung since.
        log: the end of what it printed, compiled code too.
    """
    if record is not None:
        of_peers = record["of_peers"]
        return {
            **{key: value for key, value in record.items() if key != "of_peers"},
            "kind": FailureKind.EXCEPTION,
            "status": None if end is None else end["status"],
            "stacks": stacks if end is None else None,
            "lost_peer": _LOST_PEER.search(of_peers) is not None,
            "timed_out": _TIMED_OUT.search(of_peers) is not None,
        }
    if end is None or (end["status"] in (0, EXIT_STOPPED) and not end["early"]):
        return None
    ended_by = _signal(end["status"], stacks or "")
    said = _said_before_abort(log) if ended_by == "SIGABRT" else None
    nccl_timeout = _NCCL_TIMEOUT in log
    return {
        "kind": FailureKind.EXIT if ended_by is None else FailureKind.SIGNAL,
        "time": end["time"],
        "status": end["status"],
        "signal": ended_by,
        "oom": oom,
        "said": said,
        "stacks": stacks,
        "lost_peer": nccl_timeout or (said is not None and _LOST_PEER.search(said) is not None),
        "timed_out": nccl_timeout,
    }


def _said_before_abort(log: str) -> str | None:
    for pattern in _ABORTED:
        if found := pattern.search(log):
            return found[found.lastindex or 0].strip()
    return None


def _signal(status: int | None, stacks: str) -> str | None:
    """Return the signal that ended a process, by its exit status or else by what faulthandler wrote."""
    if status is None:
        words = stacks.removeprefix(CRASH).partition("\n")[0] if stacks.startswith(CRASH) else ""
        return _CRASHES.get(words.replace("-", " "))
    if status >= 0:
        return None
    try:
        return signal.Signals(-status).name
    except ValueError:  # most real-time signals have none
        return f"signal {-status}"


# What to try

_SMALLER_BATCH = "Lower data.batch_size; trainer.accumulate_grad_batches keeps the global batch."
_BY_MESSAGE = {
    r"(CUDA|HIP|accelerator|XPU|MPS).* out of memory|OutOfMemoryError": _SMALLER_BATCH,
    r"DefaultCPUAllocator: (can't allocate|not enough) memory": _SMALLER_BATCH,
    r"DataLoader worker .* (killed by signal|exited unexpectedly)|Unable to (open|allocate) shared memory": "A data "
    "worker died, usually for lack of memory: lower data.num_workers (data.num_workers=0 loads in the rank's own "
    "process), or give the container more /dev/shm.",
    r"device-side assert": "A GPU kernel got an invalid value, usually an index or a class label out of range. Set "
    "CUDA_LAUNCH_BLOCKING=1 in the environment to see in which line.",
    # Errors of an earlier kernel, as worded by the call that noticed them.
    r"(CUBLAS|CUDNN|CUSPARSE|CUFFT)_(STATUS_)?(EXECUTION_FAILED|EXEC_FAILED|INTERNAL_ERROR|NOT_INITIALIZED)"
    r"|(CUDA|HIP) error: (an illegal memory access|unspecified launch failure|misaligned address)": "A GPU kernel "
    "failed, often an earlier one: the error is seen when the next call looks. Set CUDA_LAUNCH_BLOCKING=1 in the "
    "environment to see in which line.",
    r"Too many open files": "Raise the limit (`ulimit -n`), or lower data.num_workers.",
}
_BY_PHASE = {
    "starting": "It was still making its data or reading its configuration.",
    "meeting": "It was forming the process group. Look at the network between the nodes.",
    "preflight": "The end of its log names the check. Look at its device and at its network.",
    "collectives": "The end of its log names the exchange. Look at its network.",
    "building": "It was building the model or reading a checkpoint.",
    "data": "It was loading data: look at its disk and its share of the files. If DataLoader workers load the data, "
    "data.num_workers=0 shows the line.",
    "checkpoint": "It was saving: look at the disk below the run directory.",
    "logging": "It was in a callback or logger: its stack shows which.",
    "closing": "It was closing callbacks, loggers and data, or writing results.",
    "evaluate": "It was evaluating: look at validation_step and the data it got.",
}
_IN_SET_UP = "backend.init_timeout, which counts until the first step is done (job=preflight: backend.timeout)"


def advice(first: RankFailure, *, world_size: int) -> str:
    """Return one or two sentences on what to try; "" if the failure itself says everything."""
    match first.kind:
        case _ if first.oom:
            return (
                "Lower data.batch_size or data.num_workers (0: none), or give the job more memory; "
                "trainer.accumulate_grad_batches keeps the global batch."
            )
        case FailureKind.UNREACHABLE:
            return (
                f"Check that {first.host or f'node {first.node}'} is up and reaches topology.rdzv_endpoint; its own "
                "report is there. Then resume the run."
            )
        case FailureKind.STOPPED:
            return "Something stopped the process: a debugger, a job scheduler that suspends, or `kill -STOP`."
        case FailureKind.HUNG:
            look_at = _BY_PHASE.get(first.phase, "Its stack shows where it is.")
            key = "backend.timeout" if first.step or first.phase == "collectives" else _IN_SET_UP
            return f"{look_at} If it is only slow, raise {key}."
        case FailureKind.SIGNAL if first.said is not None:
            return _by_message(first.said)
        case FailureKind.SIGNAL if first.signal in _CRASHES.values():
            where = "this is the Python stack of that moment" if first.stacks else "its log may say more"
            more = " A full /dev/shm causes SIGBUS, too." if first.signal == "SIGBUS" else ""
            return f"Compiled code failed; {where}.{more}"
        case FailureKind.SIGNAL if first.signal == "SIGKILL":
            return (
                "The system's out-of-memory killer sends it too, but no sign of it was found: look at `dmesg`, the job "
                "scheduler's log, and the container's memory limit."
            )
        case FailureKind.SIGNAL:
            return "Something outside ended this one process. A signal to the command itself stops all ranks and saves."
        case FailureKind.EXIT if first.status is None:
            return "Look at the output of what started the ranks (torchrun, srun), and at the end of the rank's log."
        case FailureKind.EXIT:
            return "Something in the process called exit(): its log may say what. Raise an exception instead."
    if first.expected:  # an error of ours, which says itself what to do
        return ""
    if words := _by_message(str(first.exception)):
        return words
    if not first.lost_peer or world_size == 1:
        return ""
    if first.timed_out:
        return (
            "No rank was behind the others: they may have called different collectives. Compare the stacks in the "
            "report, and look for branches that only some ranks take."
        )
    return "It lost another rank, and no rank has reported why: look at the ends of their logs, and at the network."


def _by_message(text: str) -> str:
    """Return what to try after an error with this text; "" if it isn't known."""
    return next((words for pattern, words in _BY_MESSAGE.items() if re.search(pattern, text)), "")

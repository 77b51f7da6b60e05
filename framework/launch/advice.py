"""What to try after a failure: a line or two, from what is known of the first rank to fail."""

from __future__ import annotations

import re

from framework.launch.failure import Kind, RankFailure

_SMALLER_BATCH = "Lower data.batch_size; trainer.accumulate_grad_batches keeps the global batch."
_BY_MESSAGE = {
    r"(CUDA|HIP|accelerator|XPU|MPS).* out of memory|OutOfMemoryError": _SMALLER_BATCH,
    r"DefaultCPUAllocator: (can't allocate|not enough) memory": _SMALLER_BATCH,
    r"DataLoader worker .* (killed by signal|exited unexpectedly)|Unable to (open|allocate) shared memory": "A data "
    "worker died, of too little memory as a rule: lower data.num_workers (data.num_workers=0 has none), or give the "
    "container more /dev/shm.",
    r"device-side assert": "A GPU kernel got an invalid value, usually an index or a class label out of range. Set "
    "CUDA_LAUNCH_BLOCKING=1 in the environment to see in which line.",
    r"Too many open files": "Raise the limit (`ulimit -n`), or lower data.num_workers.",
}
_BY_PHASE = {
    "starting": "It was still making its data or reading its configuration. If a disk or download is only slow, raise "
    "backend.init_timeout.",
    "meeting": "It was forming the process group. Look at the network between the nodes and backend.init_timeout.",
    "preflight": "It was checking what it exchanges with the others: the last lines of its log name the check. Look at "
    "its device, and at the network between it and them. If it is only slow, raise backend.timeout for job=preflight, "
    "backend.init_timeout before training.",
    "collectives": "The last line of its log names the exchange. Check the network between it and the other ranks. If "
    "it is only slow, raise backend.timeout.",
    "building": "It was building the model or reading a checkpoint. If it is only slow, raise backend.init_timeout.",
    "data": "It was loading data: look at its disk and its share of the files. Where a worker loads, "
    "data.num_workers=0 shows the line. If it is only slow, raise backend.timeout.",
    "checkpoint": "It was saving: look at the disk below the run directory. If it is only slow, raise backend.timeout.",
    "evaluate": "It was evaluating: look at validation_step and the data it got. If it is only slow, raise "
    "backend.timeout.",
}
_IN_STEP = "Its stack says where it stands. If it is only slow, raise backend.timeout."
_IN_SET_UP = "Until the first step is done, it is backend.init_timeout that counts."


def advice(first: RankFailure, *, world_size: int) -> str:
    """One or two sentences; empty where the failure says all there is to say."""
    if first.oom:
        return (
            "Lower data.batch_size or data.num_workers (0: none), or give the job more memory; "
            "trainer.accumulate_grad_batches keeps the global batch."
        )
    match first.kind:
        case Kind.UNREACHABLE:
            return (
                f"Look at {first.host or f'node {first.node}'}: is it up, and does it reach topology.rdzv_endpoint? "
                "Its own side of the report lies there. Then resume the run."
            )
        case Kind.STOPPED:
            return "Something stopped the process: a debugger, a job scheduler that suspends, or `kill -STOP`."
        case Kind.HUNG:
            return _of_hang(first)
        case Kind.SIGNAL:
            return _of_signal(first)
        case Kind.EXIT if first.status is None:
            return "What started the ranks knows more: look at its own messages, and at the end of the rank's log."
        case Kind.EXIT:
            return "Something in the process called exit(): its log may say what. Raise an exception instead."
        case _:
            return _of_exception(first, world_size=world_size)


def _of_hang(first: RankFailure) -> str:
    words = _BY_PHASE.get(first.phase, _IN_STEP)
    names_other = "backend.timeout" in words and "backend.init_timeout" not in words
    return f"{words} {_IN_SET_UP}" if first.step == 0 and names_other else words


def _of_signal(first: RankFailure) -> str:
    if first.signal in ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT"):
        where = "this is the Python stack of that moment" if first.stacks else "its log may say more"
        more = " SIGBUS is also what a full /dev/shm gives." if first.signal == "SIGBUS" else ""
        return f"Compiled code failed; {where}.{more}"
    if first.signal == "SIGKILL":
        return (
            "The system's out-of-memory killer sends it too, but no sign of it is seen from here: look at `dmesg`, the "
            "job scheduler's log, and the container's limit of memory."
        )
    return "Something outside ended this one process; a signal to the command itself ends all of them, and saves."


def _of_exception(first: RankFailure, *, world_size: int) -> str:
    if first.expected:  # an error of ours, which says itself what to do
        return ""
    for pattern, words in _BY_MESSAGE.items():
        if re.search(pattern, str(first.exception)):
            return words
    if not first.lost_peer or world_size == 1:
        return ""
    if first.timed_out:
        return (
            "No rank was behind the others: they may have called different collectives. Compare the stacks in the "
            "report, and look for branches that only some ranks take."
        )
    return "It lost another rank, and none has said why: look at the ends of their logs, and at the network."

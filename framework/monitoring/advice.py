"""What to try after a failure."""

from __future__ import annotations

import re

from framework.monitoring.failure import CRASH_SIGNALS, FailureKind, RankFailure

_SMALLER_BATCH = "Lower data.batch_size; trainer.accumulate_grad_batches keeps the global batch."
_SMALLER_EVALUATION_BATCH = "Lower data.eval_batch_size."
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
    # Files of torch's compiler are named by 52 letters and digits.
    r"/c[a-z2-7]{40,}\S*\.(so: (cannot read file data|file too short|invalid ELF header|file not recognized)"
    r"|o: (file truncated|file not recognized))": "A file in the cache of compiled code is damaged, as by a machine "
    "that failed while the compiler wrote it. Delete the cache, which is made again: ~/.cache/framework/compiled, or "
    "the folder that the message names.",
    r"Too many open files": "Raise the limit (`ulimit -n`), or lower data.num_workers.",
}
# Of torch.autograd and `backward`.
_NO_GRADIENT = "does not require grad and does not have a grad_fn"
_GRADIENT_IN_EVALUATION = (
    "Evaluations run without gradients. What needs them, such as forces, goes under `with torch.enable_grad():` in the "
    "task's validation_step or predict_step. It has no effect with trainer.inference_mode=true; false is the default."
)
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
_IN_SET_UP = (
    "backend.init_timeout, which counts instead of backend.timeout until the first step is done "
    "(job=preflight: backend.timeout)"
)
_CALLS = "Look for what differs between ranks before these lines, such as a branch that only some take."
# Added if ranks timed out waiting for each other before that.
_FIRST_STEP = " Until the first step is done, ranks wait for backend.init_timeout, whatever backend.timeout is."


def advice(first: RankFailure, *, world_size: int, disagree: bool = False) -> str:
    """Return one or two sentences on what to try; "" if the failure itself says everything.

    Args:
        disagree: the report names a collective that ranks disagree about.
    """
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
        case FailureKind.HUNG if first.exception is not None and disagree:
            return _CALLS
        case FailureKind.HUNG:
            look_at = _BY_PHASE.get(first.phase, "Its stack shows where it is.")
            if first.hook is not None:
                look_at = f"It was in {first.hook}."
            if first.step or first.phase == "collectives":
                key = "backend.timeout"
            else:
                key = _IN_SET_UP
            return f"{look_at} If it is only slow, raise {key}."
        case FailureKind.SIGNAL if disagree:
            return _CALLS
        case FailureKind.SIGNAL if first.said is not None:
            return _by_message(first.said)
        case FailureKind.SIGNAL if first.signal in CRASH_SIGNALS:
            where = "this is the Python stack of that moment" if first.stacks else "its log may say more"
            text = f"Compiled code failed; {where}."
            if first.signal == "SIGBUS":
                text += " A full /dev/shm causes SIGBUS, too."
            return text
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
    if first.expected:
        # An error of ours, which says itself what to do.
        return ""
    words = _by_message(str(first.exception))
    if words == _SMALLER_BATCH and first.phase == "evaluate":
        return _SMALLER_EVALUATION_BATCH
    if words:
        return words
    if first.phase == "evaluate" and _NO_GRADIENT in str(first.exception):
        return _GRADIENT_IN_EVALUATION
    if not first.lost_peer or world_size == 1:
        return ""
    if disagree:
        return _CALLS
    if first.timed_out:
        words = (
            "No rank was behind the others: they may have called different collectives. Compare the stacks in the "
            "report, and look for branches that only some ranks take."
        )
        return words if first.step else words + _FIRST_STEP
    return "It lost another rank, and no rank has reported why: look at the ends of their logs, and at the network."


def _by_message(text: str) -> str:
    """Return what to try after an error with this text; "" if it isn't known."""
    for pattern, words in _BY_MESSAGE.items():
        if re.search(pattern, text):
            return words
    return ""

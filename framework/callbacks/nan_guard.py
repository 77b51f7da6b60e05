"""Names the layer and the sample in which a loss or weight stops being finite."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import final

from framework.callbacks.first_fault import Fault, first_fault
from framework.callbacks.layer_sizes import LayerSizes, StepSizes
from framework.distributed.collectives import gather_to_all
from framework.distributed.context import Context
from framework.types import Callback, FitInfo, MicroBatchInfo, StepInfo, StepOutput

# Steps that are measured before they are read, since reading waits for the device. On the CPU each is read at once.
_UNREAD = 32
# Steps that are kept, to know what is usual.
_KEPT = 32


@final
class NanGuard(Callback):
    """When training fails since a loss or weight isn't finite, add to the error where that began.

    That is the step, the rank, the layer, the direction (forward, backward or update) and the samples. Hooks measure
    what goes through each layer and each gradient; nothing that is trained changes. Code that `trainer.compile`
    compiles isn't measured, nor is a step under strategy=pipeline.
    """

    def __init__(self, *, context: Context) -> None:
        self._context = context
        self._good: deque[StepSizes] = deque(maxlen=_KEPT)
        self._unread: list[StepSizes] = []
        self._fault: Fault | None = None
        self._max_unread = 1 if context.device.type == "cpu" else _UNREAD

    def on_fit_start(self, info: FitInfo) -> None:
        self._sizes = LayerSizes(info.model, info.optimizer)
        # The weights before the first step.
        self._unread.append(self._sizes.end(info.start_step))

    def on_micro_batch_start(self, info: MicroBatchInfo) -> None:
        self._sizes.begin(info)

    def on_micro_batch_output(self, output: StepOutput) -> None:
        self._sizes.note_loss(output)

    def on_train_step_end(self, info: StepInfo) -> None:
        sizes = self._sizes.end(info.step)
        if self._fault is not None:
            return
        self._unread.append(sizes)
        if len(self._unread) >= self._max_unread:
            self._read()

    def on_nonfinite(self) -> str:
        self._read()
        faults = gather_to_all(self._fault, self._context)
        found = [fault for fault in faults if fault is not None]
        if not found:
            return ""
        first = min(found, key=lambda fault: fault.order)
        return f"nan_guard: {first.text()}"

    def close(self) -> None:
        if hasattr(self, "_sizes"):
            self._sizes.remove()

    def _read(self) -> None:
        """Look for the first step in which a loss or weight isn't finite. Those before are kept to compare with."""
        unread = self._unread
        self._unread = []
        for sizes in unread:
            if not sizes.is_bad():
                self._good.append(sizes)
                continue
            fault = first_fault(sizes, self._good)
            if fault is not None:
                self._fault = replace(fault, rank=self._context.rank)
                # Nothing is measured from here on.
                self._sizes.remove()
                return

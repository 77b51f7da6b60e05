"""A trace of some steps: what ran when, in Python, on the CPU's threads and on GPUs."""

from __future__ import annotations

import logging
import os
from typing import final

from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from framework.distributed.context import Context
from framework.system.run_dir import RunDir
from framework.types import Callback, FitInfo, StepInfo

_log = logging.getLogger("framework")


@final
class TorchProfiler(Callback):
    """torch.profiler over `active` optimizer steps; each rank writes `profile/rank_N.….pt.trace.json`.

    Chrome (chrome://tracing), Perfetto and TensorBoard's profiler plugin open it.

    Training that ends earlier keeps what was recorded until then, even if it failed.

    Args:
        wait: Steps to skip first: those that allocate and compile.
        warmup: Steps with the profiler on whose record is dropped, since the first ones cost more.
        active: Steps to record.
        record_shapes, profile_memory, with_stack: As for torch.profiler; each costs time.
    """

    def __init__(
        self,
        *,
        context: Context,
        run_dir: RunDir,
        wait: int = 10,
        warmup: int = 2,
        active: int = 5,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
    ) -> None:
        self._folder = run_dir.path / "profile"
        self._context = context
        self._steps = wait + warmup + active
        self._is_on = False
        self._has_written = False
        # Read when the first profile begins; otherwise it prints that it found no GPU.
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")
        activities = [ProfilerActivity.CPU]
        if context.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._write_trace = tensorboard_trace_handler(str(self._folder), worker_name=f"rank_{context.rank}")
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
            on_trace_ready=self._write,
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
        )

    def on_fit_start(self, info: FitInfo) -> None:
        self._last_step = info.start_step + self._steps
        self._profile.start()
        self._is_on = True

    def on_train_step_end(self, info: StepInfo) -> None:
        if self._is_on:
            self._profile.step()
            if info.step == self._last_step:
                self.close()

    def on_fit_end(self) -> None:
        self.close()

    def close(self) -> None:
        """Write what was recorded, also by a failed training. May be called again; a full disk is only logged."""
        if not self._is_on:
            return
        self._is_on = False
        try:
            self._profile.stop()
        except (OSError, RuntimeError) as error:
            # Torch's handler raises RuntimeError. Raising here would hide the failure that ends the run.
            _log.warning("TorchProfiler can't write what it recorded: %s", error)
        else:
            if not self._has_written:
                _log.warning("TorchProfiler recorded nothing: training ended before step %d.", self._last_step)

    def _write(self, recorded: profile) -> None:
        # Torch's handler would make the run directory again, if that was moved away.
        self._folder.mkdir(exist_ok=True)
        self._write_trace(recorded)
        # Noted here, since the folder may also hold traces from before a resume.
        self._has_written = True
        if self._context.is_main:
            print(f"Traces of the profiler are in {self._folder}", flush=True)

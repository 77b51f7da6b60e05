"""A trace of some steps: what ran when, in Python, on the CPU's threads and on GPUs."""

from __future__ import annotations

import logging
import os
from typing import final

from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from framework.distributed.context import Context
from framework.errors import ConfigError
from framework.run_dir import RunDir
from framework.types import FitInfo, StepReport

_log = logging.getLogger("framework")


@final
class TorchProfiler:
    """torch.profiler over `active` optimizer steps; each rank writes `profile/rank_N.….pt.trace.json`.

    Chrome (chrome://tracing), Perfetto and TensorBoard's profiler plugin open it.

    wait: steps to leave alone first: those that allocate and compile. warmup: then so many with the profiler on, whose
    record is thrown away, as the first ones cost more. record_shapes, profile_memory, with_stack: torch's, each at
    its price in time. Training that comes to its end earlier
    keeps what was recorded by then; one that fails keeps nothing.
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
        if wait < 0 or warmup < 0 or active < 1:
            raise ConfigError(
                f"TorchProfiler got wait={wait}, warmup={warmup}, active={active}. "
                "They are numbers of steps: 0 or more, and at least 1 that is recorded."
            )
        self._folder = run_dir.path / "profile"
        self._context = context
        self._steps = wait + warmup + active
        self._seen = 0
        # Read when the first profile begins; else it tells everybody of GPUs that it didn't find.
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")
        activities = [ProfilerActivity.CPU]
        if context.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        write = tensorboard_trace_handler(str(self._folder), worker_name=f"rank_{context.rank}")
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
            on_trace_ready=write,
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
        )

    def on_fit_start(self, info: FitInfo) -> None:
        self._profile.start()

    def on_train_step_end(self, report: StepReport) -> None:
        if self._seen < self._steps:
            self._seen += 1
            self._profile.step()
            if self._seen == self._steps:
                self._end()

    def on_fit_end(self) -> None:
        if self._seen < self._steps:
            self._end()

    def _end(self) -> None:
        self._seen = self._steps
        self._profile.stop()
        traces = sorted(self._folder.glob(f"rank_{self._context.rank}.*"))
        if not traces:
            _log.warning("TorchProfiler recorded nothing: training ended before step %d.", self._steps)
        elif self._context.is_main:
            print(f"Traces of the profiler are in {self._folder}", flush=True)

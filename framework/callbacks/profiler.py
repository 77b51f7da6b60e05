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
    its price in time. Training that ends earlier keeps what was recorded by then: `on_fit_end` writes it where it came
    to its end or was stopped, `close` where it failed.
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
        self._start_step = 0
        self._is_on = False
        self._has_written = False
        # Read when the first profile begins; else it tells everybody of GPUs that it didn't find.
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
        self._start_step = info.start_step
        self._profile.start()
        self._is_on = True

    def on_train_step_end(self, report: StepReport) -> None:
        if self._is_on:
            self._seen += 1
            self._profile.step()
            if self._seen == self._steps:
                self._end()

    def on_fit_end(self) -> None:
        if self._is_on:
            self._end()

    def close(self) -> None:
        """Write what was recorded by a training that failed. May be called again; raises nothing of a full disk."""
        if not self._is_on:
            return
        try:
            self._stop()
        except (OSError, RuntimeError) as error:  # RuntimeError: of torch's own handler. The failure is what counts.
            _log.warning("TorchProfiler can't write what it recorded: %s", error)

    def _end(self) -> None:
        self._stop()
        if not self._has_written:
            last = self._start_step + self._steps
            _log.warning("TorchProfiler recorded nothing: training ended before step %d.", last)

    def _stop(self) -> None:
        self._is_on = False
        self._profile.stop()
        if self._has_written and self._context.is_main:
            print(f"Traces of the profiler are in {self._folder}", flush=True)

    def _write(self, recorded: profile) -> None:
        # Not looked for in the folder: a resumed run finds traces of the run before it there.
        self._write_trace(recorded)
        self._has_written = True

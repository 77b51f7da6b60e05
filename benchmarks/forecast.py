"""The memory that `job=plan plan.device=this` forecasts for a CPU, against what the profiler sees in a training.

    python -m benchmarks.forecast

The measured peak is that of the profiler's `[memory]` events over three steps of a real training, with the weights and
buffers that were there before; rank 0 is measured. tests/features/test_forecast.py holds the difference below 1 %.

With fsdp the measured peak is another one in each run, since gloo's threads gather the next shards while the step goes
on, or don't. The forecast has one gathered module at a time, the least that is needed; three runs are measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import TensorDataset

from framework import Callback, Datasets, FitInfo, StepInfo, Stop
from framework.jobs.plan.workspaces import memory_events
from framework.system.formatting import format_binary_bytes, format_table

STEPS = 3
_GPT = (
    "recipe=gpt_char",
    "model.layers=2",
    "model.channels=64",
    "data.datasets._target_=benchmarks.forecast.tokens",
    "scheduler=none",
)
_COMMON = (
    "trainer.gpus=0",
    "trainer.limit_val_batches=0",
    "trainer.limit_test_batches=0",
    "checkpoint.monitor=null",
    # It keeps up to 2 MiB of batches ahead otherwise, which are more than these models take.
    "data.loader=dataloader",
    "data.num_workers=0",
)
_TWO = "topology.procs_per_node=2"
_SHARDED = (_TWO, "strategy=fsdp", "strategy.min_num_params=10000")
_RECOMPUTED = "trainer.activation_checkpointing=auto"


class Case(NamedTuple):
    """A training to forecast."""

    name: str
    overrides: tuple[str, ...]

    @property
    def arguments(self) -> tuple[str, ...]:
        return (*self.overrides, *_COMMON)


CASES = (
    Case("convolutions", ("recipe=digits",)),
    Case("convolutions, batches of 128", ("recipe=digits", "data.batch_size=128")),
    Case("convolutions, AdamW", ("recipe=digits", "optimizer=adamw")),
    Case("convolutions, bf16-mixed", ("recipe=digits", "trainer.precision=bf16-mixed")),
    Case("convolutions, 16-mixed", ("recipe=digits", "trainer.precision=16-mixed")),
    Case("convolutions, bf16-true", ("recipe=digits", "trainer.precision=bf16-true")),
    Case("convolutions, 64-true", ("recipe=digits", "trainer.precision=64-true")),
    Case("convolutions, channels last", ("recipe=digits", "trainer.channels_last=true")),
    Case("convolutions, 4 accumulated", ("recipe=digits", "trainer.accumulate_grad_batches=4")),
    Case("convolutions, frozen features", ("recipe=finetune_digits",)),
    Case("convolutions, ddp", ("recipe=digits", _TWO)),
    Case("GPT", _GPT),
    Case("GPT, batches of 48", (*_GPT, "data.global_batch_size=48")),
    Case("GPT, SGD", (*_GPT, "optimizer=sgd")),
    Case("GPT, bf16-mixed", (*_GPT, "trainer.precision=bf16-mixed")),
    Case("GPT, bf16-true", (*_GPT, "trainer.precision=bf16-true")),
    Case("GPT, recomputed", (*_GPT, _RECOMPUTED)),
    Case("GPT, 2 accumulated", (*_GPT, "trainer.accumulate_grad_batches=2")),
    Case("GPT, ddp", (*_GPT, _TWO)),
    Case("GPT, ddp, 2 accumulated", (*_GPT, _TWO, "trainer.accumulate_grad_batches=2")),
)
SHARDED_CASES = (
    Case("convolutions, fsdp", ("recipe=digits", *_SHARDED)),
    Case("GPT, fsdp", (*_GPT, *_SHARDED)),
    Case("GPT, fsdp, recomputed", (*_GPT, *_SHARDED, _RECOMPUTED)),
)
_SHARDED_RUNS = 3


def tokens(**_: Any) -> Datasets:
    """Return a few windows of tokens, so that their order takes no memory."""
    windows_BT: Tensor = torch.arange(96 * 65).view(96, 65) % 60
    return Datasets(train=TensorDataset(windows_BT[:, :-1], windows_BT[:, 1:]))


@final
class MeasuredPeak(Callback):
    """Writes the peak of rank 0's memory over the first steps to `path`, and stops training."""

    def __init__(self, *, path: str, context: Any) -> None:
        self._path = Path(path)
        self._is_main = context.is_main
        self._before = 0
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def on_fit_start(self, info: FitInfo) -> None:
        if not self._is_main:
            return
        tensors = [*info.model.parameters(), *info.model.buffers()]
        self._before = sum(_local(tensor).nbytes for tensor in tensors)
        self._profiler.start()

    def on_train_step_end(self, info: StepInfo) -> Stop | None:
        if info.step != STEPS:
            return None
        if self._is_main:
            self._profiler.stop()
            total = 0
            peak = 0
            for _, change in sorted(memory_events(self._profiler)):
                total += change
                peak = max(peak, total)
            self._path.write_text(json.dumps({"peak": self._before + peak}))
        return Stop("measured")


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, if it is a DTensor."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def main() -> None:
    rows = [("training", "forecast", "measured", "difference")]
    for case in CASES + SHARDED_CASES:
        forecast = _forecast(case)
        for _ in range(_SHARDED_RUNS if case in SHARDED_CASES else 1):
            measured = _measured(case)
            rows.append(
                (
                    case.name,
                    format_binary_bytes(forecast),
                    format_binary_bytes(measured),
                    f"{100 * (forecast / measured - 1):+.2f} %",
                )
            )
            print(rows[-1], file=sys.stderr, flush=True)
    print(format_table(rows))


def _forecast(case: Case) -> int:
    words = ["job=plan", "plan.device=this", "format=json", *case.arguments]
    answer = subprocess.run([sys.executable, "-m", "framework", *words], check=True, capture_output=True, text=True)
    peak: int = json.loads(answer.stdout)["forecast"]["memory"]["peak"]
    return peak


def _measured(case: Case) -> int:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "peak.json"
        words = (*case.arguments, f"path.outputs={folder}", "checkpoint=none", "logger=none", *measuring(file))
        subprocess.run([sys.executable, "-m", "framework", *words], check=True, capture_output=True)
        return read_peak(file)


def measuring(file: Path) -> tuple[str, str]:
    """Return what makes a training write its peak to a file."""
    return "+callbacks.peak._target_=benchmarks.forecast.MeasuredPeak", f"+callbacks.peak.path={file}"


def read_peak(file: Path) -> int:
    peak: int = json.loads(file.read_text())["peak"]
    return peak


if __name__ == "__main__":
    main()

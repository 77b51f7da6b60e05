"""Leaves out the update of a step whose loss or gradient norm is an outlier, or rolls back and skips its samples."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from framework.callbacks.spikes import Usual
from framework.distributed.collectives import gather_to_all, sum_over_ranks
from framework.distributed.context import Context
from framework.errors import ConfigError, RunError
from framework.media import Text
from framework.system.rank_log import warn
from framework.system.run_dir import RunDir
from framework.types import Callback, FitInfo, Log, MicroBatchInfo, StepInfo, StepOutput

_ACTIONS = ("skip", "rollback")
# Of a step's samples in a message; `run.json` has all.
_SHOWN = 8


class _Spike(NamedTuple):
    """A value that is no usual one."""

    # `loss` or `grad_norm`, after the objective's name if there are several.
    name: str
    value: float
    usual: float
    score: float

    def text(self) -> str:
        if not math.isfinite(self.value):
            return f"{self.name} is {self.value}"
        return f"{self.name} {self.value:.4g} (usually {self.usual:.4g}, {self.score:.1f} robust standard deviations)"


@final
class SpikeGuard(Callback):
    """Judge each step by the norm of its gradients, before they are clipped, and by its mean loss over all ranks.

    A value is an outlier if it is `threshold` robust standard deviations above the median of the last `window` steps
    (`framework.callbacks.spikes.Usual`); of the norm, the logarithm is compared. Of 2,000,000 steps that vary normally
    none is a false alarm at the threshold of 10; with an exponential tail 625 of a million are, and 20 at 15. Outliers
    count for what is usual: after half a window, a lasting change is no outlier any more.

    A norm that isn't finite is an outlier, unless a GradScaler handles it. A loss that isn't finite still ends the run.

    Args:
        action: skip: leave out the update, as a GradScaler does: the step counts, the optimizer and its schedule don't
            move. rollback: raise RunError before anything is saved. A restart (`launcher.max_restarts`) or `resume`
            then continues from the last checkpoint without the samples of the step.
        loss: judge the loss. With several processes that is an exchange of two numbers in each step.
    """

    def __init__(
        self,
        *,
        context: Context,
        run_dir: RunDir,
        action: str = "skip",
        threshold: float = 10.0,
        window: int = 128,
        loss: bool = True,
    ) -> None:
        if action not in _ACTIONS:
            raise ConfigError(f"callbacks.spike_guard.action={action}: use one of {', '.join(_ACTIONS)}.")
        if threshold <= 0 or window < 8:
            raise ConfigError(
                f"callbacks.spike_guard: threshold={threshold} must be above 0, and window={window} at least 8."
            )
        self._context = context
        self._run_dir = run_dir
        self._rolls_back = action == "rollback"
        self._threshold = threshold
        self._window = window
        self._judges_loss = loss
        # By name of the value.
        self._usual: dict[str, Usual] = {}
        self._scales_losses = False
        # Of the step that is made: the sum of losses and the number of samples on this rank, by objective.
        self._losses: dict[str, Tensor] = {}
        self._objective = ""
        self._num_samples = 0
        self._spikes: list[_Spike] = []

    def on_fit_start(self, info: FitInfo) -> None:
        self._scales_losses = info.scales_losses

    def on_micro_batch_start(self, info: MicroBatchInfo) -> None:
        self._objective = info.objective
        self._num_samples = info.num_samples

    def on_micro_batch_output(self, output: StepOutput) -> None:
        if not self._judges_loss:
            return
        loss = output.loss.detach().double().reshape(())
        # A stand-in has no sample, and its loss may be anything.
        count = output.num_samples if self._num_samples else 0
        if not count:
            loss = torch.zeros_like(loss)
        part = torch.stack([loss * count, torch.full_like(loss, count)])
        before = self._losses.get(self._objective)
        self._losses[self._objective] = part if before is None else before + part

    def on_gradient_norm(self, norm: Tensor, objective: str) -> bool:
        prefix = f"{objective}/" if objective else ""
        spikes = []
        norm_value = float(norm)
        if not math.isfinite(norm_value):
            if not self._scales_losses:
                spikes.append(_Spike(f"{prefix}grad_norm", norm_value, math.nan, math.inf))
        elif norm_value > 0:
            spikes += self._judged(f"{prefix}grad_norm", norm_value, is_log=True)

        part = self._losses.pop(objective, None)
        if part is not None:
            total, count = sum_over_ranks(part, self._context).tolist()
            if count and math.isfinite(total):
                spikes += self._judged(f"{prefix}loss", total / count, is_log=False)
        self._spikes += spikes
        return bool(spikes)

    def on_train_step_end(self, info: StepInfo) -> Log | None:
        if not self._spikes:
            return None
        spikes = self._spikes
        self._spikes = []
        own: list[int] = []
        for micro in info.indices:
            own += micro.indices[: micro.num_samples].tolist()
        samples: list[int] = []
        for of_rank in gather_to_all(own, self._context):
            samples += of_rank
        # Ranks may share samples.
        samples = list(dict.fromkeys(samples))

        # Samples that were deferred have no number by which to skip them.
        rolls_back = self._rolls_back and info.number > 0
        shown = ", ".join(f"{index:,}" for index in samples[:_SHOWN])
        if len(samples) > _SHOWN:
            shown += f" and {len(samples) - _SHOWN} more"
        text = f"spike_guard: step {info.step:,}: {'; '.join(spike.text() for spike in spikes)}. Samples {shown}"
        if self._context.is_main:
            self._record(info, spikes, samples, rolls_back=rolls_back)
        if rolls_back:
            raise RunError(
                f"{text}.\nA restart (launcher.max_restarts) or resume={self._run_dir.path} continues from the last "
                "checkpoint without these samples."
            )
        if self._context.is_main:
            warn(f"{text}. The update is left out")
        return Log({"spike": Text(text)})

    def state_dict(self) -> dict[str, Any]:
        return {"usual": {name: list(usual.values) for name, usual in self._usual.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._usual = {name: Usual(self._window, values) for name, values in state["usual"].items()}

    def _judged(self, name: str, value: float, *, is_log: bool) -> list[_Spike]:
        """Return the value as a spike if it is one; it counts for what is usual from here on."""
        usual = self._usual.setdefault(name, Usual(self._window))
        compared = math.log(value) if is_log else value
        score = usual.score(compared)
        spikes = []
        if score > self._threshold:
            middle = math.exp(usual.middle) if is_log else usual.middle
            spikes.append(_Spike(name, value, middle, score))
        usual.values.append(compared)
        return spikes

    def _record(self, info: StepInfo, spikes: list[_Spike], samples: list[int], *, rolls_back: bool) -> None:
        """Add the step to `run.json`, in place of the same one before a resume."""
        entries = []
        for entry in self._run_dir.read_run().get("spikes", []):
            if (entry["step"], entry["number"]) != (info.step, info.number):
                entries.append(entry)
        values = {spike.name: spike.value for spike in spikes if math.isfinite(spike.value)}
        entries.append(
            {
                "step": info.step,
                "number": info.number,
                "epoch": info.epoch,
                "rolls_back": rolls_back,
                "values": values,
                "samples": samples,
            }
        )
        self._run_dir.update_run({"spikes": entries})

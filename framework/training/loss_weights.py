"""Losses that are means over something else than samples: the gradient of the mean over the global batch.

Each micro-batch's mean loss is multiplied by its weight, so that gradients add up to that of the sum. The weights of
all ranks are summed while the backward runs; afterwards the gradients are divided by the sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from framework.distributed.context import Context
from framework.distributed.sharded import local_tensor
from framework.errors import ConfigError, TargetError
from framework.strategies.base import Strategy
from framework.types import StepOutput, Task


@final
class LossWeights:
    """The weights of one optimizer step after another. Every rank makes one."""

    def __init__(self, context: Context, *, strategy: Strategy, task: Task) -> None:
        self._context, self._strategy, self._task = context, strategy, type(task).__name__
        self._weighs: dict[str | None, bool] = {}  # by the task's phase
        self._own: list[Tensor] = []  # of this step's micro-batches
        self._total: Tensor | None = None
        self._exchange: dist.Work | None = None

    def are_used(self, output: StepOutput, phase: str | None) -> bool:
        """Return True if the task weighs its losses. Raises TargetError if it doesn't always or never do so.

        Raises ConfigError for a strategy whose ranks don't exchange gradients in each step.
        """
        weighs = output.weight is not None
        if self._weighs.setdefault(phase, weighs) is not weighs:
            raise TargetError(
                f"{self._task} returned a StepOutput {'with' if weighs else 'without'} `weight`, unlike before. Return "
                "one for every batch, or for none."
            )
        if weighs and self._strategy.replicas_differ:
            raise ConfigError(
                f"{self._task} weighs its losses (StepOutput.weight) by what the global batch counts, and under "
                f"strategy={type(self._strategy).__name__} each process steps by itself.\n"
                "Use strategy=ddp, allreduce or fsdp, or a task without weights."
            )
        return weighs

    def weighted(self, output: StepOutput, *, num_samples: int, scale: float) -> Tensor:
        """Return the loss to go backward from. num_samples: of the micro-batch; 0: a stand-in. scale: of all losses."""
        loss, weight = output.loss, weight_of(output, output.loss.device)
        if not num_samples:
            return loss * 0
        self._own.append(weight)
        # The mean over nothing is NaN.
        return torch.where(weight > 0, loss, torch.zeros_like(loss)) * (weight * scale).to(loss.dtype)

    @property
    def has_own(self) -> bool:
        """True if this rank has weighed a loss of this step."""
        return bool(self._own)

    def begin_sum(self) -> None:
        """Start to sum the weights over ranks. Every rank must call it, once in a step."""
        device = self._context.device
        total = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        for weight in self._own:
            total += weight.to(device)
        self._own, self._total = [], total
        self._exchange = dist.all_reduce(total, async_op=True) if self._context.world_size > 1 else None

    @torch.no_grad()
    def divide(self, parameters: Iterable[Tensor], *, count: int) -> None:
        """Turn gradients of the sum over `count` into those of the weighted mean, if `begin_sum` was called.

        They must be the means over ranks; they may be scaled. Every rank must call it.
        """
        if self._total is None:
            return
        if self._exchange is not None:
            self._exchange.wait()
        factor = torch.where(self._total > 0, count / self._total, 0)
        self._total = self._exchange = None
        kinds: defaultdict[Any, list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            if parameter.grad is not None:
                gradient = local_tensor(parameter.grad)
                kinds[gradient.device, gradient.dtype].append(gradient)
        for (device, dtype), gradients in kinds.items():
            torch._foreach_mul_(gradients, factor.to(device=device, dtype=dtype))


def weight_of(output: StepOutput, device: torch.device) -> Tensor:
    """Return what the output's mean is over, as a tensor without dimensions, in float32."""
    return torch.as_tensor(output.weight, dtype=torch.float32, device=device).detach().reshape(())

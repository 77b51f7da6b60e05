"""Weight the gradients of each micro-batch by what its loss is a mean over, relative to the whole global batch.

A task returns this weight as `StepOutput.num_samples`, or as `weight` if the mean isn't over samples. Nearly always it
is the number of samples that the loader gave, and the trainer's factor is right. Otherwise each mean loss is multiplied
by its weight, so that the gradients add up to that of the sum; the weights of all ranks are summed while the backward
runs, and afterwards the gradients are divided by this sum.

The sum over ranks is one collective of one number per step. So the ranks decide in the first step if they need it:
if the task gives weights, if there is a collate function, which may drop samples, or if a number of samples differs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from framework.distributed.collectives import any_over_ranks
from framework.distributed.context import Context
from framework.distributed.sharded import local_tensor
from framework.errors import ConfigError, TargetError
from framework.strategies.base import Strategy
from framework.types import StepOutput, Task


@final
class LossWeights:
    """The weights of the micro-batches in each optimizer step. Every rank makes one.

    may_drop: the number of samples of a batch may differ from what the loader counted, in any step.
    counts: this rank's weights are summed; False if another rank trains on the same samples and counts them.
    """

    def __init__(
        self, context: Context, *, strategy: Strategy, task: Task, may_drop: bool = False, counts: bool = True
    ) -> None:
        self._context, self._task = context, type(task).__name__
        self._strategy = type(strategy).__name__
        self._is_alone = context.world_size == 1
        self._steps_alone = strategy.replicas_differ and not self._is_alone
        self._may_drop, self._counts = may_drop, counts
        self._weighs: dict[str | None, bool] = {}  # if outputs have a `weight`, by the task's phase
        self._sums: dict[str | None, bool] = {}  # if ranks sum weights in each step, by the task's phase
        self._differs = False  # in this step, from what the loader counted
        self._loaded = 0  # samples of this step's micro-batches, as the loader counted them
        self._number = 0.0  # the sum of this step's weights that are numbers
        self._tensors: list[Tensor] = []  # those that are on a device
        self._total: Tensor | None = None  # over ranks, to divide by
        self._exchange: dist.Work | None = None
        self._difference: Tensor | None = None  # from what the loader counted, on a device, where ranks step alone

    def leave_out_exchange(self) -> None:
        """Weight losses by what this rank has, for steps in which ranks exchange nothing."""
        self._is_alone = True

    def are_used(self, output: StepOutput, num_samples: int, phase: str | None) -> bool:
        """Return True if the loss must go through `weighted`. num_samples: of the micro-batch; 0: a stand-in.

        Raises TargetError if the task gives a weight for some batches only, or if its number of samples first differs
        from the loader's after the ranks have decided not to sum.
        """
        weighs = output.weight is not None
        if self._weighs.setdefault(phase, weighs) is not weighs:
            raise TargetError(
                f"{self._task} returned a StepOutput {'with' if weighs else 'without'} `weight`, unlike before. Return "
                "one for every batch, or for none."
            )
        if self._steps_alone:
            return weighs or (num_samples > 0 and output.num_samples != num_samples)
        if self._is_alone:
            # Note micro-batches that agree with the loader, too: a later one of this step may not.
            self._loaded += num_samples
            if weighs or (num_samples and output.num_samples != num_samples):
                return True
            self._number += num_samples
            return False
        if self._sums.get(phase, True):
            return True
        if num_samples and output.num_samples != num_samples:
            raise TargetError(
                f"{self._task} returned num_samples={output.num_samples} for a micro-batch of {num_samples} samples, "
                "and in the first step it returned the size of each. The other processes don't know of it, and the "
                "gradients would be wrong.\nReturn what the loss is a mean over as `weight` as well, in every "
                "StepOutput: then it is summed over processes in each step."
            )
        return False

    def weighted(self, output: StepOutput, *, num_samples: int, scale: float, is_only: bool = False) -> Tensor:
        """Return the loss to go backward from, and note its weight.

        Args:
            num_samples: of the micro-batch, as the loader counted; 0: a stand-in.
            scale: of all losses. is_only: the step has one micro-batch on each rank.

        Raises:
            TargetError: num_samples and weight of the output contradict each other.
            ConfigError: the ranks step by themselves, and the weight isn't what the loader counted.
        """
        loss = output.loss
        if not num_samples:
            return loss * 0
        weight = weight_of(output, task=self._task)
        if self._steps_alone:
            self._check_alone(weight, num_samples)
            return _scaled(loss, num_samples * scale)
        if self._is_alone and is_only:  # it is the mean already
            self._number += num_samples
            return _scaled(_counted(loss, weight), num_samples * scale)
        if isinstance(weight, Tensor):
            self._differs = True
            self._tensors.append(weight)
            return _counted(loss, weight) * (weight * scale).to(loss.dtype)
        self._differs = self._differs or weight != num_samples
        self._number += weight
        return _scaled(_counted(loss, weight), weight * scale)

    def begin_sum(self, phase: str | None) -> None:
        """Start to sum the weights over ranks, if that is needed. Every rank must call it, once per step.

        The first call for a phase waits for all ranks, which decide if they sum in each step.
        """
        if self._is_alone or self._steps_alone:
            return
        tensors = self._tensors
        number = self._number
        differs = self._differs
        self._forget()
        if phase not in self._sums:
            needs_sum = self._may_drop or self._weighs.get(phase, False) or differs
            self._sums[phase] = any_over_ranks(needs_sum, self._context)
        if not self._sums[phase]:
            return
        device = self._context.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        total = torch.full((), number if self._counts else 0.0, dtype=dtype, device=device)
        if self._counts:
            for weight in tensors:
                total += weight.to(device)
        self._total = total
        self._exchange = dist.all_reduce(total, async_op=True)

    def check(self) -> None:
        """Raise ConfigError if ranks step by themselves and a weight wasn't what the loader counted.

        Waits for the device; on the CPU each step has checked it.
        """
        if self._difference is not None and float(self._difference) > 0:
            raise self._refused()

    def _check_alone(self, weight: float | Tensor, num_samples: int) -> None:
        if isinstance(weight, Tensor):
            before = 0.0 if self._difference is None else self._difference
            self._difference = before + (weight - num_samples).abs()
        elif weight != num_samples:
            raise self._refused()

    def _refused(self) -> ConfigError:
        return ConfigError(
            f"{self._task} weights its losses by something other than the samples of a batch (tokens, classes, targets "
            f"that are ignored, samples that were dropped), and under strategy={self._strategy} each process steps by "
            "itself, without what the others count.\n"
            "Use strategy=ddp, allreduce or fsdp, or data that needs no weights."
        )

    def _forget(self) -> None:
        """Forget the weights of the step."""
        self._tensors = []
        self._number = 0.0
        self._differs = False

    def are_summed(self, phase: str | None) -> bool:
        """Return True if `begin_sum` must be called in each step, by ranks without an output of the task, too."""
        return self._sums.get(phase, True)

    @torch.no_grad()
    def divide(self, parameters: Iterable[Tensor], *, count: int) -> None:
        """Turn gradients of the sum over `count` into those of the weighted mean, if weights were summed.

        They must be the means over ranks; they may be scaled. Every rank must call it.
        """
        if self._is_alone:
            total: float | Tensor | None = self._number
            if self._tensors:
                total = torch.stack([weight.to(self._context.device) for weight in self._tensors]).sum() + self._number
            count = self._loaded
            self._loaded = 0
            self._forget()
        else:
            total = self._total
            self._total = None
            if self._exchange is not None:
                self._exchange.wait()
                self._exchange = None
        if total is None:
            return
        factor: float | Tensor
        if isinstance(total, Tensor) and total.device.type != "cpu":
            factor = torch.where(total > 0, count / total, 0)
        elif float(total) == count:
            return
        else:
            factor = count / float(total) if total > 0 else 0.0
        kinds: defaultdict[Any, list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            if parameter.grad is not None:
                gradient = local_tensor(parameter.grad)
                kinds[gradient.device, gradient.dtype].append(gradient)
        for (device, dtype), gradients in kinds.items():
            own = factor.to(device=device, dtype=dtype) if isinstance(factor, Tensor) else factor
            torch._foreach_mul_(gradients, own)


def weight_of(output: StepOutput, *, task: str = "The task") -> float | Tensor:
    """Return the weight of the output's mean loss: a number, or a 0-d tensor if it is on an accelerator.

    Raises TargetError if its `num_samples` and `weight` contradict each other, or are negative.
    """
    weight: Any = output.num_samples if output.weight is None else output.weight
    if isinstance(weight, Tensor):
        weight = weight.detach().reshape(())
        if weight.device.type == "cpu":  # reading it waits for nothing
            weight = float(weight)
        else:
            weight = weight.to(device=output.loss.device, dtype=torch.float32)
    if not isinstance(weight, Tensor) and weight < 0:
        name = "num_samples" if output.weight is None else "weight"
        raise TargetError(f"{task} returned a StepOutput with {name}={weight:g}. It can't be negative.")
    if output.num_samples < 1 and bool(weight > 0):
        raise TargetError(
            f"{task} returned a StepOutput with num_samples={output.num_samples} and weight={float(weight):g}: the "
            "loss is the mean over no sample, and counts.\nReturn the number of samples that it is of; or a weight of "
            "0, if it is of none."
        )
    return weight  # type: ignore[no-any-return]


def _counted(loss: Tensor, weight: float | Tensor) -> Tensor:
    """Return the loss, or 0 if its weight is 0, since the mean over nothing is NaN."""
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, loss, torch.zeros_like(loss))
    if weight > 0:
        return loss
    # Multiplied by 0, NaN would stay.
    return loss.where(torch.zeros((), dtype=torch.bool, device=loss.device), 0.0)


def _scaled(loss: Tensor, factor: float) -> Tensor:
    """Return loss * factor; multiplying by 1.0 would cost two kernels."""
    return loss if factor == 1.0 else loss * factor

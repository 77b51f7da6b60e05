"""Weight the gradients of each micro-batch by what its loss is a mean over, relative to the whole global batch.

A task returns this weight as `StepOutput.num_samples`, or as `weight` if the mean isn't over samples. Nearly always it
is the number of samples that the loader gave, and the share of the global batch that the trainer knows is right.
Otherwise each mean loss is multiplied by its weight, so that the gradients add up to that of the sum, and before the
optimizer step they are divided by the sum of all weights. There is a class for each way to get this sum:

    OneRankWeights    one rank: its own weights
    SummedWeights     several ranks: summed over ranks while the backward runs
    SeparateWeights   several ranks, each with steps of its own: refused, since no rank knows the others' weights
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor

from framework.distributed.collectives import any_over_ranks
from framework.distributed.context import Context
from framework.distributed.sharded import local_tensor
from framework.errors import ConfigError, TargetError
from framework.strategies.base import Strategy
from framework.types import StepOutput, Task


class LossWeights(Protocol):
    """The weights of the micro-batches in each optimizer step.

    objective: the name of one of the task's objectives; "" if it has a single loss.
    """

    def weighted(
        self, output: StepOutput, *, num_samples: int, scale: float, objective: str = "", is_only: bool = False
    ) -> Tensor:
        """Return the loss to go backward from, and note its weight.

        Args:
            num_samples: of the micro-batch, as the loader counted; 0: a stand-in, whose loss doesn't count.
            scale: the factor of a loss for each of its samples.
            is_only: the step has one micro-batch on each rank.

        Raises:
            TargetError: the task's weights contradict each other, or what ranks agreed on in the first step.
            ConfigError: ranks step by themselves, and the weight isn't what the loader counted.
        """

    def begin_sum(self, objective: str = "") -> None:
        """Start to sum the weights of the step over ranks, if that is needed.

        Every rank must call it once per step, before the backward of the last micro-batch.
        """

    def divide(self, parameters: Iterable[Tensor], *, count: int) -> None:
        """Turn the gradients of the sum over `count` samples into those of the weighted mean.

        They must be the means over ranks; they may be scaled. Every rank must call it.
        """

    def check(self) -> None:
        """Raise ConfigError if a weight on a device wasn't what it had to be. Waits for the device."""


def loss_weights(context: Context, *, strategy: Strategy, task: Task, may_drop: bool, counts: bool) -> LossWeights:
    """Return the weights of this rank's losses. Every rank must call it.

    may_drop: in any step, the number of samples of a batch may differ from what the loader counted.
    counts: this rank's weights are summed; False if another rank trains on the same samples and counts them.
    """
    task_name = type(task).__name__
    if context.world_size == 1:
        return OneRankWeights(context, task_name=task_name)
    if strategy.replicas_differ:
        return SeparateWeights(task_name=task_name, strategy_name=type(strategy).__name__)
    return SummedWeights(context, task_name=task_name, may_drop=may_drop, counts=counts)


@final
class OneRankWeights:
    """The weights of a rank that exchanges nothing with others."""

    def __init__(self, context: Context, *, task_name: str) -> None:
        self._kinds = _WeightKinds(task_name)
        self._task_name = task_name
        # Samples of this step's micro-batches, as the loader counted them.
        self._loaded = 0
        self._sum = _WeightSum(context.device)

    def weighted(
        self, output: StepOutput, *, num_samples: int, scale: float, objective: str = "", is_only: bool = False
    ) -> Tensor:
        self._kinds.check(output, objective)
        self._loaded += num_samples
        if output.weight is None and output.num_samples == num_samples:
            # Noted, too: a later micro-batch of this step may differ from the loader's count.
            self._sum.number += num_samples
            return scaled(output.loss, num_samples * scale)
        if num_samples == 0:
            return output.loss * 0

        weight = weight_of(output, task=self._task_name)
        if is_only:
            # The loss is the mean of the step already.
            self._sum.number += num_samples
            return scaled(_counted(output.loss, weight), num_samples * scale)
        self._sum.add(weight)
        return _times_weight(output.loss, weight, scale=scale)

    def begin_sum(self, objective: str = "") -> None:
        """Do nothing: there are no other ranks."""

    def divide(self, parameters: Iterable[Tensor], *, count: int) -> None:
        # `count` is that of the whole run's batch, of which a trial of one rank has a part.
        loaded = self._loaded
        self._loaded = 0
        total = self._sum.take()
        if isinstance(total, Tensor) or total != loaded:
            _divide(parameters, total, count=loaded)

    def check(self) -> None:
        """Do nothing: every weight is allowed."""


@final
class SummedWeights:
    """The weights of ranks that average their gradients in each step.

    The sum over ranks is one collective of one number per step. So the ranks decide in the first step if they need it:
    if the task gives weights, if there is a collate function, which may drop samples, or if a number of samples differs
    from the loader's.
    """

    def __init__(self, context: Context, *, task_name: str, may_drop: bool, counts: bool) -> None:
        self._context = context
        self._kinds = _WeightKinds(task_name)
        self._task_name = task_name
        self._may_drop = may_drop
        self._counts = counts
        # Whether ranks sum weights in each step, by the objective; an objective is missing until its first step.
        self._sums: dict[str, bool] = {}
        # Of this step: the sum so far, and if a weight differs from what the loader counted.
        self._sum = _WeightSum(context.device)
        self._differs = False
        # Over ranks, once the exchange has ended.
        self._total: Tensor | None = None
        self._exchange: dist.Work | None = None

    def weighted(
        self, output: StepOutput, *, num_samples: int, scale: float, objective: str = "", is_only: bool = False
    ) -> Tensor:
        self._kinds.check(output, objective)
        if not self._sums.get(objective, True):
            if num_samples and output.num_samples != num_samples:
                raise self._late_difference(output, num_samples)
            return scaled(output.loss, num_samples * scale)
        if num_samples == 0:
            return output.loss * 0

        weight = weight_of(output, task=self._task_name)
        if isinstance(weight, Tensor) or weight != num_samples:
            self._differs = True
        self._sum.add(weight)
        return _times_weight(output.loss, weight, scale=scale)

    def begin_sum(self, objective: str = "") -> None:
        """Start to sum the weights over ranks. In its first call for an objective, the ranks agree if they need it."""
        if not self._sums.get(objective, True):
            return
        weights = self._sum.take()
        differs = self._differs
        self._differs = False
        if objective not in self._sums:
            needs_sum = self._may_drop or self._kinds.gives_weights(objective) or differs
            self._sums[objective] = any_over_ranks(needs_sum, self._context)
            if not self._sums[objective]:
                return

        self._total = torch.zeros((), dtype=self._sum.dtype, device=self._context.device)
        if self._counts:
            self._total += weights
        self._exchange = dist.all_reduce(self._total, async_op=True)

    def divide(self, parameters: Iterable[Tensor], *, count: int) -> None:
        total = self._total
        if total is None:
            return
        self._total = None
        if self._exchange is not None:
            self._exchange.wait()
            self._exchange = None
        if total.device.type != "cpu":
            _divide(parameters, total, count=count)
        elif float(total) != count:
            _divide(parameters, float(total), count=count)

    def check(self) -> None:
        """Do nothing: every weight is allowed."""

    def _late_difference(self, output: StepOutput, num_samples: int) -> TargetError:
        return TargetError(
            f"{self._task_name} returned num_samples={output.num_samples} for a micro-batch of {num_samples} samples, "
            "and in the first step it returned the size of each. The other processes don't know of it, and the "
            "gradients would be wrong.\nReturn what the loss is a mean over as `weight` as well, in every "
            "StepOutput: then it is summed over processes in each step."
        )


@final
class SeparateWeights:
    """Refuses weights other than the loader's number of samples: ranks step without what the others count."""

    def __init__(self, *, task_name: str, strategy_name: str) -> None:
        self._kinds = _WeightKinds(task_name)
        self._task_name = task_name
        self._strategy_name = strategy_name
        # The sum of the absolute differences from the loader's counts, on the device.
        self._difference: Tensor | None = None

    def weighted(
        self, output: StepOutput, *, num_samples: int, scale: float, objective: str = "", is_only: bool = False
    ) -> Tensor:
        self._kinds.check(output, objective)
        if num_samples == 0:
            return output.loss * 0
        if output.weight is not None or output.num_samples != num_samples:
            self._compare(weight_of(output, task=self._task_name), num_samples)
        return scaled(output.loss, num_samples * scale)

    def begin_sum(self, objective: str = "") -> None:
        """Do nothing: ranks exchange nothing in a step."""

    def divide(self, parameters: Iterable[Tensor], *, count: int) -> None:
        """Do nothing: the shares that the trainer knows are right."""

    def check(self) -> None:
        if self._difference is not None and float(self._difference) > 0:
            raise self._refused()

    def _compare(self, weight: float | Tensor, num_samples: int) -> None:
        """Raise ConfigError if the weight isn't the number of samples; one on a device is compared by `check`."""
        if isinstance(weight, Tensor):
            difference = (weight - num_samples).abs()
            self._difference = difference if self._difference is None else self._difference + difference
        elif weight != num_samples:
            raise self._refused()

    def _refused(self) -> ConfigError:
        return ConfigError(
            f"{self._task_name} weights its losses by something other than the samples of a batch (tokens, classes, "
            f"targets that are ignored, samples that were dropped), and under strategy={self._strategy_name} each "
            "process steps by itself, without what the others count.\n"
            "Use strategy=ddp, allreduce or fsdp, or data that needs no weights."
        )


class _WeightKinds:
    """Checks that a task gives a `weight` for every batch of an objective, or for none."""

    def __init__(self, task_name: str) -> None:
        self._task_name = task_name
        self._has_weight: dict[str, bool] = {}

    def check(self, output: StepOutput, objective: str) -> None:
        """Raise TargetError if the output has a weight and an earlier one of the objective had none, or the reverse."""
        has_weight = output.weight is not None
        if self._has_weight.setdefault(objective, has_weight) is not has_weight:
            raise TargetError(
                f"{self._task_name} returned a StepOutput {'with' if has_weight else 'without'} `weight`, unlike "
                "before. Return one for every batch, or for none."
            )

    def gives_weights(self, objective: str) -> bool:
        return self._has_weight.get(objective, False)


class _WeightSum:
    """The sum of a step's weights. Those that are tensors stay on their devices until it is taken."""

    def __init__(self, device: torch.device) -> None:
        self.number = 0.0
        # MPS has no double precision. Asked once, since reading a device's type takes a microsecond.
        self.dtype = torch.float32 if device.type == "mps" else torch.float64
        self._device = device
        self._tensors: list[Tensor] = []

    def add(self, weight: float | Tensor) -> None:
        if isinstance(weight, Tensor):
            self._tensors.append(weight)
        else:
            self.number += weight

    def take(self) -> float | Tensor:
        """Return the sum, as a tensor on the rank's device if a weight was one, and begin again at 0."""
        number = self.number
        tensors = self._tensors
        self.number = 0.0
        self._tensors = []
        if not tensors:
            return number
        return torch.stack([weight.to(self._device, self.dtype) for weight in tensors]).sum() + number


def weight_of(output: StepOutput, *, task: str = "The task") -> float | Tensor:
    """Return the weight of the output's mean loss: a number, or a 0-d tensor if it is on an accelerator.

    Raises TargetError if its `num_samples` and `weight` contradict each other, or are negative.
    """
    weight: Any = output.num_samples if output.weight is None else output.weight
    if isinstance(weight, Tensor):
        weight = weight.detach().reshape(())
        if weight.device.type == "cpu":
            # Reading it waits for nothing.
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


def scaled(loss: Tensor, factor: float) -> Tensor:
    """Return loss * factor; multiplying by 1.0 would cost two kernels."""
    return loss if factor == 1.0 else loss * factor


def _times_weight(loss: Tensor, weight: float | Tensor, *, scale: float) -> Tensor:
    """Return the loss times its weight and `scale`; 0 if its weight is 0."""
    loss = _counted(loss, weight)
    if isinstance(weight, Tensor):
        return loss * (weight * scale).to(loss.dtype)
    return scaled(loss, weight * scale)


def _counted(loss: Tensor, weight: float | Tensor) -> Tensor:
    """Return the loss, or 0 if its weight is 0, since the mean over nothing is NaN."""
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, loss, 0.0)
    if weight > 0:
        return loss
    # Multiplied by 0, NaN would stay.
    return loss.where(torch.zeros((), dtype=torch.bool, device=loss.device), 0.0)


@torch.no_grad()
def _divide(parameters: Iterable[Tensor], total: float | Tensor, *, count: int) -> None:
    """Multiply all gradients by count / total; by 0 if the total is 0."""
    factor: float | Tensor
    if isinstance(total, Tensor):
        factor = torch.where(total > 0, count / total, 0)
    elif total > 0:
        factor = count / total
    else:
        factor = 0.0

    for gradients in _by_kind(parameters):
        first = gradients[0]
        if isinstance(factor, Tensor):
            torch._foreach_mul_(gradients, factor.to(device=first.device, dtype=first.dtype))
        else:
            torch._foreach_mul_(gradients, factor)


def _by_kind(parameters: Iterable[Tensor]) -> Sequence[list[Tensor]]:
    """Return the gradients on this rank, those of one device and data type together."""
    kinds: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = local_tensor(parameter.grad)
            kinds[gradient.device, gradient.dtype].append(gradient)
    return list(kinds.values())

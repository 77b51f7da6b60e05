"""Sums and counts of losses and metrics: kept on the device while steps run, reduced over ranks in one call."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from framework.distributed.collectives import any_over_ranks, gather_to_all, sum_over_ranks
from framework.distributed.context import Context
from framework.distributed.sharded import local_tensor, total_norm
from framework.errors import NotFiniteError, RunError
from framework.training.loss_weights import weight_of
from framework.types import StepOutput, SumCount

LOSS = "loss"


def is_loss(name: str) -> bool:
    """Return True for the name of a loss: the task's, or that of one of its objectives."""
    return name == LOSS or name.endswith(f"/{LOSS}")


# Scalars that are packed into one tensor: logging rarely mustn't keep a tensor for every step.
_CHUNK = 1024


def _sum_dtype(device: torch.device) -> torch.dtype:
    """Return the type that sums are in: MPS has no double precision."""
    return torch.float32 if device.type == "mps" else torch.float64


@final
class Series:
    """The values of one name since they were last read: each a sum over samples, or a mean with its weight."""

    def __init__(self) -> None:
        self.count: float = 0
        # Scalars, and what was added before them in flat tensors.
        self._values: list[Tensor] = []
        self._packed: list[Tensor] = []
        self._weights: list[float] = []
        self._steps: list[int] = []

    def add(self, value: Tensor, *, weight: float, count: float, step: int) -> None:
        if value.ndim:
            value = value.reshape(())
        self._values.append(value)
        self._weights.append(weight)
        self._steps.append(step)
        self.count += count
        if len(self._values) == _CHUNK:
            self.values()

    def values(self) -> Tensor:
        """Return all that was added, in one flat tensor."""
        if self._values:
            self._packed.append(torch.stack(self._values))
            self._values = []
        if not self._packed:
            return torch.zeros(0)
        if len(self._packed) > 1:
            self._packed = [torch.cat(self._packed)]
        return self._packed[0]

    def total(self, device: torch.device) -> Tensor:
        """Return the weighted sum as a tensor of one element, in double precision if the device has it."""
        dtype = _sum_dtype(device)
        if not self._weights:
            return torch.zeros(1, dtype=dtype, device=device)
        weights = torch.tensor(self._weights, dtype=dtype, device=device)
        return (self.values().to(device=device, dtype=dtype) * weights).sum().reshape(1)

    def first_nonfinite(self) -> int | None:
        """Return the step of the first value that is NaN or infinite; waits for the device."""
        is_finite: list[bool] = torch.isfinite(self.values()).tolist()
        if all(is_finite):
            return None
        return self._steps[is_finite.index(False)]

    def state_dict(self) -> dict[str, Any]:
        """Return all that was added, on the CPU; waits for the device."""
        values = self.values().cpu()
        return {"values": values, "weights": list(self._weights), "steps": list(self._steps), "count": self.count}

    def extend(self, state: Mapping[str, Any], *, device: torch.device) -> None:
        """Add the values of a `state_dict`."""
        self.values()
        self._packed.append(state["values"].to(device))
        self._weights += state["weights"]
        self._steps += state["steps"]
        self.count += state["count"]


class Reduced(NamedTuple):
    """What a meter has learned of all ranks, the same on each."""

    # Means of losses and metrics by name.
    means: dict[str, float]
    # The sums over ranks of the other numbers that were given.
    extra: list[float]


@final
class Meter:
    """Collects what steps compute. Adding only keeps references: no kernel, no wait for the device.

    varies: names differ from one reduction to the next, since objectives are due in some steps only.
    """

    def __init__(self, *, varies: bool = False) -> None:
        self._varies = varies
        self._series: defaultdict[str, Series] = defaultdict(Series)
        # Of metrics whose counts are tensors.
        self._counts: defaultdict[str, Series] = defaultdict(Series)
        # Names that all ranks have, known after the first reduction.
        self._agreed: list[str] | None = None
        # Called with each batch's output and the name of its objective, for jobs that look inside of steps.
        self.listeners: list[Callable[[StepOutput, str], None]] = []

    def add(self, output: StepOutput, *, step: int = 0, objective: str = "") -> None:
        """Add one batch: its loss is a mean and counts by `output.weight`, else `num_samples`; metrics are sums.

        objective: the name of the task's, which then precedes those of loss and metrics.
        """
        prefix = f"{objective}/" if objective else ""
        self._add_loss(prefix + LOSS, output.loss.detach(), weight_of(output), step=step)
        for name, (total, count) in output.metrics.items():
            self._add_metric(prefix + name, total, count, step=step)
        for listen in self.listeners:
            listen(output, objective)

    def _add_loss(self, name: str, loss: Tensor, weight: float | Tensor, *, step: int) -> None:
        # With a weight of 0, the loss is the mean over nothing, which is NaN and doesn't count.
        if isinstance(weight, Tensor):
            weighted = torch.where(weight > 0, loss, 0) * weight
            self._series[name].add(weighted, weight=1, count=0, step=step)
            self._counts[name].add(weight, weight=1, count=0, step=step)
            return
        if weight == 0:
            loss = torch.zeros_like(loss)
        self._series[name].add(loss, weight=weight, count=weight, step=step)

    def _add_metric(self, name: str, total: Tensor | float, count: Tensor | int, *, step: int) -> None:
        # A plain number would be rounded to torch's default type, alone or together with tensors.
        dtype = torch.float64 if isinstance(total, (int, float)) else None
        value = torch.as_tensor(total, dtype=dtype).detach()
        if isinstance(count, Tensor):
            self._counts[name].add(count.detach(), weight=1, count=0, step=step)
            count = 0
        self._series[name].add(value, weight=1, count=count, step=step)

    def reduce(self, context: Context, *, extra: Sequence[float] = ()) -> Reduced:
        """Return the means over all ranks since `clear`, and `extra` summed over ranks, by one flat reduction.

        Every rank must call it; it waits for the device. A name without samples on any rank is left out.
        Raises RunError if this rank has names that the others don't.
        """
        names = self._agree(context)
        device = context.device
        sums: list[Tensor] = []
        # The count of a name is a number, or a tensor that isn't read before it is reduced.
        number_counts: list[float] = []
        tensor_counts: list[Tensor] = []
        for name in names:
            series = self._series.get(name, Series())
            sums.append(series.total(device))
            number_counts.append(float(series.count))
            tensor_counts.append(self._counts.get(name, Series()).total(device))
        # All numbers go to the device in one copy.
        numbers = torch.tensor([*number_counts, *extra], dtype=_sum_dtype(device), device=device)
        flat = torch.cat([*sums, *tensor_counts, numbers])

        # The totals come in the same order.
        totals = iter(sum_over_ranks(flat, context).tolist())
        total_sums = list(islice(totals, len(names)))
        total_tensor_counts = list(islice(totals, len(names)))
        total_number_counts = list(islice(totals, len(names)))
        total_extra = list(totals)

        means = {}
        for name, total, tensor_count, number_count in zip(
            names, total_sums, total_tensor_counts, total_number_counts, strict=True
        ):
            count = tensor_count + number_count
            if count:
                means[name] = total / count
        return Reduced(means, total_extra)

    @property
    def names(self) -> list[str]:
        """The names that all ranks have; empty before the first reduction."""
        return self._agreed or []

    def first_nonfinite_step(self, context: Context) -> int | None:
        """Return the first step whose loss was NaN or infinite on any rank; waits for the device.

        Every rank must call it, before `clear`.
        """
        steps = [series.first_nonfinite() for name, series in self._series.items() if is_loss(name)]
        of_ranks = gather_to_all(_first(steps), context)
        return _first(of_ranks)

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank has added since the last `clear`, for checkpoints; waits for the device."""
        states = {name: series.state_dict() for name, series in self._series.items()}
        for name, counts in self._counts.items():
            states[name]["count"] += counts.total(torch.device("cpu")).item()
        return states

    def load_state_dicts(self, states: Iterable[Mapping[str, Any]], *, device: torch.device) -> None:
        """Add the states of several meters; their values go to `device`."""
        for state in states:
            for name, series in state.items():
                self._series[name].extend(series, device=device)

    def clear(self) -> None:
        """Drop what was added; the names stay agreed, unless they vary."""
        self._series.clear()
        self._counts.clear()
        if self._varies:
            self._agreed = None

    def _agree(self, context: Context) -> list[str]:
        """Return the names to reduce, in one order on every rank. Gathered once: later ones must be among them.

        A rank without samples has no names and takes the others'.
        """
        mine = sorted(self._series)
        if self._agreed is None:
            of_ranks: list[list[str]] = gather_to_all(mine, context)
            self._agreed = max(of_ranks, key=len)
            differs = bool(mine) and mine != self._agreed
        else:
            differs = not set(mine).issubset(self._agreed)
        if differs:
            raise RunError(
                f"Rank {context.rank} reports the metrics {mine}, but other ranks or earlier reports {self._agreed}.\n"
                "A task must return the same names on every rank and for every batch."
            )
        return self._agreed


def _first(steps: Iterable[int | None]) -> int | None:
    """Return the first of the steps that are known; None if none is."""
    return min((step for step in steps if step is not None), default=None)


def check_finite(parameters: Sequence[nn.Parameter], meter: Meter, *, step: int, epoch: int, context: Context) -> None:
    """Raise NotFiniteError if a loss since the last log, or a weight, is NaN or infinite on any rank.

    Every rank must call it; waits for the device.
    """
    is_bad = False
    if not math.isfinite(float(total_norm(parameters))):
        # Or it is only their squares that are too large.
        is_bad = not all(bool(local_tensor(parameter).isfinite().all()) for parameter in parameters)
    bad_step = meter.first_nonfinite_step(context)
    if bad_step is not None:
        raise bad_loss("not finite", step=bad_step, epoch=epoch)
    if any_over_ranks(is_bad, context):
        raise bad_weights(step=step)


def bad_loss(value: object, *, step: int | None, epoch: int) -> NotFiniteError:
    """Return the error for a loss that is `value` since `step`."""
    return NotFiniteError(
        f"The training loss is {value} since step {step} (epoch {epoch}).\n"
        "Nothing was saved after it. Lower optimizer.lr, set trainer.gradient_clip_val, or look at that batch."
    )


def bad_weights(*, step: int) -> NotFiniteError:
    """Return the error for weights that are NaN or infinite after `step`."""
    return NotFiniteError(
        f"The weights are no longer finite after step {step}, though the loss was.\n"
        "Nothing was saved since. Lower optimizer.lr, set trainer.gradient_clip_val, or look at the gradients."
    )


@final
class ReportedPairs:
    """This rank's pairs (sum, count) of callbacks, by the names they are logged under. Only `reduce` reads tensors."""

    def __init__(self) -> None:
        self._pairs: dict[str, list[SumCount]] = {}

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def add(self, name: str, pair: SumCount) -> None:
        self._pairs.setdefault(name, []).append(pair)

    def reduce(self, context: Context, *, prefix: str) -> dict[str, float]:
        """Return the means over all ranks of the pairs whose names have the prefix, and remove these.

        Every rank must call it; waits for the device.
        """
        own = {name: sums for name, sums in self.state_dict().items() if name.startswith(prefix)}
        for name in own:
            del self._pairs[name]
        totals: defaultdict[str, float] = defaultdict(float)
        counts: defaultdict[str, float] = defaultdict(float)
        for of_rank in gather_to_all(own, context):
            for name, (total, count) in of_rank.items():
                totals[name] += total
                counts[name] += count
        return {name: total / counts[name] for name, total in totals.items() if counts[name]}

    def state_dict(self) -> dict[str, tuple[float, float]]:
        """Return what isn't reduced yet; waits for the device."""
        sums = {}
        for name, pairs in self._pairs.items():
            total = sum(float(total) for total, _ in pairs)
            count = sum(float(count) for _, count in pairs)
            sums[name] = (total, count)
        return sums

    def load_state_dicts(self, states: Iterable[Mapping[str, Any]]) -> None:
        for state in states:
            for name, (total, count) in state.items():
                self.add(name, (total, count))

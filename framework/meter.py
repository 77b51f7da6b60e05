"""Sums and counts: kept on the device while steps run, added over ranks in one go when somebody wants to read them."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, cast, final

import torch
from torch import Tensor

from framework.distributed.collectives import gather_to_all, sum_over_ranks
from framework.distributed.context import Context
from framework.errors import RunError, TargetError
from framework.tasks.supervised import describe
from framework.types import StepOutput, Task

LOSS = "loss"
_CHUNK = 1024  # scalars packed into one tensor, so that reading rarely doesn't keep a tensor for every step


def rank_loss(rank: int) -> str:
    """Return the name under which `Meter.reduce` gives the mean loss of one rank."""
    return f"{LOSS}/rank_{rank}"


@final
class Series:
    """The values of one name since they were last read: each a sum over samples, or a mean with its weight."""

    def __init__(self) -> None:
        self.count = 0
        self._packed: list[Tensor] = []
        self._loose: list[Tensor] = []
        self._weights: list[int] = []
        self._steps: list[int] = []

    def __len__(self) -> int:
        """How many values."""
        return len(self._weights)

    def add(self, value: Tensor, *, weight: int, count: int, step: int) -> None:
        self._loose.append(value)
        self._weights.append(weight)
        self._steps.append(step)
        self.count += count
        if len(self._loose) == _CHUNK:
            self._pack()

    def total(self, device: torch.device) -> Tensor:
        """The weighted sum, in double precision where the device has it, as a tensor of one element."""
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._pack()
        if not self._packed:
            return torch.zeros(1, dtype=dtype, device=device)
        values = torch.cat(self._packed).to(device=device, dtype=dtype)
        weights = torch.tensor(self._weights, dtype=dtype, device=device)
        return (values * weights).sum().reshape(1)

    def packed(self) -> list[Tensor]:
        """Every value in the order it came in, in tensors of one dimension."""
        self._pack()
        return self._packed

    def on_host(self) -> list[float]:
        """Every value in the order it came in; waits for the device, for each value."""
        packed = [value for values in self._packed for value in values.tolist()]
        return packed + [value.item() for value in self._loose]

    def weigh(self, values: Sequence[float]) -> float:
        """The weighted sum of `values`, which are those of `on_host`: rounded once, where none is infinite."""
        weighted: list[float] = list(map(operator.mul, values, self._weights))
        try:
            return math.fsum(weighted)  # rounded once
        except (OverflowError, ValueError):  # of infinities, or sums beyond the largest number
            return float(sum(weighted))

    def first_nonfinite(self) -> int | None:
        """The step of the first value that is NaN or infinite; waits for the device."""
        self._pack()
        if not self._packed:
            return None
        bad = (~torch.isfinite(torch.cat(self._packed))).nonzero().flatten().tolist()
        return self._steps[bad[0]] if bad else None

    def state_dict(self) -> dict[str, Any]:
        """All that was added, on the CPU; waits for the device."""
        self._pack()
        values = torch.cat(self._packed).cpu() if self._packed else torch.zeros(0)
        return {"values": values, "weights": list(self._weights), "steps": list(self._steps), "count": self.count}

    def take(self, state: Mapping[str, Any], *, device: torch.device) -> None:
        """Add what `state_dict` gave."""
        self._pack()
        if len(state["values"]):
            self._packed.append(state["values"].to(device))
        self._weights += state["weights"]
        self._steps += state["steps"]
        self.count += state["count"]

    def _pack(self) -> None:
        if self._loose:
            self._packed.append(torch.stack(self._loose).flatten())
            self._loose = []


@final
class Meter:
    """Collects what steps compute. Adding keeps references only: no kernel, no waiting for the device."""

    def __init__(self) -> None:
        self._series: dict[str, Series] = {}
        self._counts: dict[str, Series] = {}  # of metrics whose counts are tensors
        self._agreed: list[str] | None = None  # names all ranks have, known after the first reduction

    def add(self, output: StepOutput, *, step: int = 0) -> None:
        """Add one batch: its loss is a mean and counts by `output.num_samples`, metrics are sums already."""
        samples = output.num_samples
        self._get(LOSS).add(output.loss.detach(), weight=samples, count=samples, step=step)
        for name, (total, count) in output.metrics.items():
            # A plain number would be rounded to torch's default type, alone or together with tensors.
            dtype = torch.float64 if isinstance(total, (int, float)) else None
            if isinstance(count, Tensor):
                self._counts.setdefault(name, Series()).add(count.detach(), weight=1, count=0, step=step)
                count = 0
            self._get(name).add(torch.as_tensor(total, dtype=dtype).detach(), weight=1, count=count, step=step)

    def reduce(
        self, context: Context, *, extra: Sequence[float] = (), with_rank_losses: bool = False
    ) -> tuple[dict[str, float], list[float]]:
        """Return means over all ranks since the last reduction, and `extra` summed over ranks; one flat reduction.

        Every rank must call it; it waits for the device. A name without samples on any rank is left out.
        with_rank_losses: also the mean loss of each rank, named by `rank_loss`.
        Raises RunError if this rank has names that the others don't.
        """
        by_name = {name: self._get(name) for name in self._agree(context)}
        if with_rank_losses:  # a series for each rank, to which that rank alone contributes
            for rank in range(context.world_size):
                by_name[rank_loss(rank)] = self._get(LOSS) if rank == context.rank else Series()
        names, sums, device = list(by_name), list(by_name.values()), context.device
        series = [*sums, *(self._counts.get(name, Series()) for name in names)]
        tail = [*(float(each.count) for each in sums), *extra]
        if context.world_size == 1:
            numbers = [*_totals_on_host(series, device), *tail]
        elif device.type == "cpu":
            flat = torch.tensor([*_totals_on_host(series, device), *tail], dtype=torch.float64)
            numbers = sum_over_ranks(flat, context).tolist()
        else:  # there reading a value would be one more wait than reading the sum
            dtype = torch.float32 if device.type == "mps" else torch.float64
            flat = torch.cat([*(each.total(device) for each in series), torch.tensor(tail, dtype=dtype, device=device)])
            numbers = sum_over_ranks(flat, context).tolist()
        n = len(names)
        totals, counts = numbers[:n], map(operator.add, numbers[n : 2 * n], numbers[2 * n : 3 * n])
        means = {name: total / count for name, total, count in zip(names, totals, counts, strict=True) if count}
        return means, numbers[3 * n :]

    @property
    def names(self) -> list[str]:
        """The names that all ranks have; empty before the first reduction."""
        return self._agreed or []

    def first_nonfinite_step(self, context: Context) -> int | None:
        """The first step whose loss was NaN or infinite on any rank. Every rank must call it, before `clear`."""
        steps = [step for step in gather_to_all(self._get(LOSS).first_nonfinite(), context) if step is not None]
        return min(steps, default=None)

    def first_nonfinite(self) -> int | None:
        """The first step whose loss was NaN or infinite on this rank; waits for the device."""
        return self._get(LOSS).first_nonfinite()

    def state_dict(self) -> dict[str, Any]:
        """What this rank has added since the last `clear`; waits for the device."""
        states = {name: series.state_dict() for name, series in self._series.items() if len(series)}
        for name, counts in self._counts.items():
            states[name]["count"] += counts.weigh(counts.on_host())
        return states

    def load_state_dicts(self, states: Iterable[Mapping[str, Any]], *, device: torch.device) -> None:
        """Add what several `state_dict` gave; their values go to `device`."""
        for state in states:
            for name, series in state.items():
                self._get(name).take(series, device=device)

    def clear(self) -> None:
        """Drop what was added; the names stay agreed."""
        self._series.clear()
        self._counts.clear()

    def _get(self, name: str) -> Series:
        series = self._series.get(name)
        if series is None:
            series = self._series[name] = Series()
        return series

    def _agree(self, context: Context) -> list[str]:
        """The names to reduce, in one order on every rank. Asked once: later ones must be among them.

        A rank without samples has no names and takes the others'.
        """
        mine = sorted(self._series)
        if mine == self._agreed:
            return mine
        if self._agreed is None:
            by_rank = gather_to_all(mine, context)
            self._agreed = max(by_rank, key=len)
            differing = [rank for rank, names in enumerate(by_rank) if names and names != self._agreed]
            if differing:
                rank = differing[0]
                raise RunError(
                    f"Ranks report different metrics: rank {rank} has {by_rank[rank]}, others {self._agreed}.\n"
                    "A task must return the same names on every rank and for every batch."
                )
        unknown = set(mine) - set(self._agreed)
        if unknown:
            raise RunError(
                f"Rank {context.rank} reports {sorted(unknown)}, which the first report didn't have: {self._agreed}.\n"
                "A task must return the same names on every rank and for every batch."
            )
        return self._agreed


def _totals_on_host(series: Sequence[Series], device: torch.device) -> list[float]:
    """Return the weighted sum of each; one wait if all are of one type on one device."""
    packed = [] if device.type == "cpu" else [values for each in series for values in each.packed()]
    if len({(values.dtype, values.device) for values in packed}) != 1:  # which can't be joined as they are
        return [each.weigh(each.on_host()) for each in series]
    values = iter(torch.cat(packed).tolist())
    return [each.weigh(list(itertools.islice(values, len(each)))) for each in series]


def check_output(output: Any, task: Task, method: str) -> None:
    """Raise TargetError unless `output`, returned by the task's method, is a valid StepOutput; reads no values."""
    returned = f"{type(task).__name__}.{method} returned"
    if not isinstance(output, StepOutput):
        raise TargetError(
            f"{returned} {describe(output)}. It must return framework.StepOutput(loss, num_samples, metrics), whose "
            "metrics may be left out."
        )
    loss, num_samples, metrics = cast("tuple[Any, Any, Any]", output)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TargetError(
            f"{returned} a loss that is {describe(loss)}. It must be a tensor of one number: the mean over the batch's "
            "samples."
        )
    if method == "training_step" and not loss.requires_grad:
        raise TargetError(
            f"{returned} a loss that doesn't depend on a trained parameter, so there is no gradient. Leave out what "
            "cuts it off: detach(), item(), torch.no_grad(), argmax() and comparisons."
        )
    if not isinstance(num_samples, Integral):
        raise TargetError(
            f"{returned} a num_samples that is {describe(num_samples)}. It must be an int: how many samples the loss "
            "is the mean of."
        )
    if not isinstance(metrics, Mapping):
        raise TargetError(f"{returned} metrics that are {describe(metrics)}. They must be a dict.")
    for name, pair in metrics.items():
        if not isinstance(name, str) or name == LOSS:
            raise TargetError(
                f"{returned} a metric called {name!r}. Its name must be a str other than {LOSS!r}, which is the loss's."
            )
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(map(_is_number, pair)):
            raise TargetError(
                f"{returned} the metric {name!r} as {describe(pair)}. It must be a pair (sum over samples, count) of "
                "numbers or one-element tensors, which adds up over batches and processes: for a mean m of n samples, "
                "(m * n, n)."
            )


def _is_number(value: object) -> bool:
    return value.numel() == 1 and not value.is_complex() if isinstance(value, Tensor) else isinstance(value, Real)

"""Which samples of a micro-batch make a fault that no row tells, since the model mixes them: found by leaving some out.

guilty_rows(is_wrong, num_rows=24)     # is_wrong([0, 1, 2]): is the fault there with these rows alone?
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from framework.callbacks.first_fault import Fault, sample_of
from framework.callbacks.layer_sizes import LayerSizes, Measured, lengths_of
from framework.distributed.context import Context
from framework.system.run_dir import RunDir, write_object
from framework.training.trainer import Trainer
from framework.types import Batch, Callback, FitInfo, MicroBatchInfo, StepOutput

# If each of this many parts of the micro-batch has the fault, no few samples make it.
_PARTS = 4
# More samples than this aren't named, nor more than one in `_PARTS`.
_MOST = 4

# True if the fault is there with some rows alone; None if the model can't compute these.
IsWrong = Callable[[Sequence[int]], bool | None]
# What computes an objective from a batch.
Compute = Callable[[torch.nn.Module, Batch], StepOutput]


def guilty_rows(is_wrong: IsWrong, *, num_rows: int) -> list[int] | None:
    """Return the rows that make a fault: it is there with each of them, and not without all.

    None if no few rows make it. Takes about log2(num_rows) calls for each of them.
    """
    rows = list(range(num_rows))
    if num_rows < _PARTS or not is_wrong(rows):
        return None
    # The others are looked at together with a part that is right: a model may need several samples to make the fault.
    right = None
    for first in range(_PARTS):
        part = rows[first::_PARTS]
        if is_wrong(part) is False:
            right = part
            break
    if right is None:
        return None

    guilty: list[int] = []
    suspects = [row for row in rows if row not in right]
    while is_wrong([*right, *suspects]) is not False:
        if len(guilty) == min(_MOST, num_rows // _PARTS):
            return None
        guilty.append(suspects.pop(_last_guilty(is_wrong, suspects, right=right)))
    return sorted(guilty)


def _last_guilty(is_wrong: IsWrong, suspects: Sequence[int], *, right: Sequence[int]) -> int:
    """Return the position of the last suspect that makes the fault. All of them together do, `right` alone doesn't."""
    wrong_from = 0
    right_from = len(suspects)
    while right_from - wrong_from > 1:
        middle = (wrong_from + right_from) // 2
        if is_wrong([*right, *suspects[middle:]]) is False:
            right_from = middle
        else:
            wrong_from = middle
    return wrong_from


@final
class SampleSearch(Callback):
    """Looks for the samples of a fault that is known, before the micro-batch of the fault is trained.

    Parts of the micro-batch go through the model, forward and backward, and change nothing. Writes
    `why/rank_N.json`: the fault with its samples, or none if they can't be told.

    Args:
        fault: as `Fault.as_dict` returns it.
    """

    def __init__(self, *, run_dir: RunDir, context: Context, fault: Mapping[str, Any]) -> None:
        names = {field.name for field in fields(Fault)}
        known = {name: value for name, value in fault.items() if name in names}
        self._run_dir = run_dir
        self._context = context
        self._fault = Fault(**{**known, "samples": None})
        self._found: Fault | None = None

    def observe_trainer(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_fit_start(self, info: FitInfo) -> None:
        self._sizes = LayerSizes(info.model, info.optimizer, norm=math.inf)

    def on_micro_batch_start(self, info: MicroBatchInfo) -> None:
        fault = self._fault
        is_step = self._trainer.progress.step + 1 == fault.step and self._context.rank == fault.rank
        is_here = is_step and info.number == fault.micro_batch and info.objective == fault.objective
        if is_here and self._found is None:
            self._found = self._with_samples(info)
            self._sizes.remove()

    def on_fit_end(self) -> None:
        content = None
        if self._found is not None:
            content = {**self._found.as_dict(), "text": self._found.text()}
        folder = self._run_dir.path / "why"
        folder.mkdir(exist_ok=True)
        write_object(folder / f"rank_{self._context.rank}.json", {"rank": self._context.rank, "fault": content})

    def _with_samples(self, info: MicroBatchInfo) -> Fault | None:
        """Return the fault with its samples; None if they can't be told."""
        compute = self._trainer.step_of_part(info.objective)
        num_rows = self._fault.num_samples
        if compute is None or part_of(info.batch, [0], num_rows=num_rows) is None:
            return None
        size_of = partial(self._size, compute, info)
        try:
            whole = size_of(range(num_rows))
            if whole is None:
                return None
            rows = guilty_rows(partial(_is_as_large, size_of, whole), num_rows=num_rows)
        except ExchangeError:
            return None
        if rows is None:
            return None
        with_lengths = info._replace(batch=lengths_of(info.batch))
        cause = "activation" if self._fault.cause == "layer" else self._fault.cause
        culprits = "that sample" if len(rows) == 1 else "these samples"
        return replace(
            self._fault,
            cause=cause,
            samples=[sample_of(row, with_lengths) for row in rows],
            evidence=[*self._fault.evidence, f"without {culprits}, the rest of the micro-batch is as usual"],
        )

    def _size(self, compute: Compute, info: MicroBatchInfo, rows: Sequence[int]) -> float | None:
        """Return how large the values at the place of the fault are with some rows alone; None if there are none.

        Raises ExchangeError if that takes the other ranks.
        """
        part = part_of(info.batch, rows, num_rows=self._fault.num_samples)
        indices = None if info.indices is None else info.indices[list(rows)]
        state = self._trainer.state
        self._sizes.begin(info._replace(batch=part, num_samples=len(rows), indices=indices))
        try:
            with state.without_side_effects(), NoExchange():
                output = compute(state.bare_model, part)
                self._sizes.note_loss(output)
                # Each sample counts as much as in the whole micro-batch.
                share = len(rows) / self._fault.num_samples
                self._go_backward(state.precision.scaler.scale(output.loss * share))
        except ExchangeError:
            raise
        except Exception:
            # A model may refuse so few samples, as BatchNorm does a single one.
            return None
        finally:
            sizes = self._sizes.end(self._fault.step)
        return _largest(sizes.measured(), self._fault)

    def _go_backward(self, loss: Tensor) -> None:
        """Have all gradients measured. No parameter gets one, so strategies don't exchange any."""
        names = []
        parameters = []
        for name, parameter in self._trainer.state.bare_model.named_parameters():
            if parameter.requires_grad:
                names.append(name)
                parameters.append(parameter)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None:
                self._sizes.note_gradient(name, gradient)


def _is_as_large(size_of: Callable[[Sequence[int]], float | None], whole: float, rows: Sequence[int]) -> bool | None:
    """Return True if these rows alone give values that are about as large as all rows give; None if they give none."""
    size = size_of(rows)
    if size is None:
        return None
    if not math.isfinite(whole):
        return not math.isfinite(size)
    return not size <= whole / 2


def _largest(measured: Iterable[Measured], fault: Fault) -> float | None:
    """Return the largest value at the place of the fault; None if nothing was measured there."""
    sizes = []
    for one in measured:
        event = one.event
        if (event.direction, event.kind, event.layer) == (fault.direction, fault.kind, fault.layer):
            sizes.append(one.largest)
    return max(sizes, default=None)


def part_of(batch: Batch, rows: Sequence[int], *, num_rows: int) -> Batch | None:
    """Return some rows of a batch; None if no tensor of it has as many rows.

    They are in the first dimension of this size, which is another one where sequences come first. What has no such
    dimension stays as it is.
    """
    if not any(isinstance(leaf, Tensor) and num_rows in leaf.shape for leaf in tree_leaves(batch)):
        return None

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or num_rows not in leaf.shape:
            return leaf
        positions = torch.tensor(list(rows), device=leaf.device)
        return leaf.index_select(list(leaf.shape).index(num_rows), positions)

    return tree_map(take, batch)


class ExchangeError(Exception):
    """Raised where ranks would exchange values."""


@final
class NoExchange(TorchDispatchMode):
    """Raises ExchangeError in place of a collective, for which the other ranks would not be there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise ExchangeError
        return func(*args, **(kwargs or {}))

"""How far what an exported file computes is from what the model computes, and how far it may be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from framework.errors import RunError

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""The greatest difference allowed, as a share of the output's largest value. Other types must be equal."""


@dataclass(frozen=True)
class Agreement:
    """Of the output that differs most, for what it may: its greatest difference and its type."""

    difference: float
    dtype: torch.dtype

    @property
    def allowed(self) -> float:
        return TOLERANCES.get(self.dtype, 0.0)

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        if self.allowed == 0:
            return f"equal ({name})"
        if self.difference == 0:
            return f"no difference ({name})"
        return f"greatest difference {self.difference:.1e} of the largest value ({name}; allowed: {self.allowed:.0e})"


def agreement(wanted: Sequence[Tensor], found: Sequence[Tensor]) -> Agreement:
    """Compare outputs one by one. Raises RunError where they differ by more than TOLERANCES, or in number or kind."""
    if len(wanted) != len(found):
        raise RunError(f"The model gives {len(wanted)} tensors, the file {len(found)}.")
    if not wanted:
        raise RunError("The model gives no tensor, so there is nothing to export.")
    return worst(_agreement(position, *pair) for position, pair in enumerate(zip(wanted, found, strict=True)))


def worst(each: Iterable[Agreement]) -> Agreement:
    """The one nearest to what is allowed."""
    return max(each, key=lambda one: one.difference / one.allowed if one.allowed else 0.0)


def _agreement(position: int, wanted: Tensor, found: Tensor) -> Agreement:
    if wanted.shape != found.shape or wanted.dtype != found.dtype:
        raise RunError(f"Output {position} is {_described(wanted)} of the model, and {_described(found)} of the file.")
    result = Agreement(_difference(wanted, found), wanted.dtype)
    if not result.difference <= result.allowed:
        raise RunError(
            f"Output {position} of the file ({_described(found)}) differs from the model's by {result.difference:.1e} "
            f"of the largest value; {result.allowed:.0e} is allowed."
        )
    return result


def _difference(wanted: Tensor, found: Tensor) -> float:
    if wanted.dtype not in TOLERANCES:
        return 0.0 if torch.equal(wanted, found) else math.inf
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    a, b = (each.detach().cpu().to(wide).reshape(-1) for each in (wanted, found))
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)) or not torch.equal(a[~finite].isnan(), b[~finite].isnan()):
        return math.inf
    rest = ~finite & ~a.isnan()
    if not torch.equal(a[rest], b[rest]):  # infinities of another sign
        return math.inf
    if not finite.any():
        return 0.0
    greatest, scale = float((a - b)[finite].abs().max()), float(a[finite].abs().max())
    return greatest / scale if scale else greatest


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"

"""Small stand-ins for tensors, in which no difference is lost: the distance of two sketches is that of the tensors.

A row of values is dealt to buckets, each value with a sign of its own, and each bucket is summed (a count sketch:
Charikar, Chen and Farach-Colton, 2002). It is linear, so the sketch of a difference is the difference of the sketches.
Rows no longer than the buckets are many stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

ROW_BUCKETS = 64  # of one sample's values in one tensor
TENSOR_BUCKETS = 1024  # of a parameter, gradient or buffer
_PIECE = 1 << 22  # values that are worked on at a time
# Of splitmix64, as int64 (Steele, Lea and Flood, 2014): signs must follow no pattern that values may have, too.
_SPREAD = -7046029254386353131
_MIX = ((30, -4658895280553007687), (27, -7723592293110705685))


@torch.no_grad()
def sketch(rows: Tensor, *, buckets: int) -> Tensor:
    """Of a tensor of shape (R, D): (R, min(D, buckets)), float64, on the CPU. Values that aren't finite count as 0."""
    rows = rows.detach()
    if rows.is_complex():
        rows = torch.view_as_real(rows).flatten(1)
    number, length = rows.shape
    if length <= buckets:
        return _plain(rows).cpu()
    total = torch.zeros(number, buckets, dtype=torch.float64)
    width = max(1, _PIECE // max(1, number * buckets)) * buckets
    for begin in range(0, length, width):
        piece = _plain(rows[:, begin : begin + width])
        piece = piece * _signs(begin, piece.shape[1], device=piece.device)
        piece = torch.nn.functional.pad(piece, (0, -piece.shape[1] % buckets))
        total += piece.reshape(number, -1, buckets).sum(dim=1).cpu()
    return total


def sketch_whole(tensor: Tensor) -> Tensor:
    """Of all values of a tensor as one row: shape (up to TENSOR_BUCKETS,)."""
    return sketch(tensor.reshape(1, -1), buckets=TENSOR_BUCKETS)[0]


def sample_sketches(tensor: Tensor) -> dict[int, Tensor]:
    """By dimension that may be the samples': a sketch of what lies at each place of it. None for a single number.

    The second dimension is one only of tensors as sequence models have them: (sequence, sample) or with a third.
    """
    if tensor.ndim == 0 or tensor.numel() == 0:
        return {}
    found = {0: sketch(tensor.reshape(tensor.shape[0], -1), buckets=ROW_BUCKETS)}
    if tensor.ndim in (2, 3):
        found[1] = sketch(tensor.transpose(0, 1).reshape(tensor.shape[1], -1), buckets=ROW_BUCKETS)
    return found


def views_by_sample(sketches: Mapping[int, Tensor], shape: Sequence[int], *, num_samples: int) -> dict[str, Tensor]:
    """The ways in which a tensor of this shape can be one row for each of `num_samples`: (num_samples, k) each.

    Its first dimension may also be several rows for each sample, sample by sample or place by place. The names hold
    how many values a sample has, so that one name means the same tensor in any number of samples.
    """
    if not sketches:
        return {}
    rows, length = sketches[0], _product(shape[1:])
    views: dict[str, Tensor] = {}
    if len(rows) % num_samples == 0:
        each = len(rows) // num_samples
        views[f"first {each} {length}"] = rows.reshape(num_samples, -1)
        if each > 1:
            views[f"first, turned {each} {length}"] = (
                rows.reshape(each, num_samples, -1).transpose(0, 1).reshape(num_samples, -1)
            )
    if 1 in sketches and shape[1] == num_samples:
        views[f"second {shape[0]} {_product(shape[2:])}"] = sketches[1]
    return {name: sketch(view, buckets=ROW_BUCKETS) for name, view in views.items()}


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """All tensors in what a module takes or gives: tensors, tuples, lists, mappings, in any nesting."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors_in(value)


def _product(numbers: Sequence[int]) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product


def _plain(values: Tensor) -> Tensor:
    # MPS has no float64.
    values = values.cpu() if values.device.type == "mps" else values
    return torch.nan_to_num(values.to(torch.float64), nan=0.0, posinf=0.0, neginf=0.0)


def _signs(begin: int, length: int, *, device: torch.device) -> Tensor:
    """+1 or −1 for each place from `begin` on: the same on every machine."""
    places = torch.arange(begin, begin + length, device=device) * _SPREAD
    for shift, factor in _MIX:
        places = (places ^ (places >> shift)) * factor
    return (places >> 40 & 1).to(torch.float64) * 2 - 1

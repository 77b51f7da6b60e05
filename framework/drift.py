"""Replicas whose weights are no longer the same: noticed with every checkpoint, before it is written."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from framework.checkpoint.snapshot import fingerprints
from framework.distributed.collectives import gather_to_all
from framework.distributed.context import Context
from framework.distributed.tensors import local
from framework.errors import RunError
from framework.types import Strategy, part_of, replicas_differ

Digest = tuple[int | None, int]
"""Which part of a copy of the model a rank has, None for one that is compared with no other; a hash of its weights."""


def digest_of(model: nn.Module, strategy: Strategy, context: Context) -> Digest:
    """Of this rank's weights, bit by bit; waits for the device once. model: unwrapped."""
    part = None if context.world_size == 1 or replicas_differ(strategy) else part_of(strategy)
    return part, hash(tuple(_sums(model))) if part is not None else 0


def check_equal(digests: Sequence[Digest], model: nn.Module, context: Context, *, step: int) -> None:
    """Raise RunError, the same on every rank, where ranks with the same part of the model have different weights.

    digests: of all ranks. Every rank must call it; exchanges something only in order to say where they differ.
    """
    by_part: dict[int, list[int]] = {}  # the ranks that have it
    for rank, (part, _) in enumerate(digests):
        if part is not None:
            by_part.setdefault(part, []).append(rank)
    differing = [ranks for ranks in by_part.values() if len({digests[rank] for rank in ranks}) > 1]
    if not differing:
        return
    names = [name for name, _ in model.named_parameters()]
    of_ranks = gather_to_all((names, _sums(model)), context)
    ranks = differing[0]
    names = of_ranks[ranks[0]][0]
    sums = [of_ranks[rank][1] for rank in ranks]
    places = [place for place in range(len(names)) if len({each[place] for each in sums}) > 1]
    groups: dict[int, list[int]] = {}
    for rank, each in zip(ranks, sums, strict=True):
        groups.setdefault(each[places[0]], []).append(rank)
    apart = " | ".join(", ".join(map(str, each)) for each in groups.values())
    more = f", and so do {len(places) - 1} of the {len(names) - 1} others" if len(places) > 1 else ""
    raise RunError(
        f"Replicas have drifted apart: after step {step} the ranks have different values of {names[places[0]]} "
        f"(ranks {apart}){more}. This checkpoint isn't saved.\n"
        "Something changes weights on some ranks only: a callback, hook or forward that writes to them (as "
        "nn.Embedding(max_norm=...) does), an optimizer that draws random numbers, processors of different kinds, or "
        "defective hardware. Resume from a checkpoint before it, once that is found."
    )


def _sums(model: nn.Module) -> list[int]:
    return fingerprints(local(parameter) for parameter in model.parameters())

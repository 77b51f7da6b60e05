"""Replicas whose weights are no longer equal: detected with every checkpoint, before it is written."""

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
"""Which part of the model a rank has, None if it is compared with no other rank; and a hash of that part's weights."""


def digest_of(model: nn.Module, strategy: Strategy, context: Context) -> Digest:
    """Return the digest of this rank's weights; waits for the device once. model: unwrapped."""
    part = None if context.world_size == 1 or replicas_differ(strategy) else part_of(strategy)
    return part, 0 if part is None else hash(tuple(_sums(model).values()))


def check_equal(digests: Sequence[Digest], model: nn.Module, context: Context, *, step: int) -> None:
    """Raise RunError, the same on every rank, if ranks with the same part of the model have different weights.

    digests: of all ranks. Every rank must call it; it communicates only to say where the weights differ.
    """
    by_part: dict[int, list[int]] = {}  # part → its ranks
    for rank, (part, _) in enumerate(digests):
        if part is not None:
            by_part.setdefault(part, []).append(rank)
    differing = [ranks for ranks in by_part.values() if len({digests[rank] for rank in ranks}) > 1]
    if not differing:
        return
    of_ranks = gather_to_all(_sums(model), context)
    ranks = differing[0]
    names = list(of_ranks[ranks[0]])
    unequal = [name for name in names if len({of_ranks[rank][name] for rank in ranks}) > 1]
    groups: dict[int, list[str]] = {}  # the ranks that agree with each other
    for rank in ranks:
        groups.setdefault(of_ranks[rank][unequal[0]], []).append(str(rank))
    apart = " | ".join(", ".join(group) for group in groups.values())
    more = f" and of {len(unequal) - 1} of the other {len(names) - 1} parameters" if len(unequal) > 1 else ""
    raise RunError(
        f"Replicas have drifted apart: after step {step} the ranks have different values of {unequal[0]} "
        f"(ranks {apart}){more}. This checkpoint isn't saved.\n"
        "Something changes weights on some ranks only: a callback, hook or forward that writes to them (as "
        "nn.Embedding(max_norm=...) does), an optimizer that draws random numbers, processors of different kinds, or "
        "defective hardware. Fix the cause, then resume from an earlier checkpoint."
    )


def _sums(model: nn.Module) -> dict[str, int]:
    named = dict(model.named_parameters())
    return dict(zip(named, fingerprints(map(local, named.values())), strict=True))

"""An all-reduce, of the mean, made of sends and receives between pairs of ranks: a butterfly.

The ranks swap halves of what they hold, then halves of that half, with partners at half the distance each time, until
each has the sum of one part (reduce-scatter by recursive halving). Then they swap the finished parts in reverse order
(all-gather by recursive doubling). With P ranks, a power of two, that is 2 log2 P rounds, in which a rank sends
2 (P - 1)/P of the tensor, as in a ring of 2 (P - 1) rounds.

    ranks    0     1     2     3
    round 1  0 <-------> 2     1 <-------> 3      a half each
    round 2  0 <-> 1           2 <-> 3            a quarter each, which is finished then
    round 3  0 <-> 1           2 <-> 3            the finished quarters
    round 4  0 <-------> 2     1 <-------> 3      the finished halves

If the number of ranks isn't a power of two, each rank beyond the largest power of two in it first gives its values to
one of the others, and gets the result from it at the end: two rounds more.

R. Thakur, R. Rabenseifner, W. Gropp, Optimization of Collective Communication Operations in MPICH, International
Journal of High Performance Computing Applications 19(1), 2005; R. Rabenseifner, Optimization of Collective Reduction
Operations, International Conference on Computational Science 2004. There the ranks that fold in share the first sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from framework.distributed.process_group import group_timeout


class Swap(NamedTuple):
    """One round of one rank while reducing: it sends the parts `sent` to `partner`, and receives and adds `kept`.

    Both are (first, end), equal if empty. While gathering, it sends the finished `kept` and receives `sent`.
    """

    partner: int
    sent: tuple[int, int]
    kept: tuple[int, int]


def inner_ranks(num_ranks: int) -> int:
    """Return the largest power of two up to `num_ranks`: how many ranks swap halves, and how many parts there are."""
    return 1 << (num_ranks.bit_length() - 1)


def rounds(rank: int, num_ranks: int) -> Iterator[Swap | None]:
    """Yield this rank's rounds of reducing, the same number on every rank; None for one that it sits out.

    At the end each inner rank holds the part of its own number. Gathering has the same rounds in reverse.
    """
    inner = inner_ranks(num_ranks)
    everything = (0, inner)
    nothing = (0, 0)
    if inner < num_ranks:
        if rank >= inner:
            yield Swap(rank - inner, sent=everything, kept=nothing)
        else:
            outer = rank + inner
            if outer < num_ranks:
                yield Swap(outer, sent=nothing, kept=everything)
            else:
                yield None

    distance = inner // 2
    while distance:
        if rank >= inner:
            yield None
        else:
            # Before this round the rank holds 2 * distance parts, from `first` on.
            first = rank & ~(2 * distance - 1)
            lower = (first, first + distance)
            upper = (first + distance, first + 2 * distance)
            if rank & distance:
                yield Swap(rank ^ distance, sent=lower, kept=upper)
            else:
                yield Swap(rank ^ distance, sent=upper, kept=lower)
        distance //= 2


@torch.no_grad()
def butterfly_all_reduce_mean(tensor: Tensor, *, group: dist.ProcessGroup | None = None) -> None:
    """Replace `tensor` by the mean of the ranks' tensors: the same bits on every rank.

    It may have any shape and strides, be on any device the backend supports, and hold floating or complex numbers.
    Every rank must call it, in the same order as other collectives. It takes memory for half a tensor, for a whole one
    if it isn't contiguous. Raises what the backend raises if a partner doesn't come within the group's time-out. NCCL
    needs any other collective before the first of these.

    Args:
        group: Another group than the default one, also of all ranks.
    """
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = values
    if _is_gloo(group):
        # It sends only from the CPU, although it reduces on GPUs.
        flat = flat.cpu()
    flat = flat.contiguous().view(-1)

    rank = dist.get_rank()
    world_size = dist.get_world_size()
    inner = inner_ranks(world_size)

    def parts(span: tuple[int, int]) -> Tensor:
        """Return their values; parts are as equal as possible, and some are empty if there are fewer values."""
        first, end = span
        return flat[first * flat.numel() // inner : end * flat.numel() // inner]

    swaps = [swap for swap in rounds(rank, world_size) if swap is not None]
    for swap in swaps:
        kept = parts(swap.kept)
        received = torch.empty_like(kept)
        _exchange(swap.partner, sent=parts(swap.sent), received=received, group=group)
        kept.add_(received)
    if rank < inner:
        parts((rank, rank + 1)).div_(world_size)
    for swap in reversed(swaps):
        _exchange(swap.partner, sent=parts(swap.kept), received=parts(swap.sent), group=group)

    is_copy = flat.data_ptr() != values.data_ptr()
    if is_copy:
        values.copy_(flat.view(values.shape))


def _exchange(partner: int, *, sent: Tensor, received: Tensor, group: dist.ProcessGroup | None) -> None:
    """Send and receive at once, so that neither rank waits for the other to receive; skip empty tensors."""
    # The partner has as many values, and skips the same.
    operations = []
    if sent.numel():
        operations.append(dist.P2POp(dist.isend, sent, partner, group))
    if received.numel():
        operations.append(dist.P2POp(dist.irecv, received, partner, group))
    if not operations:
        return

    # 0 is the time-out of the group.
    timeout = timedelta()
    if _is_gloo(group):
        # Its sends and receives keep the time-out that the group was made with, even if it was changed.
        timeout = group_timeout(group) or timeout
    for work in dist.batch_isend_irecv(operations):
        work.wait(timeout)


def _is_gloo(group: dist.ProcessGroup | None) -> bool:
    return bool(dist.get_backend(group) == dist.Backend.GLOO)

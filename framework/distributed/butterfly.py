"""An all-reduce made of sends and receives between pairs of ranks: a butterfly.

The ranks swap halves of what they hold, then halves of that half, with partners at half the distance each time, until
each has the sum of one part (reduce-scatter by recursive halving). The same way back they swap what is finished
(all-gather by recursive doubling). With P ranks, a power of two, that is 2 log2 P rounds, in which a rank sends
2 (P - 1)/P of the tensor, as in a ring of 2 (P - 1) rounds.

    ranks    0     1     2     3
    round 1  0 <-------> 2     1 <-------> 3      a half each
    round 2  0 <-> 1           2 <-> 3            a quarter each, which is finished then
    round 3  0 <-> 1           2 <-> 3            the finished quarters
    round 4  0 <-------> 2     1 <-------> 3      the finished halves

Where the number of ranks isn't a power of two, each of those beyond the largest one in it gives its values to a rank of
the others before, and gets the result from it after: two rounds more.

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

SUM, MEAN = dist.ReduceOp.SUM, dist.ReduceOp.AVG


class Swap(NamedTuple):
    """One round of one rank while reducing: it sends the parts `sent` to `partner`, and receives and adds `kept`.

    Both are (first, end), equal if empty. While gathering, it sends the finished `kept` and receives `sent`.
    """

    partner: int
    sent: tuple[int, int]
    kept: tuple[int, int]


def halvings(rank: int, num_ranks: int) -> Iterator[Swap]:
    """The rounds of the way there; those of the way back are the same in reverse, with `sent` and `kept` swapped.

    num_ranks: a power of two, of ranks and of parts. At the end `rank` holds the part of its own number.
    """
    distance = num_ranks // 2
    while distance:
        first = rank & ~(2 * distance - 1)
        lower, upper = (first, first + distance), (first + distance, first + 2 * distance)
        kept, sent = (upper, lower) if rank & distance else (lower, upper)
        yield Swap(rank ^ distance, sent, kept)
        distance //= 2


def inner_ranks(num_ranks: int) -> int:
    """Return the largest power of two up to `num_ranks`: how many ranks swap halves, and how many parts there are."""
    return 1 << (num_ranks.bit_length() - 1)


def rounds(rank: int, num_ranks: int) -> Iterator[Swap | None]:
    """Yield this rank's rounds of reducing, the same number on every rank; None for one that it sits out.

    Gathering has the same rounds in reverse.
    """
    inner = inner_ranks(num_ranks)
    everything, nothing = (0, inner), (0, 0)
    if inner < num_ranks:
        if rank >= inner:
            yield Swap(rank - inner, sent=everything, kept=nothing)
        else:
            outer = rank + inner
            yield Swap(outer, sent=nothing, kept=everything) if outer < num_ranks else None
    if rank < inner:
        yield from halvings(rank, inner)
    else:
        yield from [None] * (inner.bit_length() - 1)


@torch.no_grad()
def butterfly_all_reduce(
    tensor: Tensor, *, op: dist.ReduceOp.RedOpType = SUM, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The sum (or MEAN) of the ranks' tensors, in place and returned: the same bits on every rank.

    Of any shape and strides, on any device the backend knows; floating or complex. Every rank of the default group must
    call it, with as many values of the same type, in the same order as other collectives. It takes memory for half a
    tensor besides, for a whole one where it isn't contiguous. Raises what the backend raises when a partner is gone or
    doesn't come within the group's time-out. NCCL wants any other collective before the first of these. group: another
    one, of all ranks too.
    """
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    contiguous = values.contiguous()
    # Gloo sends from the CPU alone, though it reduces what is on a GPU.
    is_staged = contiguous.device.type != "cpu" and dist.get_backend(group) == dist.Backend.GLOO
    flat = (contiguous.cpu() if is_staged else contiguous).view(-1)
    _Butterfly(flat, is_mean=op == MEAN, group=group).run()
    if flat.data_ptr() != values.data_ptr():
        values.copy_(flat.view(values.shape))
    return tensor


class _Butterfly:
    """One all-reduce of `flat`, contiguous and of one dimension, in place."""

    def __init__(self, flat: Tensor, *, is_mean: bool, group: dist.ProcessGroup | None) -> None:
        self.flat, self.group = flat, group
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.inner = inner_ranks(self.world_size)
        self.is_mean = is_mean
        self.limit = _limit(group)

    def run(self) -> None:
        # Sums of many may be beyond the greatest number of this type, where the mean is not.
        divides_first = self.is_mean and self.flat.dtype is torch.float16
        if divides_first:
            self.flat.div_(self.world_size)
        swaps = [swap for swap in rounds(self.rank, self.world_size) if swap is not None]
        for swap in swaps:
            kept = self._parts(swap.kept)
            received = torch.empty_like(kept)
            self._exchange(swap.partner, sent=self._parts(swap.sent), received=received)
            kept.add_(received)
        if self.is_mean and not divides_first and self.rank < self.inner:
            self._parts((self.rank, self.rank + 1)).div_(self.world_size)
        for swap in reversed(swaps):
            self._exchange(swap.partner, sent=self._parts(swap.kept), received=self._parts(swap.sent))

    def _parts(self, ends: tuple[int, int]) -> Tensor:
        """The values of these parts; parts are as equal as can be, and some are empty where there are fewer values."""
        size = self.flat.numel()
        first, end = (number * size // self.inner for number in ends)
        return self.flat[first:end]

    def _exchange(self, partner: int, *, sent: Tensor, received: Tensor) -> None:
        """Send and receive at once, so that neither rank waits for the other to receive; skip empty tensors."""
        given = ((dist.isend, sent), (dist.irecv, received))
        # As many values on the other side: it leaves the same out.
        present = [(how, tensor) for how, tensor in given if tensor.numel()]
        posted = [dist.P2POp(how, tensor, partner, self.group) for how, tensor in present]
        for work in dist.batch_isend_irecv(posted) if posted else ():
            if self.limit is None:
                work.wait()
            else:
                work.wait(self.limit)


def _limit(group: dist.ProcessGroup | None) -> timedelta | None:
    """What to wait for at most; None where the backend keeps to the group's time-out by itself.

    Gloo's sends and receives know the one that the group was made with, and not that it was changed.
    """
    if dist.get_backend(group) != dist.Backend.GLOO:
        return None
    asked = group or dist.distributed_c10d._get_default_group()
    options = getattr(asked._get_backend(torch.device("cpu")), "options", None)
    limit: timedelta | None = getattr(options, "_timeout", None)
    return limit

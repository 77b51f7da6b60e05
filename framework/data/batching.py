"""Split a global batch over the ranks, then over the micro-batches of each rank.

Pure arithmetic on positions, the same on every rank, so that nothing has to be exchanged. The numbers depend on which
samples one optimizer step takes, not on which rank computes them. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from framework.config.schema import Config
from framework.errors import ConfigError
from framework.types import DataShare


@dataclass(frozen=True)
class BatchPlan:
    """How an optimizer step is split."""

    # Samples per optimizer step, of all ranks and micro-batches.
    global_batch_size: int
    # Forward passes of each rank.
    micro_batches: int
    world_size: int
    # An incomplete global batch at the end of an epoch is dropped.
    drop_last: bool = False

    @property
    def largest_share(self) -> int:
        """The most samples that a rank gets of a full global batch."""
        return -(-self.global_batch_size // self.world_size)


def plan_steps(config: Config, share: DataShare) -> BatchPlan:
    """Return how samples are split into optimizer steps, ranks and micro-batches. share: of any rank.

    Raises ConfigError for a batch that can't be split.
    """
    data = config.data
    batch_size = data.train_batch_size
    if data.global_batch_size is None and batch_size < share.micro_batches:
        raise ConfigError(
            f"data.batch_size={batch_size} can't be cut into strategy.num_microbatches={share.micro_batches}, of "
            f"one sample each at least.\nUse data.batch_size={share.micro_batches} or more, or fewer micro-batches."
        )
    return plan_batches(
        batch_size=batch_size,
        global_batch_size=data.global_batch_size,
        world_size=share.world_size,
        accumulate=config.trainer.accumulate_grad_batches,
        cuts=share.micro_batches,
        drop_last=bool(data.drop_last),
    )


def plan_batches(
    *,
    batch_size: int,
    global_batch_size: int | None,
    world_size: int,
    accumulate: int,
    cuts: int = 1,
    drop_last: bool = False,
) -> BatchPlan:
    """Decide how many samples one optimizer step takes: `global_batch_size`, else `batch_size` per forward pass.

    cuts: into how many micro-batches a pipeline cuts a forward pass; world_size then counts copies of the model.
    Raises ConfigError if a full global batch has fewer samples than the ranks have micro-batches.
    """
    if global_batch_size is None:
        global_batch_size = batch_size * world_size * accumulate
        return BatchPlan(global_batch_size, accumulate * cuts, world_size, drop_last)
    passes = world_size * accumulate * cuts
    if global_batch_size < passes:
        raise ConfigError(
            f"data.global_batch_size={global_batch_size} is less than one sample for each of the {passes} forward "
            "passes of a step.\n"
            f"Use data.global_batch_size={passes} or more, or fewer processes, trainer.accumulate_grad_batches or "
            "strategy.num_microbatches."
        )
    return BatchPlan(global_batch_size, accumulate * cuts, world_size, drop_last)


def share(count: int, *, rank: int, world_size: int) -> range:
    """Return the positions in [0, count) of `rank`: contiguous, in the order of ranks, sizes differing by at most 1."""
    size, extra = divmod(count, world_size)
    begin = rank * size + min(rank, extra)
    return range(begin, begin + size + int(rank < extra))


def micro_batches(plan: BatchPlan, *, global_count: int, rank: int) -> list[range]:
    """Return the positions of each of this rank's micro-batches in a global batch of `global_count` samples.

    A full global batch makes `plan.micro_batches`; a short one no more than it needs, the same number on every rank, so
    that all join the gradient exchange. A range may be empty: then the caller takes a stand-in of weight 0.
    """
    # For the rank with the most samples: micro-batches as large as in a full global batch, rounded up.
    most = -(-global_count // plan.world_size)
    number = -(-most * plan.micro_batches // plan.largest_share)
    rank_share = share(global_count, rank=rank, world_size=plan.world_size)
    positions = []
    for i in range(number):
        micro = share(len(rank_share), rank=i, world_size=number)
        positions.append(rank_share[micro.start : micro.stop])
    return positions


def count_windows(num_samples: int, *, global_batch_size: int, drop_last: bool = False) -> int:
    """Return the optimizer steps that `num_samples` take; the last, short global batch is kept, or dropped."""
    if drop_last:
        return num_samples // global_batch_size
    return -(-num_samples // global_batch_size)

"""How a global batch is dealt: over the ranks, then over the micro-batches of each rank.

Pure arithmetic on positions, the same on every rank, so that nothing has to be exchanged. Only how many samples come
together in one optimizer step matters to the numbers; who computes which of them doesn't.
"""

from __future__ import annotations

from dataclasses import dataclass

from framework.errors import ConfigError


@dataclass(frozen=True)
class BatchPlan:
    """global_batch_size: samples per optimizer step, of all ranks and micro-batches; micro_batches: passes per rank."""

    global_batch_size: int
    micro_batches: int
    world_size: int

    @property
    def largest_share(self) -> int:
        """Samples of a full global batch that the rank with most of them gets."""
        return -(-self.global_batch_size // self.world_size)


def plan_batches(
    *, batch_size: int, global_batch_size: int | None, world_size: int, accumulate: int, cuts: int = 1
) -> BatchPlan:
    """Decide how many samples one optimizer step takes: `global_batch_size`, else `batch_size` per forward pass.

    cuts: of a model in stages, into how many micro-batches what a copy takes at once is cut; world_size counts copies.
    Raises ConfigError when a full global batch has not a sample for every micro-batch of every rank.
    """
    if global_batch_size is None:
        return BatchPlan(batch_size * world_size * accumulate, accumulate * cuts, world_size)
    passes = world_size * accumulate * cuts
    if global_batch_size < passes:
        factors, fewer = f"{world_size} processes × trainer.accumulate_grad_batches={accumulate}", "processes"
        if cuts > 1:
            factors = factors.replace("processes", "copies of the model") + f" × strategy.num_microbatches={cuts}"
            fewer = "micro-batches, copies"
        raise ConfigError(
            f"data.global_batch_size={global_batch_size} is less than one sample for each of the {passes} forward "
            f"passes of a step ({factors}).\n"
            f"Use data.global_batch_size={passes} or more, or fewer {fewer} or accumulation steps."
        )
    return BatchPlan(global_batch_size, accumulate * cuts, world_size)


def share(count: int, *, rank: int, world_size: int) -> range:
    """The positions in [0, count) that `rank` gets: contiguous, in the order of ranks, sizes differing by at most 1."""
    size, extra = divmod(count, world_size)
    begin = rank * size + min(rank, extra)
    return range(begin, begin + size + int(rank < extra))


def micro_batches(plan: BatchPlan, *, global_count: int, rank: int) -> list[range]:
    """The positions in a global batch of `global_count` samples that each of this rank's micro-batches takes.

    A full global batch makes `plan.micro_batches`; a short one no more than it needs, every rank as many, so that all
    join the gradient exchange. A range may be empty: then the caller takes a stand-in of weight 0.
    """
    # For the rank with most samples: as large as in a full global batch, and its number rounded up.
    most = -(-global_count // plan.world_size)
    number = -(-most * plan.micro_batches // plan.largest_share)
    mine = share(global_count, rank=rank, world_size=plan.world_size)
    return [
        mine[part.start : part.stop] for part in (share(len(mine), rank=i, world_size=number) for i in range(number))
    ]


def count_windows(num_samples: int, *, global_batch_size: int) -> int:
    """Optimizer steps it takes to consume `num_samples`; the last, short global batch is kept."""
    return -(-num_samples // global_batch_size)


def own_micro_batches(plan: BatchPlan, *, count: int, rank: int) -> list[range]:
    """The positions in `count` samples, at most its share of a full global batch, of each of a rank's micro-batches.

    For a rank that reads samples of its own: how many it makes doesn't depend on what others have. None is empty.
    """
    full = len(share(plan.global_batch_size, rank=rank, world_size=plan.world_size))
    number = -(-count * plan.micro_batches // full)
    return [share(count, rank=i, world_size=number) for i in range(number)]

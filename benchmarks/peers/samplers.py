"""What dealing an epoch's samples costs one rank: ours, or PyTorch's DistributedSampler with a BatchSampler."""

from __future__ import annotations

import argparse
import gc
import resource
import time

from torch.utils.data import BatchSampler, DistributedSampler

from benchmarks.marks import report
from framework.data.batching import plan_batches
from framework.data.order import GlobalOrder, epoch_indices, windows


def deal(asked: argparse.Namespace, *, epoch: int, samples: int) -> int:
    """Take the indices of every batch of an epoch, as the loader does; gives how many steps there were."""
    rank = asked.world_size // 2
    if asked.kind == "ours":
        plan = plan_batches(batch_size=asked.batch, global_batch_size=None, world_size=asked.world_size, accumulate=1)
        indices = epoch_indices(GlobalOrder(samples, 0, True), plan, epoch=epoch)
        return sum(1 for _ in windows(indices, plan, rank=rank))
    sampler: DistributedSampler[int] = DistributedSampler(
        range(samples),  # type: ignore[arg-type]
        num_replicas=asked.world_size,
        rank=rank,
    )
    sampler.set_epoch(epoch)
    return sum(1 for _ in BatchSampler(sampler, asked.batch, drop_last=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("ours", "torch"), required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--samples", type=int, default=1_281_167)
    parser.add_argument("--batch", type=int, default=32)
    asked = parser.parse_args()
    # What is done only once isn't an epoch's.
    deal(asked, epoch=0, samples=asked.world_size)
    gc.collect()
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    deal(asked, epoch=1, samples=asked.samples)
    seconds = time.perf_counter() - began
    after_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report(seconds=seconds, memory_b=max(after_kb - before_kb, 0) * 1024)


if __name__ == "__main__":
    main()

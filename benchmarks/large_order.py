"""Time and memory of the shuffled order of many samples.

    python benchmarks/large_order.py 200000000 randperm
    python benchmarks/large_order.py 200000000 permutation

One way a process, so that the largest resident set is that of the order alone.
"""

from __future__ import annotations

import resource
import sys
import time

import torch

from framework.data.permutation import Permutation
from framework.types import Order

READ_AT_ONCE = 1 << 16


def main(size: int, way: str) -> None:
    generator = torch.Generator().manual_seed(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    order: Order
    if way == "randperm":
        order = torch.randperm(size, generator=generator)
    else:
        order = Permutation(size, generator)
    assert len(order[0:READ_AT_ONCE])
    first = time.perf_counter() - began
    for begin in range(0, size, READ_AT_ONCE):
        assert len(order[begin : min(size, begin + READ_AT_ONCE)])
    whole = time.perf_counter() - began
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{way}: first slice after {first:.2f} s, all after {whole:.1f} s, {kilobytes / 1000:.0f} MB more")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

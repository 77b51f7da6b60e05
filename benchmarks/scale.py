"""What dealing the samples of an epoch and `job=plan` cost as the number of ranks grows, to 16,384.

    python -m benchmarks.scale [--rounds 3]

An epoch of 1,281,167 samples, 32 on each rank a step: what one rank spends on indices, beside PyTorch's
DistributedSampler with a BatchSampler. The plan is a whole command, beside itself with one rank.
"""

from __future__ import annotations

import sys

from benchmarks.contest import Asked, Contestant, Row, Unit, compare, ours, peer, run, take_turns

ROUNDS = 3
WORLD_SIZES = (1, 64, 1024, 16_384)
SAMPLES = 1_281_167
BATCH = 32
_GPUS_PER_NODE = 8
_MS = Unit("ms", 1e3, 1)
_MB = Unit("MB", 1e-6, 1)
_SECONDS = Unit("s")


def samplers(world_size: int) -> list[Contestant]:
    size = ("--world-size", str(world_size), "--samples", str(SAMPLES), "--batch", str(BATCH))
    return [peer(kind, "samplers", "--kind", kind, *size) for kind in ("ours", "torch")]


def plan(world_size: int) -> Contestant:
    """The data of MNIST's recipe where they are missing: only the number of samples is given."""
    gpus = min(world_size, _GPUS_PER_NODE)
    size = (f"trainer.gpus={gpus}", f"topology.nnodes={world_size // gpus}", f"plan.train_samples={SAMPLES}")
    return ours(f"W = {world_size:,}", "job=plan", "recipe=mnist", "data.root=nowhere", *size)


def epoch(contestant: Contestant) -> dict[str, float]:
    outcome = run(contestant)
    return {"seconds": outcome.worst("seconds"), "memory": outcome.worst("memory_b")}


def command(contestant: Contestant) -> dict[str, float]:
    return {"seconds": run(contestant, reports=False).seconds}


def rows(asked: Asked) -> list[Row]:
    found = []
    rounds = asked.rounds_or(ROUNDS)
    for world_size in WORLD_SIZES:
        contests = take_turns(samplers(world_size), rounds, epoch)
        claim = f"an epoch's indices of one rank, W = {world_size:,}"
        names = ("ours", "torch")
        found.append(compare("scale", f"{claim} ÷ DistributedSampler", contests.get("seconds"), names, unit=_MS))
        found.append(compare("scale", f"… memory, W = {world_size:,}", contests.get("memory"), names, unit=_MB))
    plans = take_turns([plan(world_size) for world_size in WORLD_SIZES], rounds, command).get("seconds")
    for world_size in WORLD_SIZES[1:]:
        claim = f"job=plan, the whole command: W = {world_size:,} ÷ W = 1"
        found.append(compare("scale", claim, plans, (f"W = {world_size:,}", "W = 1"), unit=_SECONDS))
    return found


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["--only", "scale", "--print", *sys.argv[1:]]))

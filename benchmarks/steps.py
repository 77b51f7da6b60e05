"""What a small step costs, one process on one thread: ours with all defaults on against other loops.

    python -m benchmarks.steps [--rounds 9]

The toy model of recipes/toy.py, batches of 20, SGD. The steps are within one epoch: no validation and no checkpoint is
in them, logging is, every 50 steps, which is Lightning's default, too.
A network this small shows what is done around it.
"""

from __future__ import annotations

import sys

from benchmarks.contest import Asked, Contestant, Row, Target, Unit, callback, compare, ours, peer, run, take_turns

ROUNDS = 9
WARM_UP = 300
STEPS = 3000
BATCH = 20
_US = Unit("µs", 1e6, 0)


def toy_run(warm_up: int, steps: int, *, processes: int = 1) -> tuple[str, ...]:
    """Overrides of a run of the toy that is timed, within one epoch."""
    # Of what the recipe makes, a fifth is for validation and test. A little more, so that the epoch doesn't end.
    samples = (warm_up + steps + 100) * BATCH * processes * 5 // 4
    return (
        "recipe=toy",
        "trainer.num_threads=1",
        f"trainer.max_steps={warm_up + steps}",
        "trainer.limit_test_batches=1",
        f"topology.procs_per_node={processes}",
        f"data.batch_size={BATCH}",
        f"data.datasets.num_samples={samples}",
        *callback("Clock", warm_up=warm_up, steps=steps),
    )


def contestants() -> list[Contestant]:
    length = ("--warm-up", str(WARM_UP), "--steps", str(STEPS), "--batch", str(BATCH))
    return [
        ours("ours", *toy_run(WARM_UP, STEPS)),
        ours("ours, logged every 10 steps", *toy_run(WARM_UP, STEPS), "trainer.log_every_n_steps=10"),
        peer("ready-made batches", "raw_loop", "--ready", *length),
        peer("DataLoader", "raw_loop", *length),
        peer("Fabric", "fabric_loop", *length, needs="lightning"),
        peer("Accelerate", "accelerate_loop", *length, needs="accelerate"),
        peer("Lightning, everything off", "lightning_fit", "--set-up", "off", *length, needs="lightning"),
        peer("Lightning as it comes", "lightning_fit", *length, needs="lightning"),
    ]


TARGETS = {"ready-made batches": Target(1.10), "Lightning as it comes": Target(0.25)}


def rows(asked: Asked) -> list[Row]:
    def measure(contestant: Contestant) -> dict[str, float]:
        outcome = run(contestant)
        return {"wall": outcome.worst("wall_s"), "cpu": outcome.worst("cpu_s")}

    everyone = contestants()
    contests = take_turns(everyone, asked.rounds_or(ROUNDS), measure)
    wall = contests.get("wall")
    cpu = contests.get("cpu")
    table = []
    for other in everyone[1:]:
        claim = f"toy step ÷ {other.name}"
        table.append(compare("steps", claim, wall, ("ours", other.name), unit=_US, target=TARGETS.get(other.name)))
    for name in TARGETS:
        claim = f"… CPU time of all threads ÷ {name}"
        table.append(compare("steps", claim, cpu, ("ours", name), unit=_US))
    return table


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["--only", "steps", "--print", *sys.argv[1:]]))

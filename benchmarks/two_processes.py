"""What a small step costs with two processes over gloo: ours with all defaults on against DDP by others.

    python -m benchmarks.two_processes [--rounds 7]

The work of benchmarks/steps.py on each process, one thread each. The raw script and Accelerate are started by torchrun,
Lightning by itself.
"""

from __future__ import annotations

import sys

from benchmarks.contest import Asked, Contestant, Row, Target, Unit, compare, ours, peer, run, take_turns
from benchmarks.steps import BATCH, toy_run

ROUNDS = 7
WARM_UP = 200
STEPS = 1500
_US = Unit("µs", 1e6, 0)
_CLAIMS = {
    "raw DDP, DataLoader": Target(0.85),
    "Accelerate": None,
    "Lightning as it comes": None,
}


def contestants() -> list[Contestant]:
    length = ("--warm-up", str(WARM_UP), "--steps", str(STEPS), "--batch", str(BATCH), "--processes", "2")
    return [
        ours("ours", *toy_run(WARM_UP, STEPS, processes=2)),
        # Under load, plain DDP now and then aborts as it destroys its process group, after its last step.
        peer("raw DDP, DataLoader", "raw_loop", *length, torchrun=2, may_abort=True),
        peer("Accelerate", "accelerate_loop", *length, needs="accelerate", torchrun=2),
        peer("Lightning as it comes", "lightning_fit", *length, needs="lightning"),
    ]


def rows(asked: Asked) -> list[Row]:
    def measure(contestant: Contestant) -> dict[str, float]:
        return {"wall": run(contestant).worst("wall_s")}

    contest = take_turns(contestants(), asked.rounds_or(ROUNDS), measure).get("wall")
    return [
        compare("two_processes", f"toy step, 2 processes ÷ {name}", contest, ("ours", name), unit=_US, target=target)
        for name, target in _CLAIMS.items()
    ]


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["--only", "two_processes", "--print", *sys.argv[1:]]))

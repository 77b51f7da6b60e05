"""What each guard adds to the CPU time of a small step, one process on one thread.

    python -m benchmarks.guards [--rounds 7]

CPU time, not the clock, so that waiting for a busy machine doesn't count. The toy model of recipes/toy.py, batches of
20, SGD: two layers, so a step is little more than what is done around it. nan_guard measures each layer, spike_guard
the loss and the norm of all gradients.
"""

from __future__ import annotations

import sys

from benchmarks.contest import Asked, Contestant, Row, Unit, compare, ours, run, take_turns
from benchmarks.steps import toy_run

ROUNDS = 7
_WARM_UP = 300
_STEPS = 1500
_US = Unit("µs", 1e6, 0)
_WITHOUT = "without"
_GUARDS = {
    "spike_guard": ("callbacks=[spike_guard]",),
    "spike_guard, loss=false": ("callbacks=[spike_guard]", "callbacks.spike_guard.loss=false"),
    "nan_guard": ("callbacks=[nan_guard]",),
}


def rows(asked: Asked) -> list[Row]:
    def measure(contestant: Contestant) -> dict[str, float]:
        return {"cpu": run(contestant).worst("cpu_s")}

    length = toy_run(_WARM_UP, _STEPS)
    contestants = [ours(_WITHOUT, *length)]
    contestants += [ours(name, *length, *overrides) for name, overrides in _GUARDS.items()]
    cpu = take_turns(contestants, asked.rounds_or(ROUNDS), measure).get("cpu")
    claim = "CPU time of a toy step with {} ÷ without"
    return [compare("guards", claim.format(name), cpu, (name, _WITHOUT), unit=_US) for name in _GUARDS]


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["--only", "guards", "--print", *sys.argv[1:]]))

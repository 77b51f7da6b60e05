"""What a step costs with each way to keep processes in step: two processes over gloo, beside `strategy=ddp`.

    python -m benchmarks.strategies [--rounds 3]

The toy (165 parameters) and the network of `recipe=digits` (600,810, so 2.4 MB of gradients), one thread a process; and
that network once more where loopback carries 100 Mbit/s, as between two machines with a slow link. That needs root and
Linux's `tc`, in a network namespace of its own; without them it is left out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.contest import Asked, Contestant, Row, Unit, callback, compare, ours, run, take_turns
from benchmarks.steps import toy_run

ROUNDS = 3
RATE = "100mbit"
_MS = Unit("ms", 1e3, 1)
_SLOW = f'ip link set lo up && tc qdisc add dev lo root tbf rate {RATE} burst 256kb latency 1s && exec "$@"'

WAYS = {
    "ddp": ("strategy=ddp",),
    "ddp, bf16": ("strategy=ddp", "strategy.comm_hook=bf16"),
    "ddp, powersgd": ("strategy=ddp", "strategy.comm_hook={powersgd:{start_powerSGD_iter:2}}"),
    "allreduce": ("strategy=allreduce",),
    "butterfly": ("strategy=butterfly",),
    "local_sgd, every 16 steps": ("strategy=local_sgd", "strategy.every_n_steps=16"),
    "fsdp": ("strategy=fsdp",),
}


def digits_run(warm_up: int, steps: int) -> tuple[str, ...]:
    """Overrides of a run of the digits that is timed."""
    return (
        "recipe=digits",
        "trainer.num_threads=1",
        "trainer.max_epochs=null",
        "trainer.check_val_every_n_epoch=null",
        f"trainer.max_steps={warm_up + steps}",
        "trainer.limit_test_batches=1",
        "topology.procs_per_node=2",
        "data.batch_size=16",
        "checkpoint.enabled=false",
        *callback("Clock", warm_up=warm_up, steps=steps),
    )


def contestants(overrides: Sequence[str]) -> list[Contestant]:
    """Return the same run with each strategy."""
    return [ours(name, *overrides, *way) for name, way in WAYS.items()]


def over_slow_link(contestant: Contestant) -> Contestant:
    """The same where loopback is slow, in a network of its own."""
    command = ("unshare", "--net", "sh", "-c", _SLOW, "sh", sys.executable, *contestant.arguments)
    start = f"import os; os.execvp('unshare', {list(command)!r})"
    return replace(contestant, arguments=("-c", start))


def can_slow_links() -> bool:
    """Whether this process may make a network whose loopback is slow."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "ip", "tc"))):
        return False
    return subprocess.run(["unshare", "--net", "sh", "-c", _SLOW, "sh", "true"], capture_output=True).returncode == 0


def measure(contestant: Contestant) -> dict[str, float]:
    return {"wall": run(contestant).worst("wall_s")}


def rows(asked: Asked) -> list[Row]:
    works = {
        "toy step": contestants(toy_run(200, 800, processes=2)),
        "digits step": contestants(digits_run(10, 100)),
    }
    if can_slow_links():
        slowed = [over_slow_link(contestant) for contestant in contestants(digits_run(4, 48))]
        works[f"digits step at {RATE}/s"] = slowed
    table: list[Row] = []
    for work, each_way in works.items():
        contest = take_turns(each_way, asked.rounds_or(ROUNDS), measure).get("wall")
        for name in WAYS:
            if name != "ddp":
                claim = f"{work}, {name} ÷ ddp"
                table.append(compare("strategies", claim, contest, (name, "ddp"), unit=_MS))
    return table


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["--only", "strategies", "--print", *sys.argv[1:]]))

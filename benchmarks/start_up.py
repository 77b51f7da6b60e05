"""From the command to the end of the first optimizer step, and to its end, for 1, 2 and 8 processes on the CPU.

    python -m benchmarks.start_up [--rounds 7]

Everyone trains a toy for 10 steps, one thread each. Ours does more at the end: it writes a checkpoint and tests the
model. The first step has ended when it has on the last process. "plain" is a script that imports torch alone.

¹ A process of plain DDP under mp.spawn may abort when it ends, after its last step. So only its first step counts.
"""

from __future__ import annotations

import sys

from benchmarks.contest import (
    Asked,
    Contestant,
    Row,
    Target,
    Unit,
    callback,
    compare,
    ours,
    peer,
    run,
    take_turns,
)
from framework.system.formatting import format_count

ROUNDS = 7
STEPS = 10
_SECONDS = Unit("s")
_SPAWNED = "mp.spawn, 2 processes ¹"
_COMPARED: tuple[tuple[str, str, Target | None], ...] = (
    ("ours, 1 process", "plain script", Target(1.0)),
    ("ours, 2 processes", "ours, 1 process", Target(1.1)),
    ("ours, 8 processes", "ours, 1 process", Target(1.25)),
    ("ours, 1 process", "Lightning, 1 process", None),
    ("ours, 2 processes", "torchrun, 2 processes", None),
    ("ours, 2 processes", _SPAWNED, None),
    ("ours, 2 processes", "Lightning, 2 processes", None),
)


def contestants() -> list[Contestant]:
    def own(processes: int) -> Contestant:
        name = f"ours, {format_count(processes, 'process', 'processes')}"
        settings = ("recipe=toy", "trainer.num_threads=1", f"trainer.max_steps={STEPS}")
        return ours(name, *settings, f"topology.procs_per_node={processes}", *callback("FirstStep"))

    steps = ("--steps", str(STEPS))
    lightning = ("lightning_fit", "--first-step", "--steps", str(STEPS - 1))
    return [
        peer("plain script", "plain_script", *steps),
        *map(own, (1, 2, 8)),
        peer("Lightning, 1 process", *lightning, needs="lightning"),
        peer("torchrun, 2 processes", "plain_script", *steps, torchrun=2),
        peer(_SPAWNED, "plain_script", *steps, "--spawn", "2", may_abort=True),
        peer("Lightning, 2 processes", *lightning, "--processes", "2", needs="lightning"),
    ]


def measure(contestant: Contestant) -> dict[str, float]:
    outcome = run(contestant)
    return {"first step": outcome.worst("first_step") - outcome.begun, "exit": outcome.seconds}


def rows(asked: Asked) -> list[Row]:
    contests = take_turns(contestants(), asked.rounds_or(ROUNDS), measure)
    first_step = contests.get("first step")
    end = contests.get("exit")
    table = []
    for one, other, target in _COMPARED:
        claim = f"command to first step: {one} ÷ {other}"
        table.append(compare("start_up", claim, first_step, (one, other), unit=_SECONDS, target=target))
    for one, other, _ in _COMPARED:
        if other == _SPAWNED:
            continue
        claim = f"command to exit: {one} ÷ {other}"
        table.append(compare("start_up", claim, end, (one, other), unit=_SECONDS))
    return table


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["--only", "start_up", "--print", *sys.argv[1:]]))

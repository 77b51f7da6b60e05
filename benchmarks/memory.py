"""Memory after some steps, for 1, 2 and 8 processes on the CPU: ours against a plain script with mp.spawn.

    python -m benchmarks.memory [--rounds 3]

All ranks hold still while they are looked at. PSS: what processes share is divided among them, so that the sum over all
processes of a command (ours: with the parent and the fork server) is what the machine really gives. RSS counts it whole
in each. The plain script has neither TensorBoard nor a progress bar.
"""

from __future__ import annotations

import statistics
import sys
from contextlib import suppress
from functools import partial

from benchmarks.contest import Asked, Contestant, Row, Unit, callback, compare, ours, peer, run, take_turns
from framework.system.formatting import format_count

ROUNDS = 3
STEPS = 20
PROCESSES = (1, 2, 8)
_MB = Unit("MB", 1e-6, 0)
_FIGURES = {
    "all": "PSS of all processes",
    "rank PSS": "PSS of a rank, median",
    "rank RSS": "RSS of a rank, median",
}


def contestants(processes: int) -> list[Contestant]:
    overrides = (
        "recipe=toy",
        "trainer.num_threads=1",
        f"trainer.max_steps={STEPS + 10}",
        f"topology.procs_per_node={processes}",
        *callback("Hold", step=STEPS),
    )
    return [
        ours("ours", *overrides),
        peer("plain", "plain_script", "--hold", "--steps", str(STEPS), "--spawn", str(processes)),
    ]


def measure(contestant: Contestant, *, processes: int) -> dict[str, float]:
    figures: dict[str, float] = {}

    def look(command: int, ranks: list[int]) -> None:
        import psutil

        parent = psutil.Process(command)
        pss: dict[int, int] = {}
        rss: dict[int, int] = {}
        for process in (parent, *parent.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                full = process.memory_full_info()
                pss[process.pid] = full.pss
                rss[process.pid] = full.rss
        figures["all"] = sum(pss.values())
        figures["rank PSS"] = statistics.median(pss[pid] for pid in ranks)
        figures["rank RSS"] = statistics.median(rss[pid] for pid in ranks)

    run(contestant, at_hold=look, holding=processes)
    return figures


def rows(asked: Asked) -> list[Row]:
    table = []
    for processes in PROCESSES:
        measure_all = partial(measure, processes=processes)
        contests = take_turns(contestants(processes), asked.rounds_or(ROUNDS), measure_all)
        number = format_count(processes, "process", "processes")
        for key, what in _FIGURES.items():
            claim = f"memory, {number}: {what} ÷ plain script"
            table.append(compare("memory", claim, contests.get(key), ("ours", "plain"), unit=_MB))
    return table


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["--only", "memory", "--print", *sys.argv[1:]]))

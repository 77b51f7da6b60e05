"""What marking phases costs on the step path: each mark, all of a step's, and a small recipe's step with and without.

    python benchmarks/rank_status_cost.py [RUNS]

Without them the rank status's methods are a built-in function that does nothing. Runs of both kinds take turns. The
best of each is compared: what else uses the machine only ever adds.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import timeit
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any, final

from framework.command import compose
from framework.launch import in_process
from framework.monitoring.rank_status import RankPhase, RankStatus

CALLS = 1_000_000
REPEATS = 7
MARKS_PER_STEP = {"set_phase": 6, "finish_step": 1, "stop_signal": 1}
"""Of an optimizer step with one micro-batch, as `Trainer.fit` and `train_step` make them."""


@final
class Silent:
    """A rank status that says nothing."""

    set_phase = staticmethod(id)
    finish_step = staticmethod(id)
    set_stoppable = staticmethod(id)
    stop_signal = 0

    def tick(self) -> None:
        """Evaluation has made progress."""

    def close(self) -> None:
        """There is nothing to give back."""


def call_ns(statement: str, **names: Any) -> float:
    """One call, the loop around it taken off; the best of some repetitions, as others use the machine too."""
    empty = min(timeit.repeat("pass", number=CALLS, repeat=REPEATS))
    best = min(timeit.repeat(statement, globals=names, number=CALLS, repeat=REPEATS))
    return (best - empty) / CALLS * 1e9


def step_us(kind: type[Any]) -> float:
    """A step of recipe=toy, from the run's own clock around training."""
    vars(in_process)["RankStatus"] = kind
    overrides = [
        "recipe=toy",
        "launcher=in_process",
        "logger=none",
        "trainer.gpus=0",
        "trainer.num_threads=1",
        "trainer.max_epochs=20",
        "trainer.check_val_every_n_epoch=null",
        "trainer.limit_test_batches=0",
        "trainer.log_every_n_steps=100",
        "checkpoint.monitor=null",
        "checkpoint.every_n_epochs=null",
    ]
    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("w") as silence, redirect_stdout(silence):
        if compose.main([*overrides, f"path.outputs={folder}"]) != 0:
            sys.exit("the run failed")
        (file,) = Path(folder).glob("toy/*/run.json")
        results = json.loads(file.read_text())["results"]
    return float(results["seconds"] / results["steps"] * 1e6)


def main(runs: int) -> None:
    rank_status = RankStatus()
    costs = {
        "set_phase": call_ns("rank_status.set_phase(RankPhase.DATA)", rank_status=rank_status, RankPhase=RankPhase),
        "finish_step": call_ns("rank_status.finish_step(1234)", rank_status=rank_status),
        "stop_signal": call_ns("rank_status.stop_signal", rank_status=rank_status),
    }
    rank_status.close()
    total = 0.0
    for name, number in MARKS_PER_STEP.items():
        total += number * costs[name]
    print("| `set_phase` | `finish_step` | `stop_signal` | all of a step |")
    print("|---|---|---|---|")
    print("| " + " | ".join(f"{cost:.0f} ns" for cost in [*costs.values(), total]) + " |")
    with_marks = []
    without = []
    for _ in range(runs):
        with_marks.append(step_us(RankStatus))
        without.append(step_us(Silent))
    print("\n| a step of recipe=toy | best | median |\n|---|---|---|")
    for name, column in (("with marks", with_marks), ("without", without)):
        print(f"| {name} | {min(column):.0f} µs | {median(column):.0f} µs |")
    print(f"\n{runs} runs of each")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)

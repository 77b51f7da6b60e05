"""The forecast step times of `job=plan plan.measure=true` beside those of trainings: `python -m benchmarks.durations`.

Each round makes the forecast of every recipe, then trains it; the table has the medians of the rounds. One thread,
since two wait for each other wherever another program takes a core.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

RECIPES = ("toy", "digits", "gpt_char", "text_padded", "gan_digits", "finetune_digits")
ROUNDS = 2
COMMON = ("trainer.gpus=0", "trainer.num_threads=1", "topology.procs_per_node=1")


def command(*arguments: str) -> str:
    """Return what the command prints."""
    words = [sys.executable, "-m", "framework", *COMMON, *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def forecast_s(recipe: str) -> float:
    plan = json.loads(command("job=plan", f"recipe={recipe}", "plan.measure=true", "format=json"))
    return float(plan["time"]["step_s"])


def measured_s(recipe: str) -> float:
    """Return the median step of a training, as the profiler has it of the steps before those that it records."""
    with tempfile.TemporaryDirectory() as folder:
        profiler = ("callbacks=[profiler]", "callbacks.profiler.wait=40", "callbacks.profiler.trace=false")
        short = ("trainer.max_steps=50", "trainer.limit_val_batches=0", "trainer.limit_test_batches=0")
        bare = ("scheduler=none", "checkpoint=none", "logger=none")
        command(f"recipe={recipe}", f"path.outputs={folder}", *profiler, *short, *bare)
        (record,) = Path(folder).glob("*/*/run.json")
        return float(json.loads(record.read_text())["profile"]["step_s"])


def main() -> None:
    forecasts: dict[str, list[float]] = {recipe: [] for recipe in RECIPES}
    trainings: dict[str, list[float]] = {recipe: [] for recipe in RECIPES}
    for _ in range(ROUNDS):
        for recipe in RECIPES:
            forecasts[recipe].append(forecast_s(recipe))
            trainings[recipe].append(measured_s(recipe))

    print("| recipe | forecast | measured | forecast ÷ measured |")
    print("|---|---|---|---|")
    for recipe in RECIPES:
        forecast = median(forecasts[recipe])
        training = median(trainings[recipe])
        print(f"| {recipe} | {forecast * 1e3:.2f} ms | {training * 1e3:.2f} ms | {forecast / training:.2f} |")


if __name__ == "__main__":
    main()

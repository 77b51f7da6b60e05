"""The steps that `job=plan plan.measure=true` forecasts beside those of trainings.

    nice -n -20 python -m benchmarks.durations [--only toy,digits] [--rounds 3] [--data-root FOLDER]

Each round makes every forecast, each followed by the training; the table has the medians of the rounds. A training's
step is the median of `train/steps_per_s` as it is logged, without the first log. One thread a process, since two wait
for each other wherever another program takes a core; the priority keeps most of them away. gpt_tokens reads the tokens
of the text of gpt_char.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.arguments import some_of

COMMON = ("trainer.gpus=0", "trainer.num_threads=1")
_EVERY = 25
_TWO = ("topology.procs_per_node=2",)


@dataclass(frozen=True)
class Row:
    """A training whose step is forecast and measured."""

    recipe: str
    # Optimizer steps of the training.
    steps: int
    overrides: tuple[str, ...] = ()
    # It takes `data.root`.
    has_root: bool = False


ROWS = {
    "toy": Row("toy", 800),
    "toy_model_parallel": Row("toy_model_parallel", 800),
    "digits": Row("digits", 200),
    "finetune_digits": Row("finetune_digits", 240),
    "gan_digits": Row("gan_digits", 600),
    "text_padded": Row("text_padded", 100),
    "cartpole": Row("cartpole", 50),
    "gpt_char": Row("gpt_char", 150, has_root=True),
    "gpt_muon": Row("gpt_muon", 150, has_root=True),
    "gpt_tokens": Row("gpt_tokens", 150, has_root=True),
    "mnist": Row("mnist", 300, has_root=True),
    "mnist_fast": Row("mnist_fast", 150, has_root=True),
    "toy_2": Row("toy", 400, _TWO),
    "digits_2": Row("digits", 100, _TWO),
    "gpt_char_2": Row("gpt_char", 150, _TWO, has_root=True),
    "digits_accumulating": Row("digits", 100, ("trainer.accumulate_grad_batches=4", "trainer.max_epochs=20")),
}


def command(*arguments: str) -> str:
    """Return what the command prints."""
    words = [sys.executable, "-m", "framework", *COMMON, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)}\n{done.stderr}")
    return done.stdout


def overrides_of(row: Row, *, data_root: Path) -> list[str]:
    overrides = [f"recipe={row.recipe}", *row.overrides]
    if row.has_root:
        overrides.append(f"data.root={data_root}")
    return overrides


def forecast(overrides: list[str]) -> dict[str, Any]:
    plan = json.loads(command("job=plan", "plan.measure=true", "format=json", *overrides))
    time: dict[str, Any] = plan["time"]
    return time


def trained_step_s(overrides: list[str], *, steps: int) -> float:
    """Return what a step of a training takes."""
    with tempfile.TemporaryDirectory() as folder:
        logs = ("logger=jsonl", f"trainer.log_every_n_steps={_EVERY}")
        short = (f"trainer.max_steps={steps}", "trainer.limit_val_batches=0", "trainer.limit_test_batches=0")
        command(*overrides, *logs, *short, "checkpoint=none", f"path.outputs={folder}")
        (metrics,) = Path(folder).glob("*/*/metrics.jsonl")
        logged = [json.loads(line) for line in metrics.read_text().splitlines()]
    rates = [row["train/steps_per_s"] for row in logged if row.get("train/steps_per_s")]
    return median(1 / rate for rate in rates[1:])


def main() -> None:
    arguments = _arguments()
    forecasts: dict[str, list[float]] = {name: [] for name in arguments.only}
    trainings: dict[str, list[float]] = {name: [] for name in arguments.only}
    bounds = {}
    with tempfile.TemporaryDirectory() as folder:
        data_root = arguments.data_root.resolve()
        text = data_root / "tinyshakespeare" / "input.txt"
        if "gpt_tokens" in arguments.only:
            subprocess.run([sys.executable, "-m", "recipes.gpt", str(text), folder], check=True, capture_output=True)
        for _ in range(arguments.rounds):
            for name in arguments.only:
                row = ROWS[name]
                root = Path(folder) if name == "gpt_tokens" else data_root
                overrides = overrides_of(row, data_root=root)
                time = forecast(overrides)
                bounds[name] = time["bound_by"]
                forecasts[name].append(time["step_s"])
                trainings[name].append(trained_step_s(overrides, steps=row.steps))

    print("| recipe | forecast | measured | forecast ÷ measured | of single rounds | bound by |")
    print("|---|---|---|---|---|---|")
    for name in arguments.only:
        ratios = sorted(ours / theirs for ours, theirs in zip(forecasts[name], trainings[name], strict=True))
        forecast_s = median(forecasts[name])
        training_s = median(trainings[name])
        cells = (
            " ".join((ROWS[name].recipe, *ROWS[name].overrides)),
            f"{forecast_s * 1e3:.2f} ms",
            f"{training_s * 1e3:.2f} ms",
            f"{forecast_s / training_s:.2f}",
            f"{ratios[0]:.2f}–{ratios[-1]:.2f}",
            bounds[name],
        )
        print(f"| {' | '.join(cells)} |")


def _arguments() -> argparse.Namespace:
    data_root = Path(os.environ.get("FRAMEWORK_TEST_DATA") or "data")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.durations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", type=some_of(ROWS), default=list(ROWS), help=f"some of {','.join(ROWS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data-root", type=Path, default=data_root)
    return parser.parse_args()


if __name__ == "__main__":
    main()

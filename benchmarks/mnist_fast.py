"""`recipe=mnist_fast`: its test accuracy over seeds, and its time beside that of `recipe=mnist` to 98 %.

    python -m benchmarks.mnist_fast [--rounds 5] [--data-root FOLDER]

Round r trains both recipes whole with seed r, one after the other, two threads, and looks at the 5,000 images held out
several times an epoch, the last time at the end. It compares recipes: their batches are of 16 and 64 images. Seconds
are of training alone: without start, validation and test. `recipe=mnist` has come to 98 % when a validation first says
so; where none does, all of its training is taken. The curves of the first round are drawn in
docs/pictures/mnist_fast.svg.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contest import ROOT, Asked, Contest, Row, Target, Unit, callback, compare, ours, run
from benchmarks.mnist_speed import THREADS, unpacked

ROUNDS = 5
GOAL = 0.98
PICTURE = ROOT / "docs" / "pictures" / "mnist_fast.svg"

_RECIPES = {"mnist": 191, "mnist_fast": 215}
"""Recipe → steps between two validations, which divide all of its steps."""

_SECONDS = Unit("s", 1.0, 1)

# The picture, and the margins left of the curves and below them.
_WIDTH = 640
_HEIGHT = 300
_LEFT = 60
_BOTTOM = 40
# The lowest accuracy that is shown.
_LEAST = 0.94
_COLOURS = {"mnist": "#888888", "mnist_fast": "#d95f02"}


@dataclass(frozen=True)
class Trained:
    """What a training reached."""

    # Seconds of training, and the accuracy on the images that are held out.
    curve: list[tuple[float, float]]
    # Seconds of all of the training.
    seconds: float
    # The accuracy on the test part.
    test: float

    def seconds_to(self, goal: float) -> float:
        """Return the seconds until an accuracy was first reached; all of the training if it never was."""
        for seconds, accuracy in self.curve:
            if accuracy >= goal:
                return seconds
        return self.seconds


def trained(recipe: str, root: Path, *, seed: int) -> Trained:
    """Raises ContestError where the run fails."""
    with tempfile.TemporaryDirectory(prefix="benchmark_", ignore_cleanup_errors=True) as folder:
        outcome = run(
            ours(
                recipe,
                f"recipe={recipe}",
                f"seed={seed}",
                f"data.root={root}",
                f"path.outputs={folder}",
                f"trainer.num_threads={THREADS}",
                f"trainer.val_check_interval={_RECIPES[recipe]}",
                # Otherwise each of the many validations would write one.
                "checkpoint.enabled=false",
                "checkpoint.monitor=null",
                *callback("Curve"),
            )
        )
        (file,) = Path(folder).glob("*/*/run.json")
        results = json.loads(file.read_text())["results"]
    (report,) = outcome.reports
    training = Trained(
        curve=[tuple(point) for point in report["curve"]],
        seconds=report["seconds"],
        test=results["test"]["metrics"]["test/accuracy"],
    )
    shown = f"{training.seconds:.1f} s, {GOAL:.0%} after {training.seconds_to(GOAL):.1f} s, test {training.test:.2%}"
    print(f"  seed {seed}: {recipe}: {shown}", file=sys.stderr, flush=True)
    return training


def rows(asked: Asked) -> list[Row]:
    rounds = asked.rounds_or(ROUNDS)
    trainings: dict[str, list[Trained]] = {recipe: [] for recipe in _RECIPES}
    with unpacked(asked.data_root) as root:
        for seed in range(rounds):
            for recipe in sorted(_RECIPES, reverse=seed % 2 == 1):
                trainings[recipe].append(trained(recipe, root, seed=seed))
    PICTURE.write_text(drawn({recipe: runs[0].curve for recipe, runs in trainings.items()}))

    fast_s = [training.seconds for training in trainings["mnist_fast"]]
    usual_s = [training.seconds_to(GOAL) for training in trainings["mnist"]]
    times = Contest({"mnist_fast": fast_s, "mnist": usual_s})
    claim = f"mnist_fast: all of its training ÷ mnist's to {GOAL:.0%} of those held out"
    return [
        _accuracies(trainings),
        compare("mnist_fast", claim, times, ("mnist_fast", "mnist"), unit=_SECONDS, target=Target(1.0)),
    ]


def _accuracies(trainings: dict[str, list[Trained]]) -> Row:
    """Return the row with the means over seeds, and the ranges."""
    fast = [training.test for training in trainings["mnist_fast"]]
    usual = [training.test for training in trainings["mnist"]]
    return Row(
        "mnist_fast",
        f"mnist_fast: test accuracy, mean of {len(fast)} seeds; beside it mnist's",
        _mean_and_range(fast),
        _mean_and_range(usual),
        target="≥ 99.00 %",
        reached="yes" if statistics.mean(fast) >= 0.99 else "no",
    )


def _mean_and_range(accuracies: Sequence[float]) -> str:
    return f"{statistics.mean(accuracies):.2%} ({min(accuracies):.2%}–{max(accuracies):.2%})"


def drawn(curves: dict[str, list[tuple[float, float]]]) -> str:
    """Return an SVG of accuracy over seconds, from `_LEAST` on."""
    ends = [curve[-1] for curve in curves.values()]
    longest = max(seconds for seconds, _ in ends)

    def at(seconds: float, accuracy: float) -> tuple[float, float]:
        """Return the place of a point in the picture."""
        x = _LEFT + seconds / longest * (_WIDTH - _LEFT - 20)
        height = (max(accuracy, _LEAST) - _LEAST) / (1 - _LEAST)
        y = (_HEIGHT - _BOTTOM) * (1 - height) + 5
        return round(x, 1), round(y, 1)

    parts = [f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>']
    for accuracy in (0.94, 0.95, 0.96, 0.97, 0.98, 0.99):
        x, y = at(0, accuracy)
        parts.append(f'<line x1="{x}" y1="{y}" x2="{_WIDTH - 20}" y2="{y}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x - 8}" y="{y + 4}" text-anchor="end">{accuracy:.0%}</text>')
    step = max(1, round(longest / 50)) * 10
    for seconds in range(0, int(longest) + 1, step):
        x, _ = at(seconds, _LEAST)
        parts.append(f'<text x="{x}" y="{_HEIGHT - 16}" text-anchor="middle">{seconds} s</text>')
    for number, (recipe, curve) in enumerate(curves.items()):
        places = []
        for seconds, accuracy in curve:
            if accuracy >= _LEAST:
                x, y = at(seconds, accuracy)
                places.append(f"{x},{y}")
        points = " ".join(places)
        colour = _COLOURS[recipe]
        y = _HEIGHT - 60 - 20 * number
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{_WIDTH - 30}" y="{y}" text-anchor="end" fill="{colour}">recipe={recipe}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif"'
    return "\n".join([f'{head} font-size="12">', *parts, "</svg>", ""])


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["--only", "mnist_fast", "--print", *sys.argv[1:]]))

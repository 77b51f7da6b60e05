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
_RECIPES = {"mnist": 191, "mnist_fast": 215}  # name → steps between two validations, which divide all of its steps
_SECONDS = Unit("s", 1.0, 1)
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _LEAST = 640, 300, 60, 40, 0.94  # of the picture; the least accuracy shown
_COLOURS = {"mnist": "#888888", "mnist_fast": "#d95f02"}


@dataclass(frozen=True)
class Trained:
    """curve: (seconds of training, accuracy on what is held out). seconds: of all of it. test: accuracy."""

    curve: list[tuple[float, float]]
    seconds: float
    test: float

    def seconds_to(self, accuracy: float) -> float:
        """Until it was first reached; all of the training where it never was."""
        return next((seconds for seconds, seen in self.curve if seen >= accuracy), self.seconds)


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
                "checkpoint.enabled=false",  # else one at each of the many validations
                "checkpoint.monitor=null",
                *callback("Curve"),
            )
        )
        (file,) = Path(folder).glob("*/*/run.json")
        results = json.loads(file.read_text())["results"]
    (report,) = outcome.reports
    found = Trained(
        [tuple(point) for point in report["curve"]], report["seconds"], results["test"]["metrics"]["test/accuracy"]
    )
    told = f"{found.seconds:.1f} s, {GOAL:.0%} after {found.seconds_to(GOAL):.1f} s, test {found.test:.2%}"
    print(f"  seed {seed}: {recipe}: {told}", file=sys.stderr, flush=True)
    return found


def rows(asked: Asked) -> list[Row]:
    rounds = asked.rounds_or(ROUNDS)
    found: dict[str, list[Trained]] = {recipe: [] for recipe in _RECIPES}
    with unpacked(asked.data_root) as root:
        for seed in range(rounds):
            for recipe in sorted(_RECIPES, reverse=seed % 2 == 1):
                found[recipe].append(trained(recipe, root, seed=seed))
    PICTURE.write_text(drawn({recipe: runs[0].curve for recipe, runs in found.items()}))
    times = Contest(
        {
            "mnist_fast": [each.seconds for each in found["mnist_fast"]],
            "mnist": [each.seconds_to(GOAL) for each in found["mnist"]],
        }
    )
    claim = f"mnist_fast: all of its training ÷ mnist's to {GOAL:.0%} of those held out"
    return [
        _accuracies(found),
        compare("mnist_fast", claim, times, ("mnist_fast", "mnist"), unit=_SECONDS, target=Target(1.0)),
    ]


def _accuracies(found: dict[str, list[Trained]]) -> Row:
    """Ours is mnist_fast's mean over seeds, and the range."""

    def shown(runs: Sequence[Trained]) -> str:
        tests = [each.test for each in runs]
        return f"{statistics.mean(tests):.2%} ({min(tests):.2%}–{max(tests):.2%})"

    mean = statistics.mean(each.test for each in found["mnist_fast"])
    claim = f"mnist_fast: test accuracy, mean of {len(found['mnist_fast'])} seeds; beside it mnist's"
    reached = "yes" if mean >= 0.99 else "no"
    return Row(
        "mnist_fast", claim, shown(found["mnist_fast"]), shown(found["mnist"]), target="≥ 99.00 %", reached=reached
    )


def drawn(curves: dict[str, list[tuple[float, float]]]) -> str:
    """An SVG of accuracy over seconds, from `_LEAST` on."""
    longest = max(curve[-1][0] for curve in curves.values())

    def at(seconds: float, accuracy: float) -> tuple[float, float]:
        x = _LEFT + seconds / longest * (_WIDTH - _LEFT - 20)
        return round(x, 1), round((_HEIGHT - _BOTTOM) * (1 - (max(accuracy, _LEAST) - _LEAST) / (1 - _LEAST)) + 5, 1)

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
        points = " ".join(f"{x},{y}" for x, y in (at(*point) for point in curve if point[1] >= _LEAST))
        colour, y = _COLOURS[recipe], _HEIGHT - 60 - 20 * number
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{_WIDTH - 30}" y="{y}" text-anchor="end" fill="{colour}">recipe={recipe}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif"'
    return "\n".join([f'{head} font-size="12">', *parts, "</svg>", ""])


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["--only", "mnist_fast", "--print", *sys.argv[1:]]))

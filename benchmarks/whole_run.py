"""Whole runs of short epochs, one process on one thread: the command with its defaults against a loop of one's own.

    python -m benchmarks.whole_run [--rounds 3]

recipe=toy for 300 epochs of 80 steps, and recipe=digits for its 15 of 40, with a validation after each and a log every
50 steps, which is Lightning's default, too. Nobody saves, and ours tests the model at its end. The plain loop indexes
tensors and computes the mean loss in a validation; it logs nothing. "training" is without imports and data.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from benchmarks.contest import Asked, Contestant, Row, Target, Unit, callback, compare, ours, peer, run, take_turns

ROUNDS = 3
_SECONDS = Unit("s")
_MS = Unit("ms", 1e3)


class Work(NamedTuple):
    recipe: str
    epochs: int
    steps_per_epoch: int
    target: Target


WORKS = (
    Work("toy", epochs=300, steps_per_epoch=80, target=Target(1.10)),
    Work("digits", epochs=15, steps_per_epoch=40, target=Target(1.02)),
)


class Compared(NamedTuple):
    claim: str
    # Of those that `measure` returns.
    figure: str
    other: str
    unit: Unit
    is_promised: bool = False


_COMPARED = (
    Compared("whole command", figure="command", other="plain loop", unit=_SECONDS, is_promised=True),
    Compared("whole command", figure="command", other="Lightning", unit=_SECONDS),
    Compared("training", figure="training", other="plain loop", unit=_SECONDS, is_promised=True),
    Compared("training", figure="training", other="Lightning", unit=_SECONDS),
    Compared("one log", figure="log", other="Lightning", unit=_MS),
    Compared("one validation", figure="validation", other="plain loop", unit=_MS),
    Compared("one validation", figure="validation", other="Lightning", unit=_MS),
)


def contestants(work: Work) -> list[Contestant]:
    """Ours first."""
    epochs = ("--epochs", str(work.epochs), "--steps-per-epoch", str(work.steps_per_epoch))
    return [
        ours(
            "ours",
            f"recipe={work.recipe}",
            "trainer.num_threads=1",
            f"trainer.max_epochs={work.epochs}",
            "checkpoint=none",
            *callback("WholeRun", steps_per_epoch=work.steps_per_epoch),
        ),
        peer("plain loop", "epochs_loop", "--work", work.recipe, *epochs),
        peer("Lightning", "lightning_epochs", "--work", work.recipe, *epochs, needs="lightning"),
    ]


def measure(contestant: Contestant) -> dict[str, float]:
    outcome = run(contestant)
    return {"command": outcome.seconds, **{key: outcome.worst(key) for key in ("training", "log", "validation")}}


def rows(asked: Asked) -> list[Row]:
    table = []
    for work in WORKS:
        contests = take_turns(contestants(work), asked.rounds_or(ROUNDS), measure)
        for compared in _COMPARED:
            claim = f"{work.recipe}: {compared.claim} ÷ {compared.other}"
            target = work.target if compared.is_promised else None
            contest = contests.get(compared.figure)
            names = ("ours", compared.other)
            table.append(compare("whole_run", claim, contest, names, unit=compared.unit, target=target))
    return table


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["--only", "whole_run", "--print", *sys.argv[1:]]))

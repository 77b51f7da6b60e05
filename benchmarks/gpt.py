"""Tokens a second of recipe=gpt_char, two threads: ours against a hand-written loop with the same model.

    python -m benchmarks.gpt [--rounds 5] [--data-root FOLDER]

Batches of 12 windows of 64 characters, with decay groups, clipping and a schedule; all of it is within the first epoch.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.contest import Asked, Contestant, Row, Target, Unit, callback, compare, ours, peer, run, take_turns

ROUNDS = 5
TOKENS = 12 * 64
"""Of a batch."""

THREADS = 2
_WARM_UP = 20
_STEPS = 150


def tokens_per_second(contestant: Contestant) -> dict[str, float]:
    return {"tokens/s": TOKENS / run(contestant).worst("wall_s")}


def contestants(data_root: Path) -> list[Contestant]:
    """Ours first. Raises SystemExit if the text isn't there: ours alone would train on another one."""
    file = data_root / "tinyshakespeare" / "input.txt"
    if not file.exists():
        sys.exit(f"{file} isn't there, so both can't train on the same text: give --data-root, or put it there.")
    overrides = (
        "recipe=gpt_char",
        f"data.root={data_root}",
        "trainer.gpus=0",
        f"trainer.num_threads={THREADS}",
        f"trainer.max_steps={_WARM_UP + _STEPS}",
        "scheduler.total_steps=2000",
        "trainer.val_check_interval=null",
        "checkpoint.monitor=null",
        *callback("Clock", warm_up=_WARM_UP, steps=_STEPS),
    )
    length = ("--warm-up", str(_WARM_UP), "--steps", str(_STEPS), "--threads", str(THREADS))
    return [
        ours("ours", *overrides),
        peer("hand-written loop", "gpt_loop", "--file", str(file), *length),
    ]


def rows(asked: Asked) -> list[Row]:
    contests = take_turns(contestants(asked.data_root), asked.rounds_or(ROUNDS), tokens_per_second)
    row = compare(
        "gpt",
        "GPT tokens/s ÷ hand-written loop",
        contests.get("tokens/s"),
        ("ours", "hand-written loop"),
        unit=Unit("tokens/s", 1.0, 0),
        target=Target(1.0, at_least=True),
    )
    return [row]


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["--only", "gpt", "--print", *sys.argv[1:]]))

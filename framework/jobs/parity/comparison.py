"""Compare three trainings step by step: with one process, with one from moved weights, and with several.

`compare` runs in a process that has torch, for `job`, which has none. It goes up to the first step that differs by more
than rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from framework.jobs.parity.causes import differing_start, first_difference
from framework.jobs.parity.differences import BUFFERS, GRADIENTS, LAYERS, WEIGHTS, Comparison, Difference, Step
from framework.jobs.parity.page import render
from framework.jobs.parity.recording import Trace, trace_file


def compare(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the records of the runs `one`, `moved` and `many`, with `processes`.

    Return the `answer`, whose keys `job` describes, and the `text` to print.
    """
    processes: int = arguments["processes"]
    one = _load(arguments["one"], rank=0)
    moved = _load(arguments["moved"], rank=0)
    many = [_load(arguments["many"], rank=rank) for rank in range(processes)]
    steps, difference = _compare_steps(one, moved, many)

    # Gradients that could be distinguished from rounding in any step.
    sure = set()
    for step in steps:
        sure |= {gradient.name for gradient in step[GRADIENTS] if gradient.is_sure}
    unsure = []
    if steps:
        unsure = [gradient.name for gradient in steps[0][GRADIENTS] if gradient.name not in sure]
    answer = {
        "same": difference is None and bool(sure),
        "processes": processes,
        "steps": len(steps),
        "model": one.model,
        "dropouts": one.dropouts,
        "parts": {part: _summary(part, steps) for part in (LAYERS, GRADIENTS, WEIGHTS, BUFFERS)},
        "unsure": unsure,
        "first_difference": difference,
    }
    return {"answer": answer, "text": render(answer)}


def _load(folder: str, *, rank: int) -> Trace:
    """Return what one of our own ranks wrote."""
    trace: Trace = torch.load(trace_file(Path(folder), rank=rank), weights_only=False)
    return trace


def _compare_steps(one: Trace, moved: Trace, many: Sequence[Trace]) -> tuple[list[Step], dict[str, Any] | None]:
    """Return the steps up to the first one that differs, and what differs first; None if nothing does."""
    comparison = Comparison(one.floor)
    steps: list[Step] = []
    difference = differing_start(one, many[0])
    if difference is not None:
        return steps, difference
    traces = (one, moved, *many)
    for of_one, of_moved, *of_many in zip(*(trace.steps for trace in traces), strict=False):
        step = comparison.compare_step(of_one, of_moved, of_many)
        steps.append(step)
        difference = first_difference(len(steps), step, of_one, of_many, floor=one.floor)
        if difference is not None:
            break
    return steps, difference


def _summary(part: str, steps: Sequence[Step]) -> dict[str, Any]:
    """Return how many are compared, and the one closest to its limit or beyond it most, with its step."""
    names = set()
    worst: Difference | None = None
    worst_step = 0
    for number, step in enumerate(steps, start=1):
        for difference in step[part]:
            names.add(difference.name)
            if worst is None or _excess(difference) > _excess(worst):
                worst = difference
                worst_step = number
    if worst is None:
        return {"compared": 0, "greatest": None}
    return {"compared": len(names), "greatest": {**asdict(worst), "step": worst_step}}


def _excess(difference: Difference) -> tuple[bool, float]:
    """Return what orders differences: those that can be distinguished from rounding are larger."""
    return difference.is_sure, difference.difference / difference.allowed

"""Repeat steps of a run with callbacks that look on, and read what they have written. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from framework.checkpoint import complete_steps
from framework.command.request import JobResult, Request
from framework.config.parse import parse
from framework.config.schema import Config, Node
from framework.errors import RunError
from framework.jobs.replay.training import Start, announcement, find_start, replay
from framework.runs.record import RunRecord
from framework.runs.segments import checkpoint_before, segment_at
from framework.system.formatting import display_path
from framework.system.run_dir import read_object
from framework.system.shown_text import shown

_FAULT_WATCH = "framework.jobs.why.watch.FaultWatch"
_SAMPLE_SEARCH = "framework.jobs.why.samples.SampleSearch"
_TRACE = "framework.jobs.why.watch.Trace"


@dataclass(frozen=True)
class Repeated:
    """Steps of a run that were repeated."""

    start: Start
    until: int
    # What each rank has written, in order.
    ranks: list[dict[str, Any]]


def described(repeated: Repeated) -> dict[str, Any]:
    """Return what an answer says of a repetition."""
    checkpoint = repeated.start.checkpoint
    name = None if checkpoint is None else checkpoint.name
    return {"checkpoint": name, "from_step": repeated.start.step, "until": repeated.until}


def fault_watch(*, first: int | None = None, last: int | None = None) -> Node:
    """Return the callback that finds the first fault; see `FaultWatch`."""
    return {"_target_": _FAULT_WATCH, "first": first, "last": last}


def sample_search(fault: Mapping[str, Any]) -> Node:
    """Return the callback that looks for the samples of a fault; see `SampleSearch`."""
    return {"_target_": _SAMPLE_SEARCH, "fault": dict(fault)}


def trace() -> Node:
    return {"_target_": _TRACE}


def start_before(record: RunRecord, step: int, *, until: int) -> Start:
    """Return the newest checkpoint from which step `step` can be repeated.

    A branch of another run can't be repeated from before its own checkpoints: then it is the oldest one from which step
    `until` can be.
    """
    step = max(1, step)
    if "branch_of" in record.facts and checkpoint_before(record.run_dir, step - 1) is None:
        for number in sorted(complete_steps(record.run_dir.checkpoints)):
            checkpoint = checkpoint_before(record.run_dir, number)
            if checkpoint is not None and number < until:
                return Start(checkpoint, number)
    return find_start(record.run_dir, step=step)


def repeat(request: Request, record: RunRecord, start: Start, *, until: int, callback: Node, folder: Path) -> Repeated:
    """Repeat the steps of a run after `start`, with the settings of that time; say what is repeated.

    Raises RunError if the training fails.
    """
    print(shown(announcement(record, start, until=until)), flush=True)
    segment = segment_at(record.run_dir, until)
    raw = dict(segment.config)
    config: Config = replace(parse(raw), run=str(record.run_dir.path), step=None, resume=None)
    of_run = replace(request, config=config, raw=raw)
    result: JobResult = replay(of_run, start, until=until, callbacks={"why": callback}, folder=folder)
    if result.run_dir is None or result.status != 0:
        raise RunError(f"The run can't be repeated: the training in {display_path(folder)} failed.")
    files = sorted(result.run_dir.path.glob("why/rank_*.json"), key=_rank)
    ranks: list[Mapping[str, Any] | None] = [read_object(file) for file in files]
    return Repeated(start, until, [dict(content) for content in ranks if content is not None])


def _rank(file: Path) -> int:
    return int(file.stem.partition("_")[2])

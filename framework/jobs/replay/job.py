"""`job=replay run=RUN step=N`: run a step of a run again, exactly, and show what happened in it. No torch here.

The run is repeated from its newest checkpoint before the step, in a directory of its own; nothing is added to the run.
The answer is printed, and written to replay.json with these keys:

    run, step, recipe
    checkpoint     the name of the one it was repeated from, and its step, `from_step`; null and 0: from scratch
    repeated       how many steps were repeated, at least to the end of the logging interval that contains the step
    processes, devices
    changes        what has changed since the run, that may give other numbers
    check          null, if the run hasn't logged that interval; else its last step, `processes` of the run,
                   `same_place` (as many processes, on the same kind of device), `tolerance` (null: bit for bit),
                   `equal`, and `values`, by name: `logged`, `repeated`, `equal`
    steps          for each step that is shown:
                   step, epoch
                   micro_batches   of each rank: rank, micro_batch, indices of the samples, names (null: the data set
                                   has none), picture (its name in `pictures`; null: they aren't images), and
                                   outputs: objective, loss, num_samples, metrics
                   inputs          of the model: absmax, count, zeros, inf, nan; over all ranks
                   modules         in the order of the forward (null: the model is compiled): name, type, and the same
                                   for activations and gradients
                   weights         name, norm, gradient_norm (over all ranks, before clipping), update_norm
                   anomaly         with replay.detect_anomaly, what gives NaN in the backward
    file           with replay.output, the file of the step
    pictures       the folder of the pictures, if there are any
    alone          with rank and launcher=in_process, what that rank's part of the step gave without the others: `rank`,
                   `equal` (the same losses; null: the step failed before), and the keys of a step

Numbers that JSON doesn't have are the texts "nan", "inf" and "-inf".

Exit status 0: repeated, and equal to what was logged as far as that can be checked; 1: it differs, or a training
failed; 2: it can't be repeated.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from framework.command.job import Job
from framework.command.request import JobResult, Request
from framework.config.schema import Config
from framework.errors import ConfigError, RunError
from framework.jobs.replay.changes import changed_modules, changes_since
from framework.jobs.replay.check import compared, interval_end, same_place, tolerance
from framework.jobs.replay.merging import merged, metric_names
from framework.jobs.replay.page import render
from framework.jobs.replay.training import (
    IN_PROCESS,
    PICTURES,
    STEP_FILE,
    ReplayTraining,
    Start,
    alone_request,
    announcement,
    find_start,
    last_step,
    recorder_node,
    replay,
)
from framework.remote.place import outputs_folder
from framework.runs.record import RunRecord, read_run
from framework.runs.segments import Segment, segment_at
from framework.strategies.rules import rules_of
from framework.system.files import atomic_output, checked_output
from framework.system.formatting import display_path
from framework.system.run_dir import RunDir, new_name, read_object, write_object
from framework.system.shown_text import shown


class Replay(Job):
    """Repeat a step of a run, and show it."""

    # The training has ranks of its own.
    needs_ranks = False
    takes_run = True
    sweepable = False
    sections = ("replay",)

    def mistakes(self, config: Config) -> Iterator[str]:
        for key in ("run", "step"):
            if getattr(config, key) is None:
                yield f"job=replay needs {key}: job=replay run=outputs/RECIPE/RUN step=N. job=runs lists the runs."

    def run(self, request: Request) -> JobResult:
        """Repeat, print and write the answer. Raises FrameworkError for what can't be repeated."""
        config = request.config
        record = _record(request)
        step = _checked_step(config, record)
        segment = segment_at(record.run_dir, step)
        start = find_start(record.run_dir, step=step - config.replay.steps + 1)
        until = interval_end(record, step) or step
        is_alone = _is_alone(config, segment)
        output = None
        if config.replay.output is not None:
            output = checked_output(config.replay.output, key="replay.output", suffixes=(".pt",))

        changes = changes_since(segment)
        print(shown(announcement(record, start, until=until)), flush=True)
        for change in changes:
            print(shown(f"Warning: {change}"), flush=True)

        folder = outputs_folder(config.path) / config.recipe / "replay" / new_name()
        recorder = recorder_node(
            first=step - config.replay.steps + 1,
            last=step,
            detect_anomaly=config.replay.detect_anomaly,
            saved_rank=None if output is None and not is_alone else config.rank or 0,
        )
        result = replay(request, start, until=until, callbacks={"replay": recorder}, folder=folder)
        if result.run_dir is None:
            return result
        trained = result.run_dir
        ranks = _records_of_ranks(trained)
        if not ranks:
            return result

        content = _answer(request, record, segment, start, ranks, until=until, changes=changes, trained=trained)
        if output is not None:
            with atomic_output(output, key="replay.output") as path:
                shutil.copyfile(trained.path / "replay" / "step.pt", path)
            content["file"] = display_path(output)
        if (trained.path / PICTURES).exists():
            (trained.path / PICTURES).rename(folder / "pictures")
            content["pictures"] = display_path(folder / "pictures")
        if is_alone:
            assert config.rank is not None
            print(shown(f"Rank {config.rank}'s part of step {step:,}, in this process:"), flush=True)
            alone = _alone(request, rank=config.rank, step=step, trained=trained, folder=folder)
            content["alone"] = _compared_alone(content, alone, rank=config.rank)
        file = folder / "replay.json"
        write_object(file, content)
        if result.status == 0:
            # What was trained is of no use, and may be large.
            for training in folder.glob(".*"):
                shutil.rmtree(training)
        print(shown(f"{render(content, rank=config.rank)}\n\n  {display_path(file)}"), flush=True)
        return JobResult(_status(result, content), results={**content, "output": display_path(file)})


def _record(request: Request) -> RunRecord:
    """Return the record of the run. Raises ConfigError for a run that can't be repeated."""
    config = request.config
    if request.external_ranks is not None:
        raise ConfigError(
            "job=replay starts processes of its own, on one machine.\nRun the command once, without torchrun or srun."
        )
    record = read_run(Path(str(config.run)))
    if record is None:
        raise ConfigError(f"run={config.run}: the run has only just begun.")
    if config.trainer.fast_dev_run:
        raise ConfigError(
            f"run={record.run}: trainer.fast_dev_run leaves callbacks and checkpoints out, so it can't be repeated. "
            "Train with trainer.max_steps."
        )
    return record


def _checked_step(config: Config, record: RunRecord) -> int:
    """Return the step. Raises ConfigError if the run hasn't made it."""
    step = int(config.step or 0)
    last = last_step(record)
    if step > last:
        raise ConfigError(
            f"step={step}: {record.run} has made {last} steps, as far as its records show. Use step={last}."
        )
    if config.replay.steps > step:
        raise ConfigError(f"replay.steps={config.replay.steps}: there are only {step} steps up to step={step}.")
    return step


def _is_alone(config: Config, segment: Segment) -> bool:
    """Return True if one rank's part of the step is to be made alone. Raises ConfigError if that is impossible."""
    world_size = segment.topology.get("world_size")
    if config.rank is not None and world_size is not None and config.rank >= world_size:
        raise ConfigError(f"rank={config.rank}: ranks count from 0, and the run had {world_size} at that step.")
    if config.launcher._target_ != IN_PROCESS or world_size in (None, 1):
        return False
    if config.rank is None:
        raise ConfigError(
            f"launcher=in_process makes one rank's part of the step in this process, and the run had {world_size}. "
            "Type rank=0, or another one."
        )
    strategy = config.strategy["_target_"]
    rules = rules_of(strategy)
    exchanges = config.strategy.get("sync_batchnorm") is True
    if rules is not None:
        exchanges = exchanges or rules.forward_communicates or rules.num_stages is not None
    if exchanges:
        raise ConfigError(
            f"strategy={strategy.rpartition('.')[2].lower()}: the processes exchange values in the forward, so one "
            "can't make it alone.\nLeave launcher=in_process out."
        )
    return True


def _alone(request: Request, *, rank: int, step: int, trained: RunDir, folder: Path) -> list[dict[str, Any]]:
    """Make the rank's part of the step in this process; return the step's record, as `merged` does.

    Raises what the user's code raises.
    """
    file = trained.path / STEP_FILE
    alone = alone_request(request, step=step, file=file, folder=folder / ".alone")
    result = ReplayTraining().run(alone)
    if result.status != 0 or result.run_dir is None:
        raise RunError(f"Rank {rank}'s part of the step has failed in this process.")
    return merged(_records_of_ranks(result.run_dir))


def _compared_alone(content: Mapping[str, Any], alone: Sequence[Mapping[str, Any]], *, rank: int) -> dict[str, Any]:
    """Return what a rank's part of the step gave alone, and if its losses are those that it gave among the others."""
    (step,) = alone
    for weight in step["weights"]:
        # The optimizer has no state.
        weight["update_norm"] = None
    before = [micro["outputs"] for micro in content["steps"][-1]["micro_batches"] if micro["rank"] == rank]
    now = [micro["outputs"] for micro in step["micro_batches"]]
    is_known = any(before)
    return {"rank": rank, "equal": now == before if is_known else None, **step}


def _records_of_ranks(trained: RunDir) -> list[dict[str, Any]]:
    """Return what the ranks have recorded, in order."""
    files = sorted(trained.path.glob("replay/rank_*.json"), key=lambda file: int(file.stem.partition("_")[2]))
    records = [read_object(file) for file in files]
    return [record for record in records if record is not None]


def _answer(
    request: Request,
    record: RunRecord,
    segment: Segment,
    start: Start,
    ranks: list[dict[str, Any]],
    *,
    until: int,
    changes: list[str],
    trained: RunDir,
) -> dict[str, Any]:
    """Return what the answer is about, as the module's docstring says. trained: the directory of the training."""
    facts = trained.read_run()
    changes = [*changes, *changed_modules(segment, (facts.get("modules") or {}))]
    steps = merged(ranks)
    return {
        "run": record.run,
        "step": request.config.step,
        "recipe": record.recipe,
        "checkpoint": None if start.checkpoint is None else start.checkpoint.name,
        "from_step": start.step,
        "repeated": until - start.step,
        "processes": facts["topology"]["world_size"],
        "devices": [rank["device"] for rank in ranks],
        "changes": changes,
        "check": _check(request, record, segment, trained, steps, until=until, repeated=until - start.step),
        "steps": steps,
        "file": None,
        "pictures": None,
        "alone": None,
    }


def _check(
    request: Request,
    record: RunRecord,
    segment: Segment,
    trained: RunDir,
    steps: list[dict[str, Any]],
    *,
    until: int,
    repeated: int,
) -> dict[str, Any] | None:
    """Return how the logging interval compares; None if the run hasn't logged it, or the training failed before."""
    repetition = read_run(trained.path)
    if interval_end(record, request.config.step or 0) != until or repetition is None:
        return None
    is_same = same_place(segment.topology, trained.read_run()["topology"])
    allowed = None if is_same else tolerance(request.config.trainer.precision, steps=repeated)
    values = compared(record, repetition, step=until, names=metric_names(steps), allowed=allowed)
    if not values:
        return None
    return {
        "step": until,
        "processes": segment.topology.get("world_size"),
        "same_place": is_same,
        "tolerance": allowed,
        "equal": all(value["equal"] for value in values.values()),
        "values": values,
    }


def _status(result: JobResult, content: Mapping[str, Any]) -> int:
    if result.status != 0:
        return result.status
    check = content["check"]
    return 1 if check is not None and not check["equal"] else 0

"""Run a saved run again, from its newest checkpoint before a step up to a step. No torch here.

    start = find_start(run_dir, step=18_423)
    print(announcement(record, start, until=18_423))
    result = replay(request, start, until=18_423, callbacks={"look": {"_target_": "…"}}, folder=folder)

The request is that of a job with `takes_run`: its configuration is the one in force at the step, with what is typed.
The training is an ordinary one in a directory in `folder`, with the callbacks of the run and these after them. It logs
to metrics.jsonl there, and nothing to the run and its trackers. It saves no checkpoints, and isn't tested.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.checkpoint.layout import step_name, step_of
from framework.command.request import JobResult, Request
from framework.config.apply_typed import apply_typed
from framework.config.nested import is_equal
from framework.config.parse import parse
from framework.config.schema import Config, Node
from framework.config.topology import Topology
from framework.data.batching import plan_steps
from framework.data.skipping import with_skipped_steps
from framework.errors import EXIT_STOPPED, ConfigError
from framework.jobs.train import Train
from framework.runs.record import RunRecord
from framework.runs.segments import Segment, checkpoint_before, segment_at
from framework.strategies.rules import rules_of, strategy_request
from framework.system.formatting import display_path, format_count, format_duration, format_seconds
from framework.system.run_dir import RunDir, read_object
from framework.types import DataShare

if TYPE_CHECKING:
    from framework.launch.plan import MonitorLink, RankArguments

# In the directory of the training: what a rank had at the beginning of a step.
STEP_FILE = "replay/step.pt"
# Its folder of the samples' pictures.
PICTURES = "replay/pictures"
# It is a training to all of its parts. Lists of runs pass over hidden folders.
_DIRECTORY = ".training"
_MINUTE_S = 60.0
_LOCAL = "framework.launch.local.LocalLauncher"
IN_PROCESS = "framework.launch.in_process.InProcessLauncher"


@dataclass(frozen=True)
class Start:
    """Where a run begins again."""

    # None: from scratch.
    checkpoint: Path | None
    # Optimizer steps that it has done.
    step: int


def find_start(run_dir: RunDir, *, step: int) -> Start:
    """Return where to begin to repeat optimizer step `step`: the newest checkpoint before it, or from scratch.

    Raises ConfigError for a branch of another run that has no such checkpoint.
    """
    checkpoint = checkpoint_before(run_dir, step - 1)
    branch = run_dir.read_run().get("branch_of")
    if checkpoint is None and branch is not None:
        raise ConfigError(
            f"{display_path(run_dir.path)} branches off {branch['run']} at step {branch['step']:,}, and has no "
            "checkpoint left from before this step. Name a later step, or branch again."
        )
    done = None
    if checkpoint is not None:
        done = step_of(checkpoint.name)
    return Start(checkpoint, done or 0)


def last_step(record: RunRecord) -> int:
    """Return how many optimizer steps the run has done, as far as its records show."""
    run_dir = record.run_dir
    steps = [int((record.facts.get("results") or {}).get("steps") or 0)]
    steps += [row["step"] for row in record.rows()]
    last = run_dir.checkpoints / "last"
    if last.is_symlink():
        steps.append(step_of(last.resolve().name) or 0)
    # A step that failed is one that can be repeated.
    failure = read_object(run_dir.path / "failure.json") or {}
    first = failure.get("first")
    if isinstance(first, Mapping) and isinstance(first.get("step"), int):
        steps.append(first["step"] + 1)
    return max(steps)


def announcement(record: RunRecord, start: Start, *, until: int) -> str:
    """Return the line that says how many steps are repeated, from where, and about how long that takes."""
    source = "from the start, since there is no checkpoint before"
    if start.checkpoint is not None:
        source = f"from the checkpoint {start.checkpoint.name}"
    line = f"Repeating {format_count(until - start.step, 'step')} of {record.run}, {source}"
    seconds = _expected_seconds(record, start, until=until)
    if seconds is not None:
        duration = format_seconds(seconds) if seconds < _MINUTE_S else format_duration(seconds)
        line += f". The run took {duration} for that"
    return line


def _expected_seconds(record: RunRecord, start: Start, *, until: int) -> float | None:
    """Return how long the steps took when the run made them; None if that wasn't logged."""
    name = "train/steps_per_s"
    rates: list[float] = []
    for row in record.rows(having=name):
        rate = row[name]
        if rate and (row["step"] > start.step or not rates):
            rates.append(rate)
        if row["step"] >= until:
            break
    if not rates:
        return None
    mean_s: float = sum(1 / rate for rate in rates) / len(rates)
    return mean_s * (until - start.step)


class ReplayTraining(Train):
    """A training that repeats steps of a run. It can't be resumed."""

    trains = False

    def title(self, config: Config) -> str:
        return "Repeating"

    def rank(self, arguments: RankArguments, link: MonitorLink) -> int | None:
        from framework.jobs.replay.rank import replay_rank

        return replay_rank(arguments, link)

    def text(self, request: Request, run_dir: RunDir, *, status: int) -> str:
        return ""


def replay(
    request: Request, start: Start, *, until: int, callbacks: Mapping[str, Node], folder: Path, saves: bool = False
) -> JobResult:
    """Train from `start` until `until` optimizer steps are done, in a new directory in `folder`.

    Steps between the checkpoint and a resume with other settings are repeated with the settings of that time.

    Args:
        callbacks: what looks on. One with a method `observe_trainer` gets the trainer before the first step.
        saves: save a checkpoint at the end.

    Raises:
        FrameworkError: a request that can't be met.
        KeyboardInterrupt: on a signal to stop.
    """
    run_dir = RunDir(Path(str(request.config.run)))
    in_force = segment_at(run_dir, int(request.config.step or until))
    legs = _legs(run_dir, start, until=until)
    checkpoint = start.checkpoint
    for number, leg in enumerate(legs, start=1):
        is_last = number == len(legs)
        # What is typed differs from what was in force.
        raw = apply_typed(leg.segment.config, before=in_force.config, after=request.raw, typed=())
        raw = _training_config(raw, leg.segment, checkpoint=checkpoint, saves=saves or not is_last)
        stop = {"_target_": "framework.jobs.replay.rank.StopAfter", "step": leg.until}
        raw["callbacks"] = {**raw["callbacks"], **(callbacks if is_last else {}), "replay_end": stop}
        # At a branch point, the checkpoint is taken over as far as the changes allow.
        training = replace(training_request(request, raw), branch_of=run_dir.read_run().get("branch_of"))

        if training.placement.launcher.runs_in_command:
            training = replace(training, parent_run=folder / _DIRECTORY)
        else:
            name = _DIRECTORY if is_last else f"{_DIRECTORY}_to_{leg.until}"
            training = replace(training, sub_run=folder / name)
        result = ReplayTraining().run(training)
        if result.status == EXIT_STOPPED:
            # A training that saves a checkpoint stops at the end of a step. This one is none that can be resumed.
            print("Nothing to resume; rerun the command.", file=sys.stderr, flush=True)
            raise KeyboardInterrupt
        if result.status != 0 or result.run_dir is None:
            break
        checkpoint = result.run_dir.checkpoints / step_name(leg.until)
    return result


@dataclass(frozen=True)
class _Leg:
    """Steps that are repeated with the same settings on the same processes."""

    segment: Segment
    until: int


def _legs(run_dir: RunDir, start: Start, *, until: int) -> list[_Leg]:
    """Return the parts in which to repeat the steps. A resume that changed nothing begins no part."""
    legs: list[_Leg] = []
    done = start.step
    while done < until:
        segment = segment_at(run_dir, done + 1)
        done = until if segment.until is None else min(segment.until, until)
        if legs and is_equal(_settings(legs[-1].segment), _settings(segment)):
            legs.pop()
        legs.append(_Leg(segment, done))
    return legs


def _settings(segment: Segment) -> tuple[dict[str, Any], Mapping[str, Any]]:
    config = {key: value for key, value in segment.config.items() if key != "resume"}
    return config, segment.topology


def _training_config(
    config: Mapping[str, Any], segment: Segment, *, checkpoint: Path | None, saves: bool
) -> dict[str, Any]:
    """Return the configuration of a training that repeats steps.

    Args:
        config: what was in force, with what is typed.
        segment: has the processes of that time, for what isn't typed.
        checkpoint: where it begins; None: from scratch.
        saves: save a checkpoint at the end.
    """
    raw: dict[str, Any] = deepcopy(dict(config))
    # The user's code may ask for it.
    raw["job"] = "train"
    raw["resume"] = None if checkpoint is None else str(checkpoint)
    raw["logger"] = {"jsonl": {"_target_": "framework.loggers.jsonl.JsonlLogger"}}
    raw["preflight"] = {**raw.get("preflight", {}), "enabled": False}
    raw["trainer"] |= {"profiler": None, "progress": "off"}
    # Validations stay: schedules and callbacks may depend on them.
    raw["checkpoint"] |= {"enabled": saves, "monitor": None, "every_n_steps": None, "every_n_epochs": None}

    trainer_gpus = segment.config["trainer"]["gpus"]
    is_typed = raw["topology"] != segment.config["topology"] or raw["trainer"]["gpus"] != trainer_gpus
    if is_typed:
        # Other processes get other parts of the same global batches.
        batch_size = _global_batch_size(segment)
        if batch_size is not None and raw["data"] == segment.config["data"]:
            raw["data"]["global_batch_size"] = batch_size
    raw["topology"] |= {"nnodes": 1, "node_rank": 0, "rdzv_endpoint": None}
    if segment.topology and not is_typed:
        # All on this machine, and as many as torchrun or srun may have started.
        raw["topology"]["procs_per_node"] = segment.topology["world_size"]
        raw["topology"]["gpus_per_process"] = segment.topology["span"]
        raw["trainer"]["gpus"] = segment.topology["gpus_per_node"] * segment.topology["nnodes"]
    launcher = raw["launcher"]["_target_"]
    if launcher != IN_PROCESS or raw["topology"]["procs_per_node"] not in (1, None, "auto"):
        launcher = _LOCAL
    raw["launcher"] |= {"_target_": launcher, "args": {}, "max_restarts": 0}
    if segment.rolled_back:
        raw["data"] = with_skipped_steps(raw["data"], segment.rolled_back)
    return raw


def _global_batch_size(segment: Segment) -> int | None:
    """Return the global batch size that the run had; None if that can't be known here, or isn't one number."""
    config: Config = parse(segment.config)
    if not segment.topology or config.data.batch_size == "auto":
        return None
    known = {name: value for name, value in segment.topology.items() if name != "world_size"}
    topology = Topology(**known)
    rules = rules_of(config.strategy["_target_"])
    share = DataShare(0, topology.world_size)
    if rules is not None:
        share = rules(strategy_request(config, topology, backend="gloo")).data_share()
    return plan_steps(config, share).global_batch_size


def alone_request(request: Request, *, step: int, file: Path, folder: Path) -> Request:
    """Return the request of one rank's part of a step, made alone in the command's process.

    Args:
        file: what its process had at the beginning of the step.
        folder: where to make the run directory.
    """
    segment = segment_at(RunDir(Path(str(request.config.run))), step)
    raw = _training_config(request.raw, segment, checkpoint=None, saves=False)
    raw["topology"] |= {"procs_per_node": 1}
    if raw["trainer"]["gpus"]:
        raw["trainer"]["gpus"] = segment.topology["span"]
    raw["strategy"] = {"_target_": "framework.strategies.Single"}
    raw["launcher"] |= {"_target_": IN_PROCESS}
    raw["trainer"] |= {"limit_val_batches": 0, "num_sanity_val_steps": 0}
    # All weights come from the file, and any step of the data will do.
    raw["init_from"] = None
    raw["init"] = {**raw.get("init", {}), "training": False}
    batch_size = _global_batch_size(segment)
    if batch_size is not None:
        batch_size = batch_size // segment.topology["world_size"] or None
    raw["data"] |= {"global_batch_size": batch_size, "num_workers": 0}
    recorder = recorder_node(first=step, last=step)
    alone = {"_target_": "framework.jobs.replay.alone.Alone", "file": str(file)}
    stop = {"_target_": "framework.jobs.replay.rank.StopAfter", "step": step}
    raw["callbacks"] = {"replay": recorder, "replay_alone": alone, "replay_end": stop}
    return replace(training_request(request, raw), parent_run=folder)


def recorder_node(*, first: int, last: int, detect_anomaly: bool = False, saved_rank: int | None = None) -> Node:
    """Return the callback that records these steps; see `Recorder`."""
    return {
        "_target_": "framework.jobs.replay.recorder.Recorder",
        "first": first,
        "last": last,
        "detect_anomaly": detect_anomaly,
        "saved_rank": saved_rank,
    }


def training_request(request: Request, raw: Mapping[str, Any]) -> Request:
    """Return the request of a training with this configuration."""
    # To the command, `resume` is the run whose directory is used; to the ranks, the checkpoint that they load.
    config: Config = replace(parse(raw), resume=None)
    if raw["resume"] is not None:
        config = replace(config, init_from=None)
    return replace(request, config=config, raw=raw, skips_test=True)

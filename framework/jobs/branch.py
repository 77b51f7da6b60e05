"""`job=branch run=RUN step=N`: a new run that continues from step N of another one, with what is typed. No torch here.

It begins with a checkpoint of that step in its own directory, and trains on from there as a run that is resumed. If the
other run has no checkpoint of step N, the steps from the newest one before it are repeated first, with what was in
force then, and nothing of them is logged.

`branch_of` in its run.json has:

    run         the directory of the other run
    step        the last step of the other run that is part of this one
    checkpoint  the checkpoint of the other run that it began with; null: from scratch
    repeated    how many steps were repeated to get from there to `step`
    changed     the keys of the configuration that were changed: their values before and now

`skip=[N,…]` leaves out the samples of steps of the other run: it is `data.skip_steps`, or with `branch.skipped=later`
`data.defer_steps`, of the new run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from framework.checkpoint import LocalStorage, find_damage
from framework.checkpoint.layout import LAST, step_name
from framework.command.mirroring import make_local_outputs
from framework.command.request import JobResult, Request
from framework.config.nested import flatten, is_equal
from framework.config.overrides import key_of, merge_overrides, path_argument
from framework.config.parse import parse
from framework.config.saved import objects_of
from framework.config.schema import BranchConfig, Config
from framework.config.secrets import Secrets
from framework.config.values import show
from framework.data.skipping import late_changes, number_of_step
from framework.errors import ConfigError
from framework.jobs.replay.training import Start, announcement, find_start, last_step, replay
from framework.jobs.train import Train
from framework.remote.place import outputs_folder
from framework.runs.record import RunRecord, read_run
from framework.runs.segments import rolled_back_steps, segment_at
from framework.system.formatting import display_path
from framework.system.run_dir import RunDir, new_run_dir
from framework.system.shown_text import shown

# The folder in the new run's directory in which steps are repeated. Lists of runs pass over hidden folders.
_REPEATED = ".repeated"
# They say what the command is, not what is trained.
_OF_COMMAND = ("job", "resume", "rerun", "run", "step", "skip", "branch", "rank", "trust", "objects")


class Branch(Train):
    """Train a new run from a step of another one."""

    takes_run = True
    continues_run = True
    sweepable = False
    sections = ("branch",)

    def mistakes(self, config: Config) -> Iterator[str]:
        for key in ("run", "step"):
            if getattr(config, key) is None:
                yield f"job=branch needs {key}: job=branch run=outputs/RECIPE/RUN step=N. job=runs lists the runs."
        yield from super().mistakes(config)

    def run(self, request: Request) -> JobResult:
        """Make the new run's first checkpoint, then train. Raises FrameworkError for a request that can't be met."""
        config = request.config
        if request.external_ranks is not None or config.topology.nnodes > 1:
            raise ConfigError(
                "job=branch starts on one machine, with processes of its own.\nRun the command once, without torchrun "
                "or srun, and with topology.nnodes=1. The new run can be resumed on several nodes."
            )
        record = _record(config)
        step = int(config.step or 0)
        # The checkpoint of this step, or the newest one before it.
        start = find_start(record.run_dir, step=step + 1)
        _check_skips(request, record, step=step)
        request = _skipping(_without_rolled_back(request, record), record)
        changed = _changed_keys(request, record.run_dir, step=step)

        make_local_outputs(config)
        with new_run_dir(outputs_folder(config.path) / config.recipe) as run_dir:
            print(shown(_headline(record, step=step, changed=changed)), flush=True)
            if start.step < step:
                print(shown(announcement(record, start, until=step)), flush=True)
            try:
                status = _make_first_checkpoint(request, record, start, run_dir, step=step)
            except BaseException:
                shutil.rmtree(run_dir.path, ignore_errors=True)
                raise
            if status != 0:
                return JobResult(status)
            branch_of = {
                "run": str(record.run_dir.path),
                "step": step,
                "checkpoint": None if start.checkpoint is None else start.checkpoint.name,
                "repeated": step - start.step,
                "changed": changed,
            }
            return Train().run(_training(request, run_dir, branch_of))


def _record(config: Config) -> RunRecord:
    """Return the record of the run. Raises ConfigError if it hasn't made the step."""
    record = read_run(Path(str(config.run)))
    if record is None:
        raise ConfigError(f"run={config.run}: the run has only just begun.")
    if config.trainer.fast_dev_run:
        raise ConfigError("trainer.fast_dev_run can't go with job=branch: it writes no checkpoints. Leave it out.")
    last = last_step(record)
    if config.step is not None and config.step > last:
        raise ConfigError(
            f"step={config.step}: {record.run} has made {last} steps, as far as its records show. Use step={last}."
        )
    return record


def _check_skips(request: Request, record: RunRecord, *, step: int) -> None:
    """Raise ConfigError if `data.skip_steps` or `defer_steps` changes for a step that comes before the branch."""
    data = request.config.data
    before = segment_at(record.run_dir, step + 1).config["data"]
    for change in late_changes(before, data, step=step, rolled_back=rolled_back_steps(record.facts)):
        raise ConfigError(
            f"data.{change.key}={change.now} (it was {change.before}): the new run continues after step={step}, so "
            f"what is trained on in step {change.number:,} can't change any more. "
            f"{_begin_earlier(record, step=change.last_step, skips=f'data.{change.key}={change.now}')}"
        )


def _begin_earlier(record: RunRecord, *, step: int, skips: str) -> str:
    """Return what to type so that the new run begins early enough. skips: what is typed where no branch is needed."""
    if step > 0:
        return f"Use step={step}, or an earlier one."
    return f"To begin at the first step: python -m framework {path_argument('rerun', record.run)} {skips}"


def _without_rolled_back(request: Request, record: RunRecord) -> Request:
    """Return the request that leaves out the samples which the other run has left out since a rollback."""
    data = request.config.data
    rolled_back = set(rolled_back_steps(record.facts)).difference(data.skip_steps)
    if not rolled_back:
        return request
    if not rolled_back.isdisjoint(data.defer_steps):
        request = _with_steps(request, "defer_steps", set(data.defer_steps) - rolled_back)
    return _with_steps(request, "skip_steps", rolled_back.union(data.skip_steps))


def _skipping(request: Request, record: RunRecord) -> Request:
    """Return the request with the steps of `skip` in the section `data`. Raises ConfigError for a wrong step."""
    config = request.config
    if not config.skip:
        return request
    step = int(config.step or 0)
    last = last_step(record)
    if max(config.skip) > last:
        raise ConfigError(
            f"skip={show(list(config.skip))}: {record.run} has made {last} steps, as far as its records show, and "
            "these are steps of it. data.skip_steps takes steps that nobody has made yet."
        )
    first = min(config.skip)
    if first <= step:
        raise ConfigError(
            f"skip={show(list(config.skip))}: step {first} isn't after step={step}, from which the new run continues. "
            f"{_begin_earlier(record, step=first - 1, skips=f'data.skip_steps=[{first}]')}"
        )
    if config.data.defer_steps and min(config.data.defer_steps) <= max(config.skip):
        raise ConfigError(
            f"skip={show(list(config.skip))}: the run has deferred samples of other steps, so its steps have other "
            "numbers. Type data.skip_steps=[…], with the numbers that the steps would have if none was skipped."
        )

    passed = set(config.data.skip_steps)
    numbers = [number_of_step(number, step=0, skipped=0, passed=passed) for number in config.skip]
    if config.branch.skipped == "never":
        return _with_steps(request, "skip_steps", {*config.data.skip_steps, *numbers})
    return _with_steps(request, "defer_steps", {*config.data.defer_steps, *numbers})


def _with_steps(request: Request, key: str, numbers: Collection[int]) -> Request:
    """Return the request with a list of steps in the section `data`, as if it was typed."""
    steps = sorted(numbers)
    raw = {**request.raw, "data": {**request.raw["data"], key: steps}}
    typed = f"data.{key}=[{','.join(map(str, steps))}]"
    overrides = merge_overrides(request.overrides, [typed])
    return replace(request, raw=raw, config=parse(raw), overrides=tuple(overrides))


def _changed_keys(request: Request, run_dir: RunDir, *, step: int) -> dict[str, list[Any]]:
    """Return the values before and now of each key that is another one than in the run, secrets masked."""
    before = flatten(Secrets(segment_at(run_dir, step + 1).config).masked_config())
    now = flatten(Secrets(request.raw).masked_config())
    changed = {}
    for key in before | now:
        is_setting = key.split(".")[0] not in _OF_COMMAND
        if is_setting and key in now and not is_equal(before.get(key), now[key]):
            changed[key] = [before.get(key), now[key]]
    return changed


def _headline(record: RunRecord, *, step: int, changed: Mapping[str, list[Any]]) -> str:
    lines = [f"Branching off {record.run} after step {step:,}"]
    for key, (before, now) in changed.items():
        lines.append(f"  {key}={show(now)} (it was {show(before)})")
    return "\n".join(lines)


def _make_first_checkpoint(request: Request, record: RunRecord, start: Start, run_dir: RunDir, *, step: int) -> int:
    """Put a checkpoint of the step into the new run's directory. Return the exit status of the steps that it takes."""
    checkpoint = start.checkpoint
    if start.step < step:
        in_force = segment_at(record.run_dir, step).config
        raw = {**in_force, "objects": objects_of(record.run_dir, in_force) or None}
        unchanged = replace(request, raw=raw, config=replace(parse(raw), run=request.config.run, step=step))
        folder = run_dir.path / _REPEATED / "training"
        result = replay(unchanged, start, until=step, callbacks={}, folder=folder, saves=True)
        if result.status != 0 or result.run_dir is None:
            return result.status
        checkpoint = result.run_dir.checkpoints / step_name(step)
    assert checkpoint is not None

    _copy_checkpoint(checkpoint, run_dir.checkpoints / step_name(step))
    shutil.rmtree(run_dir.path / _REPEATED, ignore_errors=True)
    LocalStorage(run_dir.checkpoints).point(LAST, step_name(step))
    return 0


def _copy_checkpoint(source: Path, target: Path) -> None:
    """Copy a checkpoint, which nobody ever changes: by hard links if both are on one disk, which takes no space.

    Raises ConfigError if the other run has deleted it meanwhile.
    """
    shutil.copytree(source, target, copy_function=_link_or_copy)
    fault = find_damage(target)
    if fault is not None:
        raise ConfigError(f"The checkpoint {display_path(source)} can't be copied: {fault}. Type the command again.")


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _training(request: Request, run_dir: RunDir, branch_of: Mapping[str, Any]) -> Request:
    """Return the request of the new run: a training that is resumed in its directory."""
    raw = dict(request.raw)
    raw |= {"job": "train", "run": None, "step": None, "rank": None, "rerun": None, "resume": str(run_dir.path)}
    raw |= {"skip": [], "branch": asdict(BranchConfig())}
    return replace(
        request,
        config=parse(raw),
        raw=raw,
        overrides=tuple(text for text in request.overrides if key_of(text).split(".")[0] not in _OF_COMMAND),
        own_dir=run_dir.path,
        branch_of=branch_of,
    )

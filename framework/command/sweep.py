"""A sweep (-m): its trials are composed, checked and written to disk, then a worker runs them; a table closes it.

A sweep that is on disk is continued: what has finished is skipped, what was interrupted is resumed, and new values add
trials. `run_sweep` does both.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from framework.checkpoint.layout import BEST
from framework.command.document import sweep_document
from framework.command.job import check_request, load_job
from framework.command.mirroring import make_local_outputs, mirroring
from framework.command.models import model_override
from framework.command.request import JobResult, Request
from framework.command.resume import started_from
from framework.command.saved_sweep import SavedSweep
from framework.command.slots import Slot, make_slots
from framework.command.sweep_plan import plan_sweep, sweep_plan_text
from framework.command.sweep_results import ResultsFile, print_results, results_document
from framework.command.trials import PRUNED, GridTrials, SearchTrials, Trials, needs_work
from framework.command.words import is_of_sweeps
from framework.command.worker import Worker
from framework.config.hydra_compose import current_hydra, is_interval, is_swept
from framework.config.parse import parse
from framework.config.saved import (
    is_run,
    key_of,
    load_checkpoint,
    load_saved,
    merge_overrides,
    path_argument,
)
from framework.config.schema import Config, JobName, Node, SubmitConfig, SweepConfig
from framework.errors import EXIT_STOPPED, ConfigError, RunError
from framework.launch.external_ranks import ExternalRanks
from framework.launch.fork_server import ForkServer
from framework.sweeps.claims import Claims
from framework.sweeps.folder import (
    SearchPlan,
    SweepFolder,
    SweepPlan,
    Trial,
    config_hash,
    hidden_differences,
    idle_differences,
)
from framework.sweeps.ranking import best_trial, ranked_rows
from framework.sweeps.results import FINISHED, read_results
from framework.sweeps.search import OptunaSearch, SearchSettings
from framework.sweeps.space import Space, split_space
from framework.system.formatting import display_path, format_count
from framework.system.output import answer
from framework.system.run_dir import RunDir, create_run_dir, is_locked, read_object

# What a worker claims to evaluate the best trial.
_TEST = "test"
# How long the processes of a worker that was killed may take to end.
_LEAVE_S = 15.0


def check_sweep(settings: DictConfig, *, external_ranks: ExternalRanks | None) -> None:
    """Raise ConfigError for a sweep that can't be run here. settings: Hydra's section of the configuration."""
    if external_ranks is not None:
        raise ConfigError(
            f"-m makes several runs, and {external_ranks.cluster.starter} has started these processes for one.\n"
            "Leave -m out, or type launcher=local and start the command once."
        )
    launcher = settings.runtime.choices["hydra/launcher"]
    # Others pickle jobs for machines of their own.
    if not settings.launcher._target_.endswith(".BasicLauncher"):
        raise ConfigError(
            f"hydra/launcher={launcher} can't be used: a sweep starts its trials itself. Leave it out; sweep.jobs=N "
            "runs N trials at a time, and sweep.worker=SWEEP on another machine helps with them."
        )
    sweeper = settings.runtime.choices["hydra/sweeper"]
    if not settings.sweeper._target_.endswith(".BasicSweeper"):
        raise ConfigError(
            f"hydra/sweeper={sweeper} can't be used: a sweep is a grid, or a search by Optuna. Type sweep=optuna "
            "sweep.n_trials=40 instead."
        )


# What is to be run


@dataclass(frozen=True)
class SweepRequest:
    """What a command asks of a sweep."""

    # What all trials have in common.
    common: Config
    # With values to sweep over.
    overrides: Sequence[str]
    # Returns the overrides of each trial, given some with several values. Raises ConfigError for what is no value.
    combine: Callable[[Sequence[str]], list[list[str]]]
    # Composes and checks a trial for each list of overrides.
    compose_trials: Callable[[Sequence[Sequence[str]]], list[Request]]
    # The sweep on disk that the command continues; None: it begins one.
    saved: SavedSweep | None
    # What is typed apart from which sweep it is, by which a sweep that is continued may change.
    changes: tuple[str, ...]
    # What is typed, and for a sweep that is continued, what was typed before.
    typed: tuple[str, ...]
    # The arguments of the command.
    arguments: tuple[str, ...]
    search_path: tuple[str, ...]
    fork_server: ForkServer | None
    # True: the answer is one JSON document.
    as_json: bool
    # How its workers are submitted to a cluster; None: the command is a worker itself.
    submit: SubmitConfig | None
    # The flags that its workers are started with, such as `--config-dir=FOLDER`.
    flags: tuple[str, ...]

    @property
    def settings(self) -> SweepConfig:
        return self.common.sweep

    @property
    def adds_trials(self) -> bool:
        """Return True if what is typed may add trials to the sweep that is continued."""
        return any(not is_of_sweeps(text) for text in self.changes)


def run_sweep(sweep: SweepRequest) -> JobResult:
    """Plan the trials, run those that are left, print the table; return the exit status of the command.

    Raises FrameworkError for a mistake in any trial, before the first one starts.
    """
    _refuse_swept_settings(sweep)
    _check_over(sweep)
    if sweep.settings.sampler is not None:
        return _search(sweep, sweep.settings.sampler)
    if sweep.saved is not None and sweep.saved.plan.search is not None:
        raise ConfigError(
            f"{display_path(sweep.saved.folder.path)} is a search. Leave out sweep=grid and sweep.sampler to continue "
            "it."
        )
    if sweep.settings.n_trials is not None:
        raise ConfigError(
            f"sweep.n_trials={sweep.settings.n_trials} is for a search, and this is a grid. Type sweep=optuna, or "
            "leave it out."
        )
    combinations: list[list[str]] = []
    if sweep.saved is None or sweep.adds_trials:
        combinations = sweep.combine(sweep.overrides)
    requests = sweep.compose_trials(combinations)
    if not requests and (sweep.saved is None or sweep.common.job == "plan"):
        raise ConfigError("The sweep has no trials: one of its ranges is empty.")
    _check_told_apart(requests)
    if sweep.common.job == "plan":
        planned = plan_sweep(requests, sweep.settings)
        if not sweep.as_json:
            answer(sweep_plan_text(requests, planned))
        return JobResult(0, results=_document(sweep, status=0, folder=None, results=planned.document(requests)))

    left = _left_of(sweep, known={config_hash(request.raw) for request in requests})
    runnable = [*requests, *left]
    _check_outputs(runnable)
    if sweep.submit is not None:
        return _submit_workers(sweep, sweep.submit, runnable, begin=lambda: _written(sweep, requests)[0])
    slots = _slots(sweep, runnable, count=len(runnable))
    folder, plan = _written(sweep, requests)
    return _run_grid(sweep, folder, plan, requests=runnable, slots=slots)


def _document(
    sweep: SweepRequest, *, status: int, folder: SweepFolder | None, results: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what `format=json` prints."""
    return sweep_document(
        job=sweep.common.job,
        recipe=sweep.common.recipe,
        status=status,
        sweep=None if folder is None else folder.path,
        results=results,
    )


def _refuse_swept_settings(sweep: SweepRequest) -> None:
    for text in sweep.overrides:
        if is_of_sweeps(text) and is_swept(text):
            raise ConfigError(f"{text}: settings of the sweep itself can't be swept over. Give it one value.")


def _check_over(sweep: SweepRequest) -> None:
    """Raise ConfigError if `sweep.over` is typed and names keys that the sweep has one value of."""
    typed = [text for text in sweep.changes if key_of(text) == "sweep.over"]
    if not typed:
        return
    if sweep.saved is not None:
        before = sweep.saved.plan.over
        if sweep.settings.over != before:
            raise ConfigError(f"{typed[-1]}: the sweep began with sweep.over=[{','.join(before)}]. Leave it out.")
        return
    swept = {key_of(text) for text in sweep.overrides if is_swept(text)}
    for key in sweep.settings.over:
        if key not in swept:
            raise ConfigError(
                f"{typed[-1]}: {key} has one value in all trials, so there is nothing to average over. Type several "
                f"values, such as {key}=1,2,3, or leave it out."
            )


def _check_told_apart(requests: Sequence[Request]) -> None:
    """Raise ConfigError for trials that would be one: they differ only in what is masked, or in what runs nothing."""
    by_hash: dict[str, Request] = {}
    for request in requests:
        first = by_hash.setdefault(config_hash(request.raw), request)
        if first is request:
            continue
        keys = hidden_differences(first.raw, request.raw)
        if keys:
            raise ConfigError(
                f"Trials differ only in {', '.join(keys)}, whose values are hidden as passwords or tokens in every "
                "table and file, so the trials couldn't be told apart. Give it one value, or another name."
            )
        keys = idle_differences(first.raw, request.raw)
        if keys:
            raise ConfigError(
                f"Trials differ only in {', '.join(keys)}, which changes nothing that a trial computes, so they would "
                "be one trial. Give it one value."
            )


def _left_of(sweep: SweepRequest, *, known: set[str]) -> list[Request]:
    """Return the requests of the saved sweep's unfinished trials, apart from those with a known hash.

    Raises ConfigError if a trial would be another one today. If trials are added, finished ones count: they are
    compared.
    """
    if sweep.saved is None:
        return []
    folder = sweep.saved.folder
    trials = [trial for trial in sweep.saved.plan.trials if trial.config_hash not in known]
    retries_failed = sweep.settings.retry == "failed"
    left = set()
    for trial, result in zip(trials, read_results(folder, trials), strict=True):
        if needs_work(result, retries_failed=retries_failed):
            left.add(trial.number)
    if not (sweep.adds_trials and load_job(sweep.saved.plan.job).trains):
        trials = [trial for trial in trials if trial.number in left]
    requests = sweep.compose_trials([trial.overrides for trial in trials])
    for trial, request in zip(trials, requests, strict=True):
        _check_unchanged(trial, request, folder=folder)
    return [request for trial, request in zip(trials, requests, strict=True) if trial.number in left]


def _check_unchanged(trial: Trial, request: Request, *, folder: SweepFolder, typed: Sequence[str] = ()) -> None:
    """Raise ConfigError if a trial would be another one today.

    Args:
        request: what composes now for it.
        typed: what is typed now that could be the reason.
    """
    if config_hash(request.raw) == trial.config_hash:
        return
    reason = "a recipe, or another file that it is composed of, has changed.\nRestore it, or start a new sweep."
    if typed:
        reason = f"{' '.join(typed)} changes it, or a file has changed.\nLeave it out, or start a new sweep."
    raise ConfigError(
        f"Trial {trial.number} of {display_path(folder.path)} would have another configuration today than when the "
        f"sweep began: {reason}"
    )


def _check_outputs(requests: Sequence[Request]) -> None:
    """Raise ConfigError if trials would write to the same file."""
    outputs = [request.config.predict.output for request in requests if request.config.job == "predict"]
    if len(set(outputs)) < len(outputs):
        raise ConfigError(f"predict.output={outputs[0]} is that of several trials. Give each its own.")


def _written(sweep: SweepRequest, requests: Sequence[Request]) -> tuple[SweepFolder, SweepPlan]:
    """Write the sweep to disk, or add its new trials there; return it."""
    trials: dict[str, Trial] = {}
    for request in requests:
        key = config_hash(request.raw)
        trials.setdefault(key, Trial(len(trials), _overrides_alone(request), key))
    if sweep.saved is None:
        return _created(sweep, requests, trials=tuple(trials.values()), search=None)
    folder = sweep.saved.folder
    folder.add_trials(list(trials.values()))
    modes = {request.config.checkpoint.mode for request in requests}
    before = sweep.saved.plan
    if requests and (_monitor_of(requests) != before.monitor or modes != {before.mode}):
        folder.update(lambda plan: replace(plan, monitor=None))
    return folder, SweepPlan.read_with_secrets(folder)


def _overrides_alone(request: Request) -> tuple[str, ...]:
    """Return the overrides that would run a trial alone, with the checkpoint that it is to use, if any."""
    path = request.config.checkpoint.path
    if path is None:
        return request.overrides
    return (model_override(display_path(Path(path))), *request.overrides)


def _monitor_of(requests: Sequence[Request]) -> str | None:
    """Return the metric that trials are compared by; None if it isn't the same one in all of them."""
    checkpoints = [request.config.checkpoint for request in requests]
    if len({(checkpoint.monitor, checkpoint.mode) for checkpoint in checkpoints}) > 1:
        return None
    return checkpoints[0].monitor


def _created(
    sweep: SweepRequest, requests: Sequence[Request], *, trials: tuple[Trial, ...], search: SearchPlan | None
) -> tuple[SweepFolder, SweepPlan]:
    """Make the folder of a new sweep, with its plan; return it. requests: those of its first trials, at least one."""
    first = requests[0]
    assert first.sub_run is not None
    folder = SweepFolder(first.sub_run.parent)
    plan = SweepPlan(
        created=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        arguments=sweep.arguments,
        overrides=sweep.typed,
        search_path=sweep.search_path,
        job=sweep.common.job,
        recipe=sweep.common.recipe,
        monitor=_monitor_of(requests),
        mode=first.config.checkpoint.mode,
        over=sweep.settings.over,
        search=search,
        trials=trials,
    )
    create_run_dir(folder.path.parent, name=folder.path.name)
    plan.write(folder)
    return folder, plan


# Submitting its workers


def _submit_workers(
    sweep: SweepRequest, settings: SubmitConfig, requests: Sequence[Request], *, begin: Callable[[], SweepFolder]
) -> JobResult:
    """Submit workers of the sweep, which is begun unless the job is only printed.

    Args:
        requests: of trials that are left, by the first of which machines are chosen.
        begin: writes the sweep to disk.
    """
    if not requests:
        raise ConfigError("No trial of the sweep is left, so there is nothing to submit.")
    job = load_job("submit")
    first = requests[0]
    config = replace(first.config, job=JobName("submit"), submit=settings, sweep=sweep.settings)
    # The name of a sweep that isn't begun yet.
    arguments = (*sweep.flags, "sweep.worker=SWEEP")
    request = replace(first, config=config, arguments=arguments, sub_run=None, as_json=sweep.as_json)
    check_request(request)
    if settings.dry_run:
        result = job.run(request)
        return replace(result, results=_document(sweep, status=0, folder=None, results=result.results))
    job.check(request)
    folder = begin()
    worker = shlex.split(path_argument("sweep.worker", display_path(folder.path)))
    print(f"The sweep is in {display_path(folder.path)}", flush=True)
    try:
        result = job.run(replace(request, arguments=(*sweep.flags, *worker)))
    except RunError as error:
        again = path_argument("resume", display_path(folder.path))
        raise RunError(f"{error}\nThe sweep has begun. Submit its workers: -m {again} job=submit …") from error
    return replace(result, results=_document(sweep, status=0, folder=folder, results=result.results))


# A search


def _search(sweep: SweepRequest, sampler: Node) -> JobResult:
    """Run a search, a new one or one that is continued."""
    over = _swept_over(sweep.overrides, keys=sweep.settings.over)
    for text in over:
        if is_interval(text):
            raise ConfigError(
                f"{text}: each choice of the search is run with all values of the keys in sweep.over, and an interval "
                f"can't be listed. Type values, such as {key_of(text)}=1,2,3, or leave the key out of sweep.over."
            )
    others = [text for text in sweep.overrides if text not in over and not key_of(text).startswith("hydra")]
    fixed, space = split_space(others, loader=current_hydra().config_loader)
    blocks = sweep.combine(over) if over else [[]]
    settings = _search_settings(sweep, space, sampler=sampler)
    settings.check()

    def compose(chosen: Sequence[str]) -> list[Request]:
        return sweep.compose_trials([[*fixed, *chosen, *block] for block in blocks])

    candidates = []
    for chosen in space.samples():
        candidates += compose(chosen)
    _check_told_apart(candidates)
    if _monitor_of(candidates) is None:
        raise ConfigError(
            "A search compares its trials by checkpoint.monitor and checkpoint.mode, which aren't the same in all of "
            "them. Type one value of each."
        )
    if sweep.common.job == "plan":
        raise ConfigError("job=plan shows the trials of a grid, and those of a search aren't known before they run.")

    def begin() -> tuple[SweepFolder, SweepPlan, OptunaSearch]:
        if sweep.saved is None:
            folder, plan = _created(sweep, candidates, trials=(), search=settings.plan())
            return folder, plan, OptunaSearch(settings, folder)
        folder = sweep.saved.folder
        search = OptunaSearch(settings, folder)
        search.check_total()
        _check_search_unchanged(sweep, sweep.saved.plan, fixed=fixed, space=space, folder=folder)
        plan = folder.update(lambda saved: _with_settings(saved, settings, changes=sweep.changes))
        return folder, plan, search

    if sweep.submit is not None:
        return _submit_workers(sweep, sweep.submit, candidates, begin=lambda: begin()[0])
    count = settings.n_trials * len(blocks)
    slots = _slots(sweep, candidates[: len(blocks)], count=count)
    folder, plan, search = begin()
    claims = _claims_of(folder)
    reopened = search.reopen_failed() if sweep.settings.retry == "failed" else frozenset()
    trials = SearchTrials(
        folder, search, claims=claims, compose=compose, retries=sweep.settings.retries, reopened=reopened
    )
    print(f"A search of {format_count(count, 'trial')} in {display_path(folder.path)}{_at_a_time(slots)}", flush=True)
    return _run(
        sweep, folder, plan, trials=trials, claims=claims, slots=slots, requests=trials.requests, common=set(fixed)
    )


def _check_search_unchanged(
    sweep: SweepRequest, plan: SweepPlan, *, fixed: Sequence[str], space: Space, folder: SweepFolder
) -> None:
    """Raise ConfigError if trials to come can't be compared with those that the search has had.

    Args:
        plan: that of the search so far.
        fixed: the overrides that all trials to come have.
    """
    over_before = _swept_over(plan.overrides, keys=plan.over)
    over = _swept_over(sweep.typed, keys=plan.over)
    if over != over_before:
        raise ConfigError(
            f"The search has compared {_compared(over_before)} so far, and not {_compared(over)}. Type the same to "
            "continue it, or start another sweep."
        )
    drawn = {*map(key_of, over), *map(key_of, space.dimensions)}
    typed = [text for text in sweep.changes if not is_of_sweeps(text) and text not in plan.overrides]
    # All of its trials have the same overrides apart from these.
    for trial in plan.trials[:1]:
        own = [text for text in trial.overrides if key_of(text) in drawn]
        (request,) = sweep.compose_trials([[*fixed, *own]])
        _check_unchanged(trial, request, folder=folder, typed=typed)


def _swept_over(overrides: Sequence[str], *, keys: Collection[str]) -> list[str]:
    """Return the overrides with several values for these keys."""
    return [text for text in overrides if key_of(text) in keys and is_swept(text)]


def _compared(over: Sequence[str]) -> str:
    return f"means over {' '.join(over)}" if over else "single trials"


def _with_settings(plan: SweepPlan, settings: SearchSettings, *, changes: Sequence[str]) -> SweepPlan:
    """Return the plan of a search that is continued with these settings, its total changed only if one is typed."""
    search = settings.plan()
    total = [text for text in changes if key_of(text) == "sweep.n_trials"]
    if not total and plan.search is not None:
        # Another command may have changed it since this one began.
        search = replace(search, n_trials=plan.search.n_trials)
    return replace(plan, search=search, overrides=tuple(merge_overrides(plan.overrides, total)))


def _search_settings(sweep: SweepRequest, space: Space, *, sampler: Node) -> SearchSettings:
    """Return what the search is to do. Raises ConfigError if that isn't said, or can't be compared."""
    checkpoint = sweep.common.checkpoint
    n_trials = sweep.settings.n_trials
    if n_trials is None:
        raise ConfigError("A search needs sweep.n_trials=N, the number of its trials.")
    if checkpoint.monitor is None:
        raise ConfigError(
            "A search compares its trials by checkpoint.monitor: set it to a metric of the validation, and "
            "checkpoint.mode to min or max."
        )
    for dimension in space.dimensions:
        if dimension.lstrip("+") in ("checkpoint.monitor", "checkpoint.mode", "job"):
            raise ConfigError(f"{dimension} must be the same in all trials of a search. Give it one value.")
    return SearchSettings(
        space=space,
        sampler=sampler,
        pruner=sweep.settings.pruner,
        n_trials=n_trials,
        mode=checkpoint.mode,
        seed=sweep.common.seed,
    )


# Running


def _run_grid(
    sweep: SweepRequest, folder: SweepFolder, plan: SweepPlan, *, requests: Sequence[Request], slots: Sequence[Slot]
) -> JobResult:
    """Run the trials of a grid that are left. requests: of those that may be run."""
    settings = sweep.settings
    by_hash = {config_hash(request.raw): request for request in requests}
    by_number = {trial.number: by_hash[trial.config_hash] for trial in plan.trials if trial.config_hash in by_hash}
    claims = _claims_of(folder)
    # Another command may have added trials meanwhile, and runs them itself.
    own = [trial for trial in plan.trials if trial.number in by_number]
    trials = GridTrials(folder, own, claims=claims, retries=settings.retries, retries_failed=settings.retry == "failed")
    count = format_count(len(plan.trials), "trial")
    if trials.num_left < len(plan.trials):
        count = f"{trials.num_left} of {count}"
    print(f"{count} in {display_path(folder.path)}{_at_a_time(slots)}", flush=True)
    common: set[str] = set()
    if len(plan.trials) > 1:
        common = set.intersection(*(set(trial.overrides) for trial in plan.trials))
    return _run(sweep, folder, plan, trials=trials, claims=claims, slots=slots, requests=by_number, common=common)


def _slots(sweep: SweepRequest, requests: Sequence[Request], *, count: int) -> list[Slot]:
    """Return the places for `count` trials such as these; none if there are no requests."""
    if not requests:
        return []
    topologies = [request.placement.topology for request in requests]
    return make_slots(topologies, count=count, jobs=sweep.settings.jobs, share_gpus=sweep.settings.share_gpus)


def _at_a_time(slots: Sequence[Slot]) -> str:
    return f", {len(slots)} at a time" if len(slots) > 1 else ""


def _claims_of(folder: SweepFolder) -> Claims:
    return Claims(folder.claims, f"process {os.getpid()} on {socket.gethostname()}")


def _run(
    sweep: SweepRequest,
    folder: SweepFolder,
    plan: SweepPlan,
    *,
    trials: Trials,
    claims: Claims,
    slots: Sequence[Slot],
    requests: Mapping[int, Request],
    common: Collection[str],
) -> JobResult:
    """Run trials and print the table.

    Args:
        requests: of the trials, by number.
        common: the overrides that all trials have.
    """
    # It imports rich and NumPy.
    from framework.command.trials_view import TrialsView

    settings = sweep.settings
    results = read_results(folder, plan.trials)
    view = TrialsView(
        folder,
        monitor=plan.monitor,
        mode=plan.mode,
        progress=sweep.common.trainer.progress,
        common=common,
        results=[result for result in results if result.status in ("finished", PRUNED)],
    )
    skips_test = settings.test != "all"
    worker = Worker(
        folder,
        trials,
        request_of=lambda trial: _started(folder, requests[trial.number], trial, skips_test=skips_test),
        slots=slots,
        claims=claims,
        view=view,
        after_trial=ResultsFile(folder).write_if_due,
        fail_fast=settings.fail_fast,
    )
    make_local_outputs(sweep.common)
    with mirroring(folder.path):
        try:
            status = worker.run(sweep.fork_server)
        finally:
            view.close()
            print_results(folder, SweepPlan.read(folder))
        tests_best = status != EXIT_STOPPED and settings.test == "best" and load_job(plan.job).trains
        # One of several workers does it.
        if tests_best and claims.take(_TEST) is not None:
            try:
                status = _test_best(sweep, folder, SweepPlan.read(folder)) or status
            finally:
                claims.release(_TEST)
    document = None
    if sweep.as_json:
        content = results_document(folder, SweepPlan.read(folder))
        document = _document(sweep, status=status, folder=folder, results=content)
    return JobResult(status, results=document)


def _started(folder: SweepFolder, request: Request, trial: Trial, *, skips_test: bool) -> Request:
    """Return what the trial's process runs: a new run, or the one that was begun before, which is resumed.

    Raises FrameworkError if what was begun is damaged.
    """
    run_dir = folder.trial(trial.number)
    request = replace(request, sub_run=run_dir.path, skips_test=skips_test)
    if not run_dir.path.exists():
        return request
    _wait_until_left(run_dir)
    if not is_run(run_dir.path):
        # The trial was killed before it had saved its configuration, so there is nothing to resume.
        shutil.rmtree(run_dir.path)
        return request
    saved_run = load_saved(run_dir.path)
    raw = started_from(saved_run, saved_run.raw)
    return replace(request, config=parse(raw), raw=raw)


def _wait_until_left(run_dir: RunDir) -> None:
    """Wait until the processes of a worker that was killed have left a trial, which takes them a moment."""
    deadline = time.monotonic() + _LEAVE_S
    while is_locked(run_dir) and time.monotonic() < deadline:
        time.sleep(0.1)


def _test_best(sweep: SweepRequest, folder: SweepFolder, plan: SweepPlan) -> int:
    """Evaluate the best trial's best checkpoint on the test part, unless that was done; return the exit status.

    Only the best one, so that nothing is chosen by the test part.
    """
    results = read_results(folder, plan.trials)
    best = best_trial(ranked_rows(results, over=plan.over, monitor=plan.monitor, mode=plan.mode), mode=plan.mode)
    if best is None:
        return 0
    run_dir = folder.trial(best.number)
    checkpoint = run_dir.checkpoints / BEST
    is_untested = run_dir.read_run().get("results", {}).get("untested")
    if not is_untested or not checkpoint.exists() or _is_evaluated(run_dir):
        return 0
    found = load_checkpoint(checkpoint.resolve())
    raw = started_from(found, {**found.raw, "job": "eval"})
    raw["eval"] = {**found.raw["eval"], "part": "test"}
    request = Request(
        config=parse(raw),
        raw=raw,
        overrides=found.overrides,
        arguments=("job=eval", "eval.part=test", path_argument("checkpoint.path", display_path(checkpoint))),
        fork_server=sweep.fork_server,
        parent_run=run_dir.path,
    )
    print(flush=True)
    return load_job("eval").run(request).status


def _is_evaluated(run_dir: RunDir) -> bool:
    """Return True if a checkpoint of the run was evaluated to the end."""
    for place in (run_dir.path / "eval").glob("*"):
        record = read_object(RunDir(place).run_file) or {}
        if record.get("status") == FINISHED:
            return True
    return False

"""Run a job's ranks: make the run directory, write `run.json`, launch, print the failure report or the results."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from framework.command.launcher import Placement
from framework.command.messages import (
    interrupted_message,
    makes_profile,
    rerun_message,
    start_message,
    stopped_message,
    unused_variables,
)
from framework.command.mirroring import make_local_outputs, mirroring
from framework.command.request import JobResult, Request
from framework.config.find_run import is_run, run_of
from framework.config.schema import Config
from framework.errors import (
    EXIT_STOPPED,
    EXIT_WRONG_REQUEST,
    FrameworkError,
    LaunchError,
    RequestError,
    StoppedBySignalError,
)
from framework.launch.base import Part
from framework.launch.cluster_environment import split_endpoint
from framework.launch.fork_server import call_in_child
from framework.launch.plan import LaunchPlan, NodeSetup, Outcome
from framework.launch.run_spec import RunSpec, make_visible
from framework.monitoring.node_monitor import Limits
from framework.monitoring.report import FailureReport, add_forecast, render
from framework.remote.place import RemotePlace, note_trained_here, outputs_folder
from framework.runs.record import RunStart, record_end, record_start
from framework.system.files import read_bytes
from framework.system.formatting import display_path
from framework.system.run_dir import (
    RunDir,
    check_no_way_out,
    check_regular_files,
    locked,
    new_run_dir,
    write_atomically,
)
from framework.system.shown_text import shown

_STATUS = {0: "finished", EXIT_STOPPED: "stopped"}
_FORECAST_S = 60.0
# In the run directory itself.
_RECORDS = ("*.json", "*.yaml")


def run_ranks(
    request: Request,
    *,
    entry: str,
    title: str,
    prepare: Callable[[RunDir], None],
    text: Callable[[RunDir, int], str],
    trains: bool,
    forecast: str | None = None,
    forecast_step: str | None = None,
) -> JobResult:
    """Run `entry` ("module:function") on every rank, in a run directory. No rank survives this call.

    A refused request leaves no new run directory, even if only the ranks can see what is wrong. Raises FrameworkError
    for a request that can't be met, KeyboardInterrupt on Ctrl-C.

    Args:
        title: the first word of the first line, such as "Training".
        prepare: called before the ranks start.
        text: returns the last lines, given the run directory and the exit status.
        trains: True: it is a training run, which can be resumed.
        forecast: "module:function", called after a rank ran out of memory; see `plan.forecast`.
        forecast_step: "module:function", called after a profiled training; see `plan.estimate`.
    """
    placement = request.placement
    setup = _node_setup(request, placement, trains=trains)
    with placement.launcher.join(setup) as part:
        if part.spec is not None:
            return _follow(request, setup, part, part.spec)

        with (
            _run_dir(request, trains=trains) as run_dir,
            locked(run_dir),
            _mirroring(request, run_dir),
            _records_kept_if_refused(run_dir),
        ):
            note_trained_here(run_dir)
            record_start(run_dir, _run_start(request))
            if request.config.rerun is not None and request.config.resume is None:
                print(shown(rerun_message(Path(request.config.rerun), run_dir)), file=sys.stderr, flush=True)

            is_quiet = _is_quiet(request, trains=trains)
            if not is_quiet:
                print(shown(start_message(title, request.config.recipe, placement.topology, run_dir)), flush=True)
                unused = unused_variables(os.environ, placement.topology)
                if unused and request.external_ranks is None:
                    print(shown(unused), file=sys.stderr, flush=True)

            plan = _launch_plan(request, setup, run_dir, entry=entry)

            def launch(plan: LaunchPlan) -> Outcome:
                prepare(run_dir)
                return part.launch(plan)

            outcome = _launch_recorded(launch, plan, trains=trains)
            if outcome.failure is not None and forecast is not None and not is_quiet:
                outcome = replace(outcome, failure=_with_forecast(outcome.failure, request, forecast))

            if forecast_step is not None and outcome.failure is None and not is_quiet:
                _add_forecast_of_step(run_dir, request, forecast_step)

            if outcome.error is not None and request.call is None and not isinstance(outcome.error, FrameworkError):
                # For a debugger, and with Python's own traceback.
                raise outcome.error
            if outcome.failure is not None and request.call is None:
                print(render(outcome.failure), file=sys.stderr, flush=True)
            if (
                outcome.status != EXIT_WRONG_REQUEST
                and not is_quiet
                and not outcome.stopped_early
                and is_run(run_dir.path)
            ):
                print(shown(text(run_dir, outcome.status)), flush=True)
            score = None
            # Unless the run directory was deleted or moved.
            if run_dir.run_file.exists():
                score = run_dir.read_run().get("results", {}).get("score")
            return JobResult(outcome.status, run_dir, score=score, failure=outcome.failure, error=outcome.error)


def _with_forecast(report: FailureReport, request: Request, entry: str) -> FailureReport:
    """Return the report with a forecast of the memory, if a rank ran out of it while training."""
    memory = report.first.memory
    # An evaluation is no step.
    if memory is None or report.first.phase == "evaluate":
        return report
    arguments = {
        "config": dict(request.raw),
        "topology": asdict(request.placement.topology),
        "backend": request.placement.backend,
        "capacity_bytes": memory["capacity_bytes"],
    }
    try:
        purpose = "forecast the memory"
        forecast = call_in_child(request.fork_server, entry, arguments, timeout_s=_FORECAST_S, purpose=purpose)
    except LaunchError:
        # The failure itself is still to be reported.
        forecast = {"note": f"There is no forecast: it took more than {_FORECAST_S:g} s."}
    except FrameworkError as error:
        forecast = {"note": f"There is no forecast: {error}"}
    return add_forecast(report, forecast)


def _add_forecast_of_step(run_dir: RunDir, request: Request, entry: str) -> None:
    """Add to the profile of this start the memory that `job=plan` forecasts, and the least time of a step."""
    if not makes_profile(request.config) or not run_dir.run_file.exists():
        return
    profile = run_dir.read_run().get("profile")
    topology = request.placement.topology
    # The objects of a call from Python are only here, and several nodes may be other machines than this one.
    if profile is None or request.call is not None or topology.nnodes > 1:
        return
    plan = {**request.raw.get("plan", {}), "device": "this", "measure": topology.gpus_per_node == 0}
    arguments = {
        "config": {**request.raw, "plan": plan},
        "topology": asdict(topology),
        "backend": request.placement.backend,
    }
    forecast: dict[str, Any] = {"least_step_s": None, "peak_bytes": None, "notes": []}
    try:
        purpose = "forecast a step"
        planned = call_in_child(request.fork_server, entry, arguments, timeout_s=_FORECAST_S, purpose=purpose)
        memory = planned["forecast"]
        forecast["notes"] += memory["notes"]
        if memory["memory"] is not None:
            forecast["peak_bytes"] = memory["memory"]["peak"]
        # Of this CPU.
        work = planned.get("time")
        if work is not None:
            forecast["notes"] += work["notes"]
            if work["compute_s"] is not None:
                forecast["least_step_s"] = work["compute_s"] + work["memory_s"]
    except LaunchError:
        # The measurement is still to be shown.
        forecast["notes"].append(f"There is no forecast: it took more than {_FORECAST_S:g} s.")
    except FrameworkError as error:
        forecast["notes"].append(f"There is no forecast: {error}")
    run_dir.update_run({"profile": {**profile, "forecast": forecast}})


def _mirroring(request: Request, run_dir: RunDir) -> AbstractContextManager[object]:
    """Return what mirrors the run to its URL, if it has one. The command of a sweep mirrors all of its trials."""
    if request.sub_run is not None:
        return nullcontext()
    return mirroring(run_dir.path)


def _is_quiet(request: Request, *, trains: bool) -> bool:
    """Return True if only the results are wanted: one run of a sweep, or what a call evaluates or predicts."""
    return request.sub_run is not None or (request.call is not None and not trains)


def _run_start(request: Request) -> RunStart:
    """Return what the run's record says of the request."""
    # Of a call from Python, the command is that of the script or notebook kernel.
    arguments: Sequence[str] = sys.argv
    objects = None
    if request.call is None:
        arguments = ["-m", "framework", *request.arguments]
    else:
        objects = request.call.objects
    return RunStart(
        raw=request.raw,
        overrides=request.overrides,
        search_path=request.search_path,
        arguments=arguments,
        topology=request.placement.topology,
        objects=objects,
        branch_of=request.branch_of,
    )


def _node_setup(request: Request, placement: Placement, *, trains: bool) -> NodeSetup:
    config = request.config
    endpoint = None
    if placement.topology.nnodes > 1 and config.topology.rdzv_endpoint is not None:
        endpoint = split_endpoint(config.topology.rdzv_endpoint)
    return NodeSetup(
        topology=placement.topology,
        limits=Limits(
            init_timeout_s=config.backend.init_timeout,
            timeout_s=config.backend.timeout,
            late_after_s=config.launcher.late_after,
        ),
        init_method=config.backend.init_method,
        fork_server=request.fork_server,
        terminal=request.sub_run is None,
        node=config.topology.node_rank,
        endpoint=endpoint,
        max_restarts=config.launcher.max_restarts,
        is_resumable=trains and config.checkpoint.enabled and not config.trainer.fast_dev_run,
        arguments=tuple(sys.argv[1:]),
        external_ranks=request.external_ranks,
        skips_test=request.skips_test,
        on_progress=request.on_progress,
    )


def _launch_plan(request: Request, setup: NodeSetup, run_dir: RunDir, *, entry: str) -> LaunchPlan:
    return LaunchPlan(
        **vars(setup),
        entry=entry,
        run_dir=run_dir,
        names=_preloaded(request.config),
    )


def _preloaded(config: Config) -> tuple[str, ...]:
    """Return what to import once before the ranks are forked, since each would need a second or more for it."""
    names = []
    strategy = config.strategy["_target_"]
    if strategy.startswith("framework."):
        names.append(strategy)
    if config.trainer.compile is not None:
        names.append("torch._dynamo")
    return tuple(names)


def _follow(request: Request, setup: NodeSetup, part: Part, spec: RunSpec) -> JobResult:
    """Run this node's ranks of a run whose records node 0 keeps."""
    run_dir = RunDir(Path(spec.run_dir))
    place = RemotePlace.of_run(run_dir.path, outputs=request.config.path.outputs)
    if place is not None:
        place.make_local()
    make_visible(run_dir, spec)
    print(f"Node {setup.node} of {setup.topology.nnodes} is part of the run\n{display_path(run_dir.path)}", flush=True)
    # On this node's disk, which node 0 may not see.
    own_files = [f"failure_node{setup.node}*.json"]
    for local_rank in range(setup.topology.procs_per_node):
        log = run_dir.rank_log(setup.topology.rank_of(setup.node, local_rank))
        own_files.append(log.relative_to(run_dir.path).as_posix())
    with mirroring(run_dir.path, only=own_files):
        outcome = part.launch(_launch_plan(request, setup, run_dir, entry=spec.entry))
    if outcome.failure is not None:
        print(render(outcome.failure), file=sys.stderr, flush=True)
    return JobResult(outcome.status, run_dir)


def _launch_recorded(launch: Callable[[LaunchPlan], Outcome], plan: LaunchPlan, *, trains: bool) -> Outcome:
    """Launch the ranks and record in `run.json` how the run went.

    Raises RequestError if a rank refused the request before the first step.
    """
    run_dir = plan.run_dir
    try:
        outcome = launch(plan)
    except StoppedBySignalError as stop:
        record_end(run_dir, status="stopped")
        print(shown(stopped_message(run_dir, by=str(stop), trains=trains)), file=sys.stderr, flush=True)
        return Outcome(EXIT_STOPPED, stopped_early=True)
    except KeyboardInterrupt:
        record_end(run_dir, status="interrupted")
        print(shown(interrupted_message(run_dir, trains=trains)), file=sys.stderr, flush=True)
        raise
    except BaseException:
        record_end(run_dir, status="failed")
        raise

    record_end(run_dir, status=_STATUS.get(outcome.status, "failed"), late=outcome.late)
    if outcome.failure is not None and _is_refusal(outcome.failure):
        text = render(outcome.failure)
        first = outcome.failure.first
        # On other machines, ranks may have found other files or packages.
        if plan.external_ranks is not None or plan.topology.nnodes > 1:
            text = f"Rank {first.rank} (node {first.node}): {text}"
        raise RequestError(text)
    return outcome


def _is_refusal(failure: FailureReport) -> bool:
    """Return True if a rank refused the request before any rank had made a step."""
    if failure.first.exit_status != EXIT_WRONG_REQUEST or failure.attempt > 0:
        return False
    return not any(rank_failure.step for rank_failure in (failure.first, *failure.others))


@contextmanager
def _records_kept_if_refused(run_dir: RunDir) -> Iterator[None]:
    """If the block raises RequestError, restore the configuration, run.json and failure reports.

    A refused resume isn't part of a run.
    """
    before = {file: _content(file) for file in _records(run_dir)}
    try:
        yield
    except RequestError:
        for file in _records(run_dir):
            if file not in before:
                file.unlink()
        for file, content in before.items():
            # One that has changed was written since, so it is text.
            if content is not None and _content(file) != content:
                write_atomically(file, content.decode(), is_private=file == run_dir.secrets_file)
        raise


def _records(run_dir: RunDir) -> list[Path]:
    files: list[Path] = []
    for pattern in _RECORDS:
        files += run_dir.path.glob(pattern)
    return files


def _content(file: Path) -> bytes | None:
    """Return the content of a record; None for what can't be one."""
    try:
        return read_bytes(file)
    except OSError:
        return None


def _run_dir(request: Request, *, trains: bool) -> AbstractContextManager[RunDir]:
    """Return the run to resume, or a new one: below the recipe, and unless it is a training, below the job's name."""
    config = request.config
    if request.own_dir is not None:
        return nullcontext(RunDir(request.own_dir))
    if config.resume is not None:
        run_dir = run_of(config.resume)
        check_no_way_out(run_dir)
        check_regular_files(run_dir)
        return nullcontext(run_dir)

    make_local_outputs(config)
    if request.parent_run is not None:
        check_no_way_out(RunDir(request.parent_run))
    if request.sub_run is not None:
        return new_run_dir(request.sub_run.parent, name=request.sub_run.name)
    parent = request.parent_run or outputs_folder(config.path) / config.recipe
    if not trains:
        parent /= config.job
    return new_run_dir(parent)

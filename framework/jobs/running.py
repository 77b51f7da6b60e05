"""What every job that starts ranks does around them: directory, records, launcher, report."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.config.saved import keep_before, put_back, run_of, save_config
from framework.config.schema import Config
from framework.errors import EXIT_STOPPED, EXIT_WRONG_REQUEST, RequestError, RunError
from framework.jobs.choosing import checked_topology, chosen_launcher
from framework.jobs.nodes import limits, nodes_together
from framework.jobs.record import record_end, record_start
from framework.jobs.request import JobResult, Request
from framework.jobs.summary import announcement, short
from framework.launch.elastic import Company
from framework.launch.offer import Offer, make_visible
from framework.launch.panel import render
from framework.launch.plan import LaunchPlan, Outcome
from framework.launch.report import FailureReport
from framework.run_dir import RunDir, locked, new_run_dir
from framework.topology import Topology

_STATUS = {0: "finished", EXIT_STOPPED: "stopped"}


@dataclass(frozen=True)
class Words:
    """What a job says: `doing` begins its first line, `closing` makes its last ones, given the exit status;
    `interrupted` those of Ctrl-C.
    """

    doing: str
    closing: Callable[[Config, RunDir, int], str]
    interrupted: Callable[[RunDir], str]


def check(request: Request) -> Topology:
    """What can be found wrong before anything is made, beyond the configuration itself. Raises FrameworkError."""
    return checked_topology(request)


def run(request: Request, *, entry: str, words: Words) -> JobResult:
    """Run `entry` ("module:function") in every rank of the topology asked for, in a run directory.

    A request that is refused leaves no new run directory, even if only the ranks can see what is wrong. Raises
    FrameworkError for what can't be done as asked, KeyboardInterrupt on Ctrl-C; no rank is left in any case.
    """
    topology = check(request)
    if request.leader is not None:
        request.leader.compare(timeout_s=request.config.backend.init_timeout)
    with nodes_together(request, topology) as company:
        if company is not None and company.offer is not None:
            return _join(request, company, company.offer)
        with _run_dir(request) as run_dir, locked(run_dir), _records_kept_if_refused(run_dir):
            _record_start(run_dir, request, topology)
            plan = _plan(request, topology, run_dir, entry=entry, company=company)
            launch = importlib.import_module(f"framework.launch.{chosen_launcher(request)}").launch
            return _run(request, plan, launch=launch if company is None else company.run, words=words)


def _plan(
    request: Request, topology: Topology, run_dir: RunDir, *, entry: str, company: Company | None = None
) -> LaunchPlan:
    config = request.config
    return LaunchPlan(
        entry=entry,
        run_dir=run_dir,
        topology=topology,
        init_method=config.backend.init_method,
        limits=limits(config),
        terminal=request.place is None,
        # One that has died takes only its own job with it: the launcher starts another where there is none.
        warm=request.warm if request.warm is not None and request.warm.alive else None,
        node=config.topology.node_rank,
        endpoint=None if company is None else company.endpoint,
        max_restarts=config.launcher.max_restarts,
        leader=request.leader,
        names=_needed(config),
    )


def _needed(config: Config) -> tuple[str, ...]:
    """What is imported once before the ranks are forked, where each would take a second or more for it."""
    strategy = config.strategy["_target_"]
    own = (strategy,) if strategy.startswith("framework.") else ()
    return own if config.trainer.compile is None else (*own, "torch._dynamo")


def _join(request: Request, company: Company, offer: Offer) -> JobResult:
    """This machine's part of a run of node 0's, which keeps the records and says how the run ended."""
    run_dir, node = RunDir(Path(offer.run_dir)), request.config.topology.node_rank
    try:
        make_visible(run_dir, offer)
    except OSError as error:
        raise RunError(
            f"Node {node} can't make the run directory {run_dir.path}: {error.strerror or error}.\n"
            "Use a folder that every node can write: path.outputs=FOLDER"
        ) from error
    print(f"Node {node} of {offer.topology.nnodes} is part of the run\n{short(run_dir.path)}", flush=True)
    outcome = company.run(_plan(request, offer.topology, run_dir, entry=offer.entry, company=company))
    if outcome.failure is not None:
        print(render(outcome.failure), file=sys.stderr, flush=True)
    return JobResult(outcome.status, run_dir)


def _run(request: Request, plan: LaunchPlan, *, launch: Callable[[LaunchPlan], Outcome], words: Words) -> JobResult:
    """Launch in a run directory that is this process's own, and say how that went."""
    config, run_dir = request.config, plan.run_dir
    quiet = request.place is not None
    if not quiet:
        print(announcement(words.doing, config.recipe, plan.topology, run_dir, replaced=request.replaced), flush=True)
    outcome = _launch(plan, launch=launch, interrupted=words.interrupted)
    if outcome.failure is not None:
        if _is_refusal(outcome.failure):
            raise RequestError(render(outcome.failure))
        print(render(outcome.failure), file=sys.stderr, flush=True)
    if outcome.status != EXIT_WRONG_REQUEST and not quiet:
        print(words.closing(config, run_dir, outcome.status), flush=True)
    results: dict[str, Any] = run_dir.read_run().get("results", {})
    return JobResult(outcome.status, run_dir, score=results.get("score"))


def _is_refusal(report: FailureReport) -> bool:
    """Return whether the request was found to be wrong before any optimizer step."""
    is_wrong = report.first.exit_status == EXIT_WRONG_REQUEST and report.attempt == 0
    return is_wrong and not any(failure.step for failure in (report.first, *report.others))


def _launch(
    plan: LaunchPlan, *, launch: Callable[[LaunchPlan], Outcome], interrupted: Callable[[RunDir], str]
) -> Outcome:
    """Run the ranks; `run.json` says how that ended, whatever ends it."""
    try:
        outcome = launch(plan)
    except KeyboardInterrupt:
        _record_end(plan.run_dir, status="interrupted")
        print(interrupted(plan.run_dir), file=sys.stderr, flush=True)
        raise
    except BaseException:
        _record_end(plan.run_dir, status="failed")
        raise
    _record_end(plan.run_dir, status=_STATUS.get(outcome.status, "failed"), late=outcome.late)
    return outcome


def _record_start(run_dir: RunDir, request: Request, topology: Topology) -> None:
    """Raises RunError where the disk refuses."""
    try:
        if request.config.resume is not None:
            keep_before(run_dir)
            for file in run_dir.path.glob("failure*.json"):  # of the beginning before; its logs stay
                file.unlink()
        save_config(run_dir, request)
        record_start(run_dir, topology, arguments=request.arguments)
    except OSError as error:
        raise RunError(
            f"The run directory {run_dir.path} can't be written: {error.strerror or error}.\n"
            "Make room, or choose another folder with path.outputs=FOLDER."
        ) from error


def _record_end(run_dir: RunDir, *, status: str, late: Sequence[Mapping[str, Any]] = ()) -> None:
    """Where the disk refuses, that is said and nothing more: what ended the run has yet to be shown."""
    try:
        put_back(run_dir)  # where the ranks didn't take up what was typed
        record_end(run_dir, status=status, late=late)
    except OSError as error:
        print(f"{run_dir.run_file} can't be written: {error.strerror or error}.", file=sys.stderr, flush=True)


@contextmanager
def _records_kept_if_refused(run_dir: RunDir) -> Iterator[None]:
    """If the block raises RequestError, put back run.json and failure reports: a refused resume isn't part of a run."""
    records = {file: file.read_bytes() for file in run_dir.path.glob("*.json")}
    try:
        yield
    except RequestError:
        for file in run_dir.path.glob("*.json"):
            file.unlink()
        for file, content in records.items():
            file.write_bytes(content)
        raise


def _run_dir(request: Request) -> AbstractContextManager[RunDir]:
    """Return the run to resume, or a new one: below the recipe, and unless it is a training, below the job's name."""
    config, place = request.config, request.place
    if config.resume is not None:
        return nullcontext(run_of(config.resume))
    if place is not None:
        return new_run_dir(place.folder, name=str(place.number))
    parent = request.home or Path(config.path.outputs, config.recipe)
    return new_run_dir(parent if config.job == "train" else parent / config.job)

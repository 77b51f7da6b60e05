"""Run a job's ranks: make the run directory, write `run.json`, launch, print the failure report or the results."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from framework.command.launcher import Placement
from framework.command.messages import interrupted_message, start_message
from framework.command.request import JobResult, Request
from framework.config.saved import key_of, run_of, save_config, search_path_override
from framework.config.schema import Config
from framework.config.secrets import Secrets, masked_arguments
from framework.config.topology import Topology
from framework.errors import EXIT_STOPPED, EXIT_WRONG_REQUEST, RequestError, RunError
from framework.launch.base import Part
from framework.launch.environment import split_endpoint
from framework.launch.handshake import RunSpec, make_visible
from framework.launch.plan import LaunchPlan, NodeSetup, Outcome
from framework.monitoring.node_monitor import Limits
from framework.monitoring.report import render
from framework.runs.compare import NO_CODE, cell, compare_origins
from framework.runs.record import described
from framework.system.files import FileFacts, read_bytes
from framework.system.formatting import display_path
from framework.system.hardware import cpu_count, visible_gpus
from framework.system.run_dir import (
    RunDir,
    check_no_way_out,
    check_regular_files,
    locked,
    new_run_dir,
    read_object,
    write_atomically,
)
from framework.system.shown_text import shown
from framework.system.versions import installed_versions

_STATUS = {0: "finished", EXIT_STOPPED: "stopped"}
_PACKAGES = ("framework", "torch", "torchvision", "hydra-core", "omegaconf", "numpy")
_GIT_TIMEOUT_S = 5.0
_MAX_DIFF_CHARS = 1_000_000
_RECORDS = ("*.json", "*.yaml")  # in the run directory itself


def run(request: Request, *, entry: str, title: str, summary: Callable[[Config, RunDir, int], str]) -> JobResult:
    """Run `entry` ("module:function") on every rank, in a run directory. No rank survives this call.

    A refused request leaves no new run directory, even if only the ranks can see what is wrong. Raises FrameworkError
    for a request that can't be met, KeyboardInterrupt on Ctrl-C.

    Args:
        title: The first word of the first line, such as "Training".
        summary: Returns the last lines, given the exit status.
    """
    placement = request.placement
    topology = placement.topology
    setup = _setup(request, placement)
    with placement.launcher.join(setup) as part:
        if part.spec is not None:
            return _follow(request, setup, part, part.spec)
        with _run_dir(request) as run_dir, locked(run_dir), _records_kept_if_refused(run_dir):
            record_start(run_dir, request, topology)
            if request.config.rerun is not None and request.config.resume is None:
                print(shown(_rerun_message(Path(request.config.rerun), run_dir)), file=sys.stderr, flush=True)
            # What a call evaluates or predicts is returned.
            quiet = request.sub_run is not None or (request.call is not None and request.config.job != "train")
            if not quiet:
                with suppress(BrokenPipeError):  # of `| head -n 1`; the ranks run nevertheless
                    print(shown(start_message(title, request.config.recipe, topology, run_dir)), flush=True)
            outcome = _launch(part.launch, _plan(request, setup, run_dir, entry=entry), request.config)
            status, failure = outcome.status, outcome.failure
            if failure is not None and request.call is None:
                print(render(failure), file=sys.stderr, flush=True)
            if status != EXIT_WRONG_REQUEST and not quiet:
                print(shown(summary(request.config, run_dir, status)), flush=True)
            score = run_dir.read_run().get("results", {}).get("score")
            return JobResult(status, run_dir, score=score, failure=failure)


def _setup(request: Request, placement: Placement) -> NodeSetup:
    config = request.config
    endpoint = config.topology.rdzv_endpoint
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
        endpoint=None if endpoint is None or placement.topology.nnodes == 1 else split_endpoint(endpoint),
        max_restarts=config.launcher.max_restarts,
        arguments=tuple(sys.argv[1:]),
        external_ranks=request.external_ranks,
    )


def _plan(request: Request, setup: NodeSetup, run_dir: RunDir, *, entry: str) -> LaunchPlan:
    return LaunchPlan(
        **vars(setup),
        entry=entry,
        run_dir=run_dir,
        names=_needed(request.config),
    )


def _needed(config: Config) -> tuple[str, ...]:
    """Return what to import once before the ranks are forked, since each would need a second or more for it."""
    strategy = config.strategy["_target_"]
    own = (strategy,) if strategy.startswith("framework.") else ()
    return own if config.trainer.compile is None else (*own, "torch._dynamo")


def _follow(request: Request, setup: NodeSetup, part: Part, spec: RunSpec) -> JobResult:
    """Run this node's ranks of a run whose records node 0 keeps."""
    run_dir = RunDir(Path(spec.run_dir))
    make_visible(run_dir, spec)
    print(f"Node {setup.node} of {setup.topology.nnodes} is part of the run\n{display_path(run_dir.path)}", flush=True)
    outcome = part.launch(_plan(request, setup, run_dir, entry=spec.entry))
    if outcome.failure is not None:
        print(render(outcome.failure), file=sys.stderr, flush=True)
    return JobResult(outcome.status, run_dir)


def _launch(launch: Callable[[LaunchPlan], Outcome], plan: LaunchPlan, config: Config) -> Outcome:
    """Launch the ranks and record in `run.json` how the run went.

    Raises RequestError if a rank refused the request before the first step.
    """
    run_dir = plan.run_dir
    try:
        outcome = launch(plan)
    except KeyboardInterrupt:
        record_end(run_dir, status="interrupted")
        print(shown(interrupted_message(config, run_dir)), file=sys.stderr, flush=True)
        raise
    except BaseException:
        record_end(run_dir, status="failed")
        raise
    record_end(run_dir, status=_STATUS.get(outcome.status, "failed"), late=outcome.late)
    if outcome.failure is not None:
        first = outcome.failure.first
        steps = [failure.step for failure in (first, *outcome.failure.others)]
        if first.exit_status == EXIT_WRONG_REQUEST and outcome.failure.attempt == 0 and not any(steps):
            # On other machines, ranks may have found other files or packages.
            several = plan.external_ranks is not None or plan.topology.nnodes > 1
            text = render(outcome.failure)
            raise RequestError(f"Rank {first.rank} (node {first.node}): {text}" if several else text)
    return outcome


@contextmanager
def _records_kept_if_refused(run_dir: RunDir) -> Iterator[None]:
    """If the block raises RequestError, restore the configuration, run.json and failure reports.

    A refused resume isn't part of a run.
    """
    before = [file for kind in _RECORDS for file in run_dir.path.glob(kind)]
    records = {file: content for file in before if (content := _content(file)) is not None}
    try:
        yield
    except RequestError:
        for kind in _RECORDS:
            for file in run_dir.path.glob(kind):
                if file not in before:
                    file.unlink()
        for file, content in records.items():
            if _content(file) != content:  # written since, so it is text
                write_atomically(file, content.decode(), is_private=file == run_dir.secrets_file)
        raise


def _content(file: Path) -> bytes | None:
    """Return the content of a record; None for what can't be one."""
    try:
        return read_bytes(file)
    except OSError:
        return None


def _run_dir(request: Request) -> AbstractContextManager[RunDir]:
    """Return the run to resume, or a new one: below the recipe, and unless it is a training, below the job's name."""
    config, sub_run = request.config, request.sub_run
    if config.resume is not None:
        run_dir = run_of(config.resume)
        check_no_way_out(run_dir)
        check_regular_files(run_dir)
        return nullcontext(run_dir)
    if request.parent_run is not None:
        check_no_way_out(RunDir(request.parent_run))
    if sub_run is not None:
        return new_run_dir(sub_run.parent, name=sub_run.name)
    parent = request.parent_run or Path(config.path.outputs, config.recipe)
    return new_run_dir(parent if config.job == "train" else parent / config.job)


# run.json


def record_start(run_dir: RunDir, request: Request, topology: Topology) -> None:
    """Save the configuration, and record the command, code, versions and hardware; earlier starts go under `earlier`.

    Raises RunError if the run directory can't be written.
    """
    secrets = Secrets(request.raw)
    facts: dict[str, Any] = {
        "status": "running",
        "started": _now(),
        "process": {"pid": os.getpid(), "host": socket.gethostname()},
        "command": secrets.masked_text(_command(request)),
        **described(request.raw, secrets.masked_overrides(request.overrides)),
        "tags": list(request.config.tags),
        "topology": {**asdict(topology), "world_size": topology.world_size},
        "git": _git(),
        "versions": {"python": platform.python_version(), **installed_versions(_PACKAGES)},
        "hardware": {
            "host": socket.gethostname(),
            "platform": platform.platform(),
            "cpu_cores": cpu_count(),
            "gpus": [gpu.name for gpu in visible_gpus()],
        },
    }
    if request.config.rerun is not None:
        facts["rerun_of"] = request.config.rerun
    if run_dir.run_file.exists():
        before = run_dir.read_run()
        kept = {key: before.get(key) for key in ("status", "started", "ended", "command")}
        # Earlier versions recorded it as it was typed.
        kept["command"] = secrets.masked_text(str(before.get("command", "")))
        facts |= {"earlier": [*before.get("earlier", []), kept], "ended": None}
    try:
        run_dir.logs.mkdir(exist_ok=True)
        if request.config.resume is not None:
            for file in run_dir.path.glob("failure*.json"):  # of the previous start; its logs stay
                file.unlink()
        objects = _save_objects(request, run_dir)
        overrides = list(request.overrides)
        if request.search_path:
            overrides = [text for text in overrides if key_of(text) != "hydra.searchpath"]
            overrides.append(search_path_override(request.search_path))
        texts = save_config(run_dir, raw={**request.raw, **objects.keys}, overrides=overrides)
        files = {name: FileFacts.of(text.encode()) for name, text in texts.items()} | objects.facts
        facts["files"] = {name: asdict(each) for name, each in files.items()}
        facts["config"] = texts[run_dir.config_file.name]  # what an edited file is compared with
        run_dir.update_run(facts)
    except OSError as error:
        raise RunError(
            f"The run directory {run_dir.path} can't be written: {error.strerror or error}.\n"
            "Make room, or choose another folder with path.outputs=FOLDER."
        ) from error


def _command(request: Request) -> str:
    """Return the command line, secrets masked. For a call from Python, it is that of the script or notebook kernel."""
    arguments = sys.argv if request.call else ["-m", "framework", *request.arguments]
    return shlex.join(["python", *masked_arguments(arguments)])


@dataclass(frozen=True)
class _Objects:
    """The Python objects of a run: the configuration's key that names their files, and the files in its directory."""

    keys: Mapping[str, Any]
    facts: dict[str, FileFacts]


def _save_objects(request: Request, run_dir: RunDir) -> _Objects:
    """Write the Python objects of a call to the run directory."""
    files = list(request.config.objects or ())
    facts = {}
    for file in map(Path, files):
        if file.parent == run_dir.path:  # a rerun's are in the original run
            # Of a run of an earlier version, they are recorded from now on.
            facts[file.name] = run_dir.recorded_facts(file.name) or FileFacts.of(run_dir.read_unchanged(file))
    if request.call is None or request.call.objects is None:
        return _Objects({}, facts)
    file = run_dir.objects_file(len(list(run_dir.path.glob(run_dir.objects_file("*").name))))
    file.write_bytes(request.call.objects)
    facts[file.name] = FileFacts.of(request.call.objects)
    return _Objects({"objects": [*files, str(file)]}, facts)


def record_end(run_dir: RunDir, *, status: str, late: Sequence[Mapping[str, Any]] = ()) -> None:
    """Record how the run ended. late: ranks that others waited for and that caught up.

    A full disk is only reported: the reason why the run ended has yet to be printed.
    """
    try:
        run_dir.update_run({"status": status, "ended": _now(), "late": [dict(each) for each in late]})
    except OSError as error:
        print(f"{run_dir.run_file} can't be written: {error.strerror or error}.", file=sys.stderr, flush=True)


def _rerun_message(original: Path, run_dir: RunDir) -> str:
    """Return how code, versions and machine differ from those that the original run recorded."""
    facts = [read_object(RunDir(original).run_file) or {}, run_dir.read_run()]
    found = compare_origins(facts)
    lines = [f"  {name}: {cell(then)} → {cell(now)}" for rows in found.values() for name, (then, now) in rows.items()]
    is_code_known = any(each.get("git") for each in facts)
    title = f"Rerun of {display_path(original)}"
    if not lines:
        same = "code, versions and machine are the same" if is_code_known else "versions and machine are the same"
        return f"{title}: {same}" + ("" if is_code_known else f"\n  {NO_CODE}")
    if found["code"].keys() == {"revision"}:
        lines.append("  uncommitted changes: the same")
    elif is_code_known and not found["code"]:
        lines.append("  code: the same")
    return "\n".join([f"Warning: {title[0].lower()}{title[1:]} that may give other numbers. Then → now:", *lines])


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _git() -> dict[str, str] | None:
    """Return revision and uncommitted changes of the working directory's repository; None outside of one."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], capture_output=True, text=True, errors="replace", timeout=_GIT_TIMEOUT_S, check=True
        ).stdout

    try:
        return {"revision": git("rev-parse", "HEAD").strip(), "diff": git("diff", "HEAD")[:_MAX_DIFF_CHARS]}
    except (OSError, subprocess.SubprocessError):
        return None

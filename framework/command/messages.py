"""The texts at the start and the end of a run. No torch here."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from framework.checkpoint import complete_steps
from framework.config.overrides import outputs_arguments, path_argument, resume_argument
from framework.config.schema import Config
from framework.config.topology import Topology
from framework.errors import EXIT_STOPPED
from framework.monitoring.slow_ranks import SlowRank
from framework.remote.place import display_place
from framework.runs.compare import NO_CODE, cell, compare_origins
from framework.runs.profile import profile_tables
from framework.runs.segments import SEGMENTS
from framework.system.formatting import display_path, format_count, format_facts, format_table
from framework.system.run_dir import RunDir, read_object

# Of the notes below a table.
_WIDTH = 100


def start_message(title: str, recipe: str, topology: Topology, run_dir: RunDir) -> str:
    """Return two lines: what starts where, and its directory."""
    processes = format_count(topology.world_size, "process", "processes")
    devices = "CPU"
    if topology.gpus_per_node > 0:
        devices = format_count(topology.gpus_per_node, "GPU")
    return f"{title} {recipe}: {processes}, {devices}\n{display_path(run_dir.path)}"


def unused_variables(environ: Mapping[str, str], topology: Topology) -> str:
    """Return the line about torch's variables, which decide nothing if the command starts the ranks; empty without."""
    variables = [f"{name}={environ[name]}" for name in ("MASTER_ADDR", "MASTER_PORT") if environ.get(name)]
    if not variables:
        return ""
    place = "a port that the command binds" if topology.nnodes == 1 else "topology.rdzv_endpoint"
    return f"Not used: {' '.join(variables)}. Ranks meet at {place}."


def rerun_message(original: Path, run_dir: RunDir) -> str:
    """Return how code, versions and machine differ from those that the original run recorded."""
    records = [read_object(RunDir(original).run_file) or {}, run_dir.read_run()]
    sections = compare_origins(records)
    lines = []
    for rows in sections.values():
        for name, (then, now) in rows.items():
            lines.append(f"  {name}: {cell(then)} → {cell(now)}")

    title = f"of {display_path(original)}"
    is_code_known = any(record.get("git") for record in records)
    if not lines:
        if is_code_known:
            return f"Rerun {title}: code, versions and machine are the same"
        return f"Rerun {title}: versions and machine are the same\n  {NO_CODE}"

    if sections["code"].keys() == {"revision"}:
        lines.append("  uncommitted changes: the same")
    elif is_code_known and not sections["code"]:
        lines.append("  code: the same")
    return "\n".join([f"Warning: rerun {title} that may give other numbers. Then → now:", *lines])


def training_summary(config: Config, run_dir: RunDir, status: int) -> str:
    """Return the results, where the files are, and the commands to resume the run and to see its curves."""
    record = run_dir.read_run()
    results = record.get("results", {})
    lines = [""]
    if status in (0, EXIT_STOPPED):
        lines.append(_how_it_ended(config.recipe, results, status))
        if status == 0:
            lines += _nothing_trained(record)
        lines += _metrics_by_step(results)
        if results.get("slow_ranks"):
            lines.append(f"  {SlowRank(**results['slow_ranks'][0])}")
        if makes_profile(config) and record.get("profile") is not None:
            lines += _profile_lines(record["profile"])

    path = display_path(run_dir.path)
    facts = [("run", path)]
    has_checkpoints = bool(complete_steps(run_dir.checkpoints))
    if has_checkpoints:
        facts.append(("checkpoints", f"{path}/checkpoints"))
    facts.append(("logs", f"{path}/logs"))
    if has_checkpoints:
        facts.append(("resume", f"python -m framework {resume_arguments(run_dir)}"))
    failure = (read_object(run_dir.path / "failure.json") or {}).get("first") or {}
    if status not in (0, EXIT_STOPPED) and "NotFiniteError" in str(failure.get("traceback")):
        facts.append(("why", f"python -m framework job=why {path_argument('run', display_place(run_dir.path))}"))
    if run_dir.event_files:
        # The folder of all recipes' runs, to compare them.
        facts.append(("curves", tensorboard_command(run_dir.path.parents[1])))
    return "\n".join([*lines, format_facts(facts)])


def makes_profile(config: Config) -> bool:
    """Return True if the configuration asks for the profiler."""
    return config.trainer.profiler is not None or "profiler" in config.callbacks


def interrupted_message(run_dir: RunDir, *, trains: bool) -> str:
    """Return the line after Ctrl-C, with the command that resumes a training."""
    if not trains:
        advice = "Nothing to resume; rerun the command."
    elif complete_steps(run_dir.checkpoints):
        advice = f"Resume from the last checkpoint: python -m framework {resume_arguments(run_dir)}"
    else:
        advice = f"No checkpoint yet; start again: python -m framework {resume_arguments(run_dir)}"
    return f"\nInterrupted; every process has ended. {advice}"


def stopped_message(run_dir: RunDir, *, by: str, trains: bool) -> str:
    """Return the line after a signal before a step was done, with the command that resumes a training."""
    if not trains:
        return f"\nStopped by {by}. Nothing to resume; rerun the command."
    command = f"python -m framework {resume_arguments(run_dir)}"
    if complete_steps(run_dir.checkpoints):
        return f"\nStopped by {by} before a step was done. Resume from the last checkpoint: {command}"
    return f"\nStopped by {by} before the first step. Start again: {command}"


def resume_arguments(run_dir: RunDir) -> str:
    """Return the arguments that resume a run, with the typed `path.outputs`: only below it is the run the user's."""
    record = read_object(run_dir.run_file) or {}
    outputs = outputs_arguments(record.get("overrides", []))
    return " ".join([resume_argument(display_place(run_dir.path)), *outputs])


def tensorboard_command(folder: Path) -> str:
    """Return the command that shows the curves of every run in `folder`."""
    return f"tensorboard --logdir {shlex.quote(display_path(folder))}"


def _how_it_ended(recipe: str, results: Mapping[str, Any], status: int) -> str:
    steps = results.get("steps", 0)
    ended_by = results.get("ended_by", "")
    if status == EXIT_STOPPED:
        return f"Stopped {recipe} {ended_by.removeprefix('stopped ')} after step {steps:,}, which is saved"
    seconds = results.get("seconds", 0.0)
    return f"Finished {recipe} after {format_count(steps, 'step')} in {seconds:.1f} s ({ended_by})"


def _nothing_trained(record: Mapping[str, Any]) -> list[str]:
    """Return a line if the run was resumed, or branched off, at the step at which it ends."""
    results = record["results"]
    segments = record.get(SEGMENTS)
    if not segments:
        # An earlier version has trained it.
        return []
    begun = segments[-1]["step"]
    if begun == 0 or results["steps"] != begun:
        return []
    line = f"  No step was trained: the run had made {format_count(begun, 'step')} when this command began"
    ended_by = results["ended_by"]
    if ended_by.startswith("trainer."):
        line += f". To go on, type a larger {ended_by.removesuffix(' reached')}"
    return [line]


def _metrics_by_step(results: Mapping[str, Any]) -> list[str]:
    """Return a table of the metrics of the best and the last validated step; the tested weights are one of them."""
    labels: dict[int, list[str]] = {}
    metrics: dict[int, dict[str, float]] = {}
    for part in ("best", "last", "test"):
        part_results = results.get(part)
        if part_results is None:
            continue
        step = part_results["step"]
        labels.setdefault(step, [])
        if part != "test":
            labels[step].append(part)
        metrics.setdefault(step, {}).update(part_results["metrics"])
    if not metrics:
        return []

    header = [""]
    # Each once, in their order.
    names: dict[str, None] = {}
    for step, step_metrics in metrics.items():
        header.append(f"{' and '.join(labels[step])} (step {step:,})".lstrip())
        names |= dict.fromkeys(step_metrics)
    rows = [header]
    for name in names:
        cells = [_metric_cell(step_metrics.get(name)) for step_metrics in metrics.values()]
        rows.append([f"{name:<19}", *cells])
    return format_table(rows).splitlines()


def _profile_lines(profile: Mapping[str, Any]) -> list[str]:
    """Return what the profiler found, above and below an empty line."""
    tables = profile_tables(profile)
    lines = ["", tables.title]
    for rows in (tables.forecast, tables.ranks, tables.operators):
        if rows:
            lines += [*format_table(rows).splitlines(), ""]
    for note in tables.notes:
        lines += [*textwrap.wrap(note, _WIDTH, initial_indent="  ", subsequent_indent="  "), ""]
    return lines


def _metric_cell(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.4f}"

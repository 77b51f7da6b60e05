"""What a person reads at the beginning and at the end of a run: plain lines, made without torch."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from framework.checkpoint import complete_steps
from framework.config.saved import resume_argument
from framework.config.schema import Config
from framework.errors import EXIT_STOPPED
from framework.run_dir import RunDir
from framework.slow_ranks import SlowRank
from framework.topology import Topology


def announcement(
    doing: str, recipe: str, topology: Topology, run_dir: RunDir, *, replaced: Mapping[str, str] | None = None
) -> str:
    """Return two lines: what starts, with the options that replace the recipe's own, and its directory."""
    processes = _counted(topology.world_size, "process", "processes")
    devices = "CPU" if topology.gpus_per_node == 0 else _counted(topology.gpus_per_node, "GPU", "GPUs")
    others = [f"{choice} instead of {option}" for choice, option in (replaced or {}).items()]
    name = f"{recipe} ({', '.join(others)})" if others else recipe
    return f"{doing} {name}: {processes}, {devices}\n{short(run_dir.path)}"


def closing_of_training(config: Config, run_dir: RunDir, status: int) -> str:
    """Results, where everything lies, and the commands to go on and to look. status: what the command ends with."""
    results = run_dir.read_run().get("results", {})
    lines = [""]
    if status in (0, EXIT_STOPPED):
        steps, seconds = results.get("steps", 0), results.get("seconds", 0.0)
        ended_by = results.get("ended_by", "")
        how = f"Finished {config.recipe} after {steps:,} steps in {seconds:.1f} s ({ended_by})"
        if status == EXIT_STOPPED:
            how = f"Stopped {config.recipe} {ended_by.removeprefix('stopped ')} after step {steps:,}, which is saved"
        lines.append(how)
        lines += _metrics_by_step(results)
        if results.get("slow_ranks"):
            lines.append(f"  {SlowRank.from_plain(results['slow_ranks'][0])}")
    path = short(run_dir.path)
    rows = [("run", path), ("logs", f"{path}/logs")]
    if complete_steps(run_dir.checkpoints):
        rows.insert(1, ("checkpoints", f"{path}/checkpoints"))
        rows.append(("resume", f"python -m framework {resume_argument(path)}"))
    rows += look_of(run_dir)
    return "\n".join(lines + _rows(rows))


def closing_of_evaluation(config: Config, run_dir: RunDir, status: int) -> str:
    """The metrics and what they are of."""
    results = run_dir.read_run().get("results", {})
    rows = [("run", short(run_dir.path)), ("logs", f"{short(run_dir.path)}/logs")]
    if status != 0:
        return "\n".join(["", *_rows(rows)])
    rows.insert(0, ("checkpoint", short(Path(str(config.checkpoint.path)))))
    return "\n".join(["", f"Evaluated {config.recipe} on {config.eval.part.value}", *_metrics(results), *_rows(rows)])


def closing_of_prediction(config: Config, run_dir: RunDir, status: int) -> str:
    """Where the predictions are."""
    rows = [("run", short(run_dir.path)), ("logs", f"{short(run_dir.path)}/logs")]
    if status != 0:
        return "\n".join(["", *_rows(rows)])
    samples = run_dir.read_run()["results"]["samples"]
    rows.insert(0, ("checkpoint", short(Path(str(config.checkpoint.path)))))
    rows.insert(0, ("predictions", short(Path(config.predict.output))))
    return "\n".join(["", f"Predicted {samples:,} samples of {config.predict.part.value}", *_rows(rows)])


def interruption(run_dir: RunDir) -> str:
    """One line on how to go on after Ctrl-C."""
    command = f"python -m framework {resume_argument(short(run_dir.path))}"
    how = "Go on from the last checkpoint" if complete_steps(run_dir.checkpoints) else "No checkpoint yet; begin anew"
    return f"\nInterrupted; every process has ended. {how}: {command}"


def interruption_without_trace(_run_dir: RunDir) -> str:
    """The line after Ctrl-C of a job that leaves nothing to go on from."""
    return "\nInterrupted; every process has ended. There is nothing to go on from: type the command again."


def look_of(run_dir: RunDir) -> list[tuple[str, str]]:
    """The row with the command that shows its curves; empty where TensorBoard was told none."""
    # The folder with the runs of all recipes, to compare them; from where the run is, not from where it was started.
    return [("look", look(run_dir.path.parents[1]))] if run_dir.tensorboard.is_dir() else []


def look(folder: Path) -> str:
    """The command that shows the curves of every run in `folder`."""
    return f"tensorboard --logdir {shlex.quote(short(folder))}"


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def short(path: Path) -> str:
    """Relative to the working directory where it lies below it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _metrics(results: Mapping[str, Any]) -> list[str]:
    return [f"  {name:<20} {value:.4f}" for name, value in results.get("metrics", {}).items()]


def _metrics_by_step(results: Mapping[str, Any]) -> list[str]:
    """A table of what the weights of the best and of the last validated step reached; those tested are one of them."""
    columns: dict[int, tuple[list[str], dict[str, float]]] = {}
    for name in ("best", "last", "test"):
        found = results.get(name)
        if found is not None:
            labels, metrics = columns.setdefault(found["step"], ([], {}))
            labels += [] if name == "test" else [name]
            metrics |= found["metrics"]
    if not columns:
        return []
    heads = [f"{' and '.join(labels)} (step {step:,})".lstrip() for step, (labels, _) in columns.items()]
    rows = [("", heads)]
    for name in dict.fromkeys(name for _, metrics in columns.values() for name in metrics):
        cells = [f"{metrics[name]:.4f}" if name in metrics else "–" for _, metrics in columns.values()]
        rows.append((name, cells))
    width = max(map(len, heads))
    return [f"  {name:<20} {'  '.join(cell.ljust(width) for cell in cells)}".rstrip() for name, cells in rows]


def _rows(rows: list[tuple[str, str]]) -> list[str]:
    return [f"  {name:<12} {text}" for name, text in rows]

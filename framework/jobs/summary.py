"""What a person reads at the beginning and at the end of a run: plain lines, made without torch."""

from __future__ import annotations

import os
from pathlib import Path

from framework.checkpoint import complete_steps
from framework.config.schema import Config
from framework.run_dir import RunDir
from framework.topology import Topology


def announcement(config: Config, topology: Topology, run_dir: RunDir) -> str:
    """Two lines: what starts where."""
    processes = _counted(topology.world_size, "process", "processes")
    devices = "CPU" if topology.gpus_per_node == 0 else _counted(topology.gpus_per_node, "GPU", "GPUs")
    verb = "Resuming" if config.resume is not None else "Training"
    return f"{verb} {config.recipe}: {processes}, {devices}\n{_short(run_dir.path)}"


def closing(config: Config, run_dir: RunDir, *, failed: bool) -> str:
    """Results, where everything lies, and the commands to go on and to look."""
    results = run_dir.read_run().get("results", {})
    lines = [""]
    if not failed:
        steps, seconds = results.get("steps", 0), results.get("seconds", 0.0)
        ended_by = results.get("ended_by", "")
        lines.append(f"Finished {config.recipe} after {steps:,} steps in {seconds:.1f} s ({ended_by})")
        lines += [f"  {name:<20} {value:.4f}" for name, value in results.get("metrics", {}).items()]
        if results.get("tested"):
            lines.append(f"  {'tested with':<20} {results['tested']}")
    path = _short(run_dir.path)
    rows = [("run", path), ("logs", f"{path}/logs")]
    if complete_steps(run_dir.checkpoints):
        rows.insert(1, ("checkpoints", f"{path}/checkpoints"))
        rows.append(("resume", f"python -m framework resume={path}"))
    rows.append(("look", f"tensorboard --logdir {_short(Path(config.path.outputs))}"))
    return "\n".join(lines + [f"  {name:<12} {text}" for name, text in rows])


def interruption(run_dir: RunDir) -> str:
    """One line on how to go on after Ctrl-C."""
    path = _short(run_dir.path)
    return f"\nInterrupted; every process has ended. Go on from the last checkpoint: python -m framework resume={path}"


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _short(path: Path) -> str:
    """Relative to the working directory where it lies below it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative

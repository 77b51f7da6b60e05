"""The texts at the start and the end of a run. No torch here."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from framework.checkpoint import complete_steps
from framework.config.saved import key_of, resume_argument
from framework.config.schema import Config
from framework.config.topology import Topology
from framework.errors import EXIT_STOPPED
from framework.monitoring.slow_ranks import SlowRank
from framework.system.formatting import display_path, format_count, format_facts, format_table
from framework.system.run_dir import RunDir, read_object


def start_message(title: str, recipe: str, topology: Topology, run_dir: RunDir) -> str:
    """Return two lines: what starts where, and its directory."""
    processes = format_count(topology.world_size, "process", "processes")
    devices = format_count(topology.gpus_per_node, "GPU") if topology.gpus_per_node else "CPU"
    return f"{title} {recipe}: {processes}, {devices}\n{display_path(run_dir.path)}"


def training_summary(config: Config, run_dir: RunDir, status: int) -> str:
    """Return the results, where the files are, and the commands to resume the run and to see its curves."""
    results = run_dir.read_run().get("results", {})
    lines = [""]
    if status in (0, EXIT_STOPPED):
        steps, seconds = results.get("steps", 0), results.get("seconds", 0.0)
        ended_by = results.get("ended_by", "")
        how = f"Finished {config.recipe} after {steps:,} steps in {seconds:.1f} s ({ended_by})"
        if status == EXIT_STOPPED:
            how = f"Stopped {config.recipe} {ended_by.removeprefix('stopped ')} after step {steps:,}, which is saved"
        lines += [how, *_metrics_by_step(results)]
        if results.get("slow_ranks"):
            lines.append(f"  {SlowRank(**results['slow_ranks'][0])}")
    path = display_path(run_dir.path)
    facts = [("run", path), ("logs", f"{path}/logs")]
    if complete_steps(run_dir.checkpoints):
        facts.insert(1, ("checkpoints", f"{path}/checkpoints"))
        facts.append(("resume", f"python -m framework {resume_arguments(run_dir)}"))
    if run_dir.tensorboard.is_dir():  # the folder of all recipes' runs, to compare them
        facts.append(("curves", tensorboard_command(run_dir.path.parents[1])))
    return "\n".join([*lines, format_facts(facts)])


def evaluation_summary(config: Config, run_dir: RunDir, status: int) -> str:
    """Return the metrics, the checkpoint and where the logs are."""
    results = run_dir.read_run().get("results", {})
    table = format_table([(name, f"{value:.4f}") for name, value in results.get("metrics", {}).items()])
    texts = "".join(f"\n\n{name}\n{text}" for name, text in results.get("texts", {}).items())
    done = f"Evaluated {config.recipe} on {config.eval.part}\n{table}{texts}"
    return checkpoint_summary(done, config, run_dir, status)


def prediction_summary(config: Config, run_dir: RunDir, status: int) -> str:
    """Return where the predictions are, and of how many samples."""
    samples = run_dir.read_run().get("results", {}).get("samples", 0)
    file = format_facts([("predictions", display_path(Path(config.predict.output)))])
    return checkpoint_summary(
        f"Predicted {samples:,} samples of {config.predict.part}\n{file}", config, run_dir, status
    )


def checkpoint_summary(results: str, config: Config, run_dir: RunDir, status: int) -> str:
    """Return the results, unless the job failed, then the checkpoint and where the logs are."""
    path, checkpoint = display_path(run_dir.path), display_path(Path(str(config.checkpoint.path)))
    facts = format_facts([("checkpoint", checkpoint), ("run", path), ("logs", f"{path}/logs")])
    return f"\n{facts}" if status != 0 else f"\n{results}\n{facts}"


def interrupted_message(config: Config, run_dir: RunDir) -> str:
    """Return the line after Ctrl-C, with the command that resumes a training."""
    how = "Nothing to resume; rerun the command."
    if config.job == "train":
        has_any = complete_steps(run_dir.checkpoints)
        how = "Resume from the last checkpoint: " if has_any else "No checkpoint yet; start again: "
        how += f"python -m framework {resume_arguments(run_dir)}"
    return f"\nInterrupted; every process has ended. {how}"


def resume_arguments(run_dir: RunDir) -> str:
    """Return the arguments that resume a run, with the typed `path.outputs`: only below it is the run the user's."""
    typed = (read_object(run_dir.run_file) or {}).get("overrides", [])
    outputs = [shlex.quote(text) for text in typed if key_of(text) in ("path", "path.outputs")]
    return " ".join([resume_argument(display_path(run_dir.path)), *outputs])


def tensorboard_command(folder: Path) -> str:
    """Return the command that shows the curves of every run in `folder`."""
    return f"tensorboard --logdir {shlex.quote(display_path(folder))}"


def _metrics_by_step(results: Mapping[str, Any]) -> list[str]:
    """Return a table of the metrics of the best and the last validated step; the tested weights are one of them."""
    columns: dict[int, tuple[list[str], dict[str, float]]] = {}
    for name in ("best", "last", "test"):
        found = results.get(name)
        if found is not None:
            labels, metrics = columns.setdefault(found["step"], ([], {}))
            labels += [] if name == "test" else [name]
            metrics |= found["metrics"]
    if not columns:
        return []
    rows = [["", *(f"{' and '.join(labels)} (step {step:,})".lstrip() for step, (labels, _) in columns.items())]]
    for name in dict.fromkeys(name for _, metrics in columns.values() for name in metrics):
        cells = (f"{metrics[name]:.4f}" if name in metrics else "–" for _, metrics in columns.values())
        rows.append([f"{name:<19}", *cells])
    return format_table(rows).splitlines()

"""`submit.format=slurm`: a batch script whose tasks are the ranks, submitted by sbatch."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from framework.jobs.submit.engine import Engine, shell_outputs, started_mistakes

# Shell lines that come first; not an option of sbatch.
_SETUP = "setup"
# What decides them.
_DECIDED = {"nodes": "topology.nnodes", "ntasks-per-node": "topology.procs_per_node", "ntasks": "topology.nnodes"}
# Other ways to ask for GPUs.
_OTHER_GPUS = ("gpus", "gpus-per-task", "gres")

_JOB = """\
job=$SLURM_JOB_ID
if [[ -n $SLURM_ARRAY_TASK_ID ]]; then
  # SLURM_JOB_ID of one task of an array is also the name of the whole array.
  job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi"""
_SECRET = """\
# Only the tasks of this job have it.
export FRAMEWORK_RDZV_SECRET=$(head -c 24 /dev/urandom | base64)"""
_CPUS = """\
# From SLURM 22.05 on, srun doesn't take it over from sbatch.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"""
_REQUEUE = """\
status=$?
# 75: stopped with a checkpoint, which the next start continues.
if ((status == 75)); then
  scontrol requeue "$job"
fi
exit "$status"
"""


class Slurm(Engine):
    """A batch script. When its time is nearly up, SLURM signals its tasks, which save; then it is requeued."""

    program = "sbatch"
    kind = "SLURM job"

    def mistakes(self) -> Iterator[str]:
        submission = self.submission
        if submission.topology.world_size > 1 and not self.submission.is_worker:
            # A single task isn't a rank: the command starts its own.
            yield from started_mistakes(submission, starter="srun")
        yield from self._option_mistakes()

    def text(self) -> str:
        options = self._options
        lines = ["#!/bin/bash", *_directives(options), ""]
        lines += self._setup
        if self.submission.topology.world_size > 1 and not self.submission.is_worker:
            lines.append(_SECRET)
        if "cpus-per-task" in options:
            lines.append(_CPUS)
        lines += [_JOB, f"srun {self._command}", _REQUEUE]
        return "\n".join(lines)

    def submit(self, text: str) -> str:
        printed = self.call("--parsable", given=text, prints=False)
        # It may be followed by the name of a cluster.
        return printed.strip().partition(";")[0]

    @property
    def _command(self) -> str:
        words = [sys.executable, "-m", "framework", *self.submission.words]
        command = shlex.join(words)
        outputs = self.submission.outputs
        if outputs is not None:
            # A requeued job has the same number.
            command += f" {shell_outputs(outputs, 'job_$job')} resume=auto"
        return command

    @property
    def _setup(self) -> list[Any]:
        lines = self.submission.options.get(_SETUP) or []
        if isinstance(lines, list):
            return lines
        return [lines]

    @property
    def _typed(self) -> dict[str, Any]:
        """The user's options, with the names that sbatch has: they may be typed as `cpus_per_task`, too."""
        typed = {str(name).replace("_", "-"): value for name, value in self.submission.options.items()}
        typed.pop(_SETUP, None)
        return typed

    @property
    def _options(self) -> dict[str, Any]:
        """All options, the user's last."""
        topology = self.submission.topology
        typed = self._typed
        options: dict[str, Any] = {
            "job-name": self.submission.config.recipe,
            "nodes": topology.nnodes,
            "ntasks-per-node": 1 if self.submission.is_worker else topology.procs_per_node,
        }
        if topology.gpus_per_node and not any(name in typed for name in _OTHER_GPUS):
            options["gpus-per-node"] = topology.gpus_per_node
        # SLURM signals the tasks so long before the time of the job is up; they have that long to save.
        options |= {"signal": "USR1@120", "requeue": True, "open-mode": "append"}
        return {**options, **typed}

    def _option_mistakes(self) -> Iterator[str]:
        gpus = self.submission.topology.gpus_per_node
        for name, value in self._typed.items():
            shown = f"submit.slurm.{name.replace('-', '_')}={value}"
            if name in _DECIDED:
                yield f"{shown}: the job's processes are those of the run. Type {_DECIDED[name]} instead."
            elif not re.fullmatch(r"[a-z][a-z0-9-]+", name):
                yield f"{shown}: this isn't the long name of an option of sbatch, such as partition or cpus_per_task."
            elif isinstance(value, Mapping):
                yield f"{shown}: an option of sbatch is a text, a number, true, or a list of these."
            elif not _option_text(value).isprintable():
                yield f"{shown}: an option of sbatch is one line."
            elif name == "gpus-per-node" and str(value).rpartition(":")[2] != str(gpus):
                yield f"{shown}, but the run has {gpus} GPUs on each node. Type trainer.gpus instead, or TYPE:{gpus}."
        for line in self._setup:
            if not isinstance(line, str):
                yield f"submit.slurm.setup has {line!r}: it is a list of lines for the shell."


def _directives(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines by which a script gives sbatch its options. null and false leave an option out."""
    for name, value in options.items():
        if value is True:
            yield f"#SBATCH --{name}"
        elif value is not None and value is not False:
            yield f"#SBATCH --{name}={_quoted(_option_text(value))}"


def _option_text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value)


def _quoted(text: str) -> str:
    """Return a value as sbatch reads it: like the shell, but without variables."""
    if re.fullmatch(r"[\w@%+=:,./\[\]-]+", text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'

"""`submit.format=skypilot`: a task of SkyPilot, one command on each node, submitted as a managed job.

Its fields: https://docs.skypilot.co/en/latest/reference/yaml-spec.html
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from framework.errors import EXIT_STOPPED
from framework.jobs.submit.engine import Engine, lost_outputs, merged, nested, shell_outputs, worker_mistakes, yaml_text

_PORT = 29400
_ACCELERATORS = ("resources", "accelerators")


class SkyPilot(Engine):
    """A task. A managed job whose machines are taken away, or that stops with 75, is started again and resumes."""

    program = "sky"
    kind = "managed job"

    def mistakes(self) -> Iterator[str]:
        submission = self.submission
        yield from worker_mistakes(submission)
        yield from lost_outputs(submission)
        for key in ("run", "num_nodes"):
            if key in submission.options:
                yield f"submit.skypilot.{key} follows from the command. Leave it out."
        gpus = submission.topology.gpus_per_node
        accelerators = nested(submission.options, _ACCELERATORS)
        if gpus and not isinstance(accelerators, str):
            yield (
                f"The run has {gpus} GPUs on each node, and SkyPilot needs to know of which kind: "
                "submit.skypilot.resources.accelerators=H100"
            )
        elif gpus == 0 and accelerators is not None:
            yield f"submit.skypilot.resources.accelerators={accelerators}, but trainer.gpus=0. Leave one of them out."
        elif gpus and ":" in accelerators and accelerators.partition(":")[2] != str(gpus):
            yield (
                f"submit.skypilot.resources.accelerators={accelerators}, but the run has {gpus} GPUs on each node. "
                "Type trainer.gpus instead, and leave the number out."
            )

    def text(self) -> str:
        return yaml_text(self._task)

    @property
    def _task(self) -> dict[str, Any]:
        submission = self.submission
        task: dict[str, Any] = {
            "name": submission.config.recipe.replace("/", "-").replace("_", "-"),
            "num_nodes": submission.topology.nnodes,
            # The folder that the command is typed in, with its recipes.
            "workdir": ".",
            "resources": {"job_recovery": {"recover_on_exit_codes": [EXIT_STOPPED]}},
            "run": f"{self._command}\n",
        }
        task = merged(task, submission.options)
        gpus = submission.topology.gpus_per_node
        if gpus:
            kind = task["resources"]["accelerators"].partition(":")[0]
            task["resources"]["accelerators"] = f"{kind}:{gpus}"
        return task

    def submit(self, text: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "task.yaml")
            file.write_text(text, encoding="utf-8")
            self.call("jobs", "launch", "--yes", "--detach-run", str(file), prints=True)
        return str(self._task["name"])

    @property
    def _command(self) -> str:
        submission = self.submission
        command = shlex.join(["python", "-m", "framework", *submission.words])
        if submission.outputs is not None:
            # Every start of a managed job has the same.
            command += f" {shell_outputs(submission.outputs, '$SKYPILOT_TASK_ID')} resume=auto"
        if submission.topology.nnodes == 1:
            return command
        head = '"$(head -n 1 <<< "$SKYPILOT_NODE_IPS")"'
        return f'{command} topology.node_rank="$SKYPILOT_NODE_RANK" topology.rdzv_endpoint={head}:{_PORT}'

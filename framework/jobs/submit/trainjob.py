"""`submit.format=trainjob`: a TrainJob of Kubeflow Trainer v2, with torchrun in each pod, applied by kubectl.

Its fields: https://www.kubeflow.org/docs/components/trainer/
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from framework.jobs.submit.engine import (
    Engine,
    lost_outputs,
    merged,
    nested,
    outputs_word,
    started_mistakes,
    worker_mistakes,
    yaml_text,
)

# Kubeflow's own runtime for PyTorch.
_RUNTIME = "torch-distributed"
# The names of pods are longer, and have 63 characters at most.
_MAX_NAME = 30
_LIMITS = ("spec", "trainer", "resourcesPerNode", "limits")


class TrainJob(Engine):
    """A manifest. Kubernetes restarts a pod that ends with another status than 0, and torchrun's ranks resume."""

    program = "kubectl"
    kind = "TrainJob"

    def mistakes(self) -> Iterator[str]:
        submission = self.submission
        yield from worker_mistakes(submission)
        yield from started_mistakes(submission, starter="torchrun")
        yield from lost_outputs(submission)
        if nested(submission.options, ("spec", "trainer", "image")) is None:
            yield (
                "A TrainJob needs the image with this project and what it imports: "
                "submit.trainjob.spec.trainer.image=REGISTRY/NAME:TAG"
            )
        for key in ("numNodes", "numProcPerNode", "command", "args"):
            if nested(submission.options, ("spec", "trainer", key)) is not None:
                yield f"submit.trainjob.spec.trainer.{key} follows from the command. Leave it out."

    def text(self) -> str:
        return yaml_text(self._manifest)

    def submit(self, text: str) -> str:
        self.call("apply", "--filename=-", given=text, prints=True)
        return str(self._manifest["metadata"]["name"])

    @cached_property
    def _name(self) -> str:
        """A name that Kubernetes allows, for this job alone."""
        recipe = re.sub(r"[^a-z0-9]+", "-", self.submission.config.recipe.lower()).strip("-")
        if not recipe[:1].isalpha():
            recipe = f"run-{recipe}".strip("-")
        return f"{recipe[:_MAX_NAME].rstrip('-')}-{secrets.token_hex(3)}"

    @property
    def _manifest(self) -> dict[str, Any]:
        submission = self.submission
        name = nested(submission.options, ("metadata", "name")) or self._name
        topology = submission.topology
        trainer: dict[str, Any] = {
            "numNodes": topology.nnodes,
            "numProcPerNode": topology.procs_per_node,
            "command": ["torchrun", "-m", "framework"],
            "args": [_literal(word) for word in self._words(name)],
        }
        has_own_gpus = any("gpu" in str(resource) for resource in nested(submission.options, _LIMITS) or ())
        if topology.gpus_per_node and not has_own_gpus:
            trainer["resourcesPerNode"] = {"limits": {"nvidia.com/gpu": topology.gpus_per_node}}
        manifest = {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": name},
            "spec": {"runtimeRef": {"name": _RUNTIME}, "trainer": trainer},
        }
        return merged(manifest, submission.options)

    def _words(self, name: str) -> list[str]:
        words = list(self.submission.words)
        if self.submission.outputs is not None:
            # A pod that is restarted is of the same job.
            words += [outputs_word(self.submission.outputs, name), "resume=auto"]
        return words


def _literal(word: str) -> str:
    """Return an argument of which Kubernetes expands nothing: `$(NAME)` would be a variable of the container."""
    return word.replace("$(", "$$(")

"""The model of a checkpoint, on the CPU and in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from framework.checkpoint import find, read_manifest
from framework.config.schema import Config
from framework.config.targets import check_targets
from framework.config.topology import Topology
from framework.distributed.context import Context
from framework.engine.assemble import assemble
from framework.engine.builders.adapters import merge_adapters
from framework.optim.precision import PrecisionPlugin
from framework.system.versions import installed_versions
from framework.types import Task

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Source:
    """What is exported."""

    config: Config
    context: Context
    # In eval mode, with the checkpoint's weights.
    model: nn.Module
    task: Task
    precision: PrecisionPlugin
    # Of the checkpoint.
    directory: Path
    step: int
    # Written into files that can hold it.
    metadata: Mapping[str, str]

    @property
    def name(self) -> str:
        return type(self.model).__name__


def load_source(config: Config, *, span: int) -> Source:
    """Return the model of `checkpoint.path` on the CPU. Raises FrameworkError if it can't be built or loaded."""
    check_targets(config)
    directory = find(Path(str(config.checkpoint.path)))
    step = read_manifest(directory).step
    topology = Topology(nnodes=1, procs_per_node=1, gpus_per_node=0, span=span)
    context = Context(topology, 0, 0, 0, devices=(_CPU,) * span, backend="gloo")
    # A file has weights as their shapes say, whatever layout was the fastest to train in.
    config = replace(config, trainer=replace(config.trainer, channels_last=False))
    assembled = assemble(config, context, weights=directory)
    model = assembled.model
    if config.export.merge:
        model = merge_adapters(model)
    model.eval()
    metadata = {
        "recipe": config.recipe,
        "step": str(step),
        "framework_version": installed_versions(["framework"])["framework"],
        "torch_version": str(torch.__version__),
    }
    return Source(config, context, model, assembled.task, assembled.precision, directory, step=step, metadata=metadata)

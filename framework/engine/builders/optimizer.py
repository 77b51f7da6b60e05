"""Build the optimizer, or several, over the parameter groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from framework.config.optimizers import OptimizerConfig
from framework.config.schema import Node
from framework.config.targets import takes
from framework.distributed.sharded import by_mesh
from framework.engine.builders.objects import build_object, wrong_result
from framework.errors import ConfigError
from framework.optim.optimizer import fused_pays, has_evaluation_mode, skip_profiler_mark
from framework.optim.param_groups import ParamGroups
from framework.optim.several import Optimizers


def build_optimizer(
    groups: ParamGroups, model: nn.Module, *, may_fuse: bool = True, total_steps: int | None = None
) -> Optimizer:
    """Return the optimizer over the parameters of `model`, or all of several by name.

    A target that takes `model` or `total_steps` (of the run) gets it.

    Args:
        model: all of it, or the stages of this rank.
        may_fuse: False with a loss scaler, since a fused optimizer doesn't show that it skipped a step, and for sparse
            gradients.

    Raises:
        ConfigError: there is nothing to train.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("No parameter of the model requires a gradient, so there is nothing to train.")
    optimizers = {}
    for config, by_label in groups.groups(model):
        optimizers[config.name] = build_one_optimizer(
            config, by_label, may_fuse=may_fuse, model=model, total_steps=total_steps
        )
    # The only one has no name.
    if "" in optimizers:
        return optimizers[""]
    return Optimizers(optimizers)


def build_one_optimizer(
    config: OptimizerConfig, groups: Mapping[str, Sequence[nn.Parameter]], *, may_fuse: bool = True, **offered: Any
) -> Optimizer:
    """Return one optimizer. groups: its parameters by the labels of their groups."""
    node = config.node
    parameters = [parameter for group in groups.values() for parameter in group]
    params: list[Any] = parameters
    if config.name or config.groups:
        # The first label is that of parameters which no pattern matches.
        options_of_groups: list[Mapping[str, Any]] = [{}]
        options_of_groups += [group.options for group in config.groups]
        options = dict(zip(config.labels, options_of_groups, strict=True))
        params = []
        for label, group_parameters in groups.items():
            params.append({"params": list(group_parameters), **options[label], "name": label})
    implementation = _implementation(node, parameters, may_fuse=may_fuse)
    optimizer = build_object(config.key, node, params, **implementation, **offered)
    if not isinstance(optimizer, Optimizer):
        raise wrong_result(config.key, node, optimizer, expected="a torch.optim.Optimizer")
    skip_profiler_mark(optimizer)
    if has_evaluation_mode(optimizer):
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer


def _implementation(node: Node, parameters: Sequence[nn.Parameter], *, may_fuse: bool) -> dict[str, bool]:
    """Return the keyword for the fastest implementation of torch's optimizers, unless the node chooses one.

    It is fused if that is faster. On a CPU, `foreach=False` saves the check that torch's optimizers otherwise make in
    every step: 2 % of a toy step.
    """
    if {"fused", "foreach", "differentiable"} & node.keys():
        return {}
    takes_foreach = takes(node, "foreach")
    # Neither `fused` nor `foreach` takes plain tensors and shards together.
    if len(by_mesh(parameters)) > 1:
        return {"foreach": False} if takes_foreach else {}
    if may_fuse and takes(node, "fused") and fused_pays(parameters):
        return {"fused": True}
    devices = {parameter.device.type for parameter in parameters}
    if takes_foreach and devices == {"cpu"}:
        return {"foreach": False}
    return {}

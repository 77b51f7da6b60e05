"""How many bytes the training state of a rank takes: tensors, optimizer states and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from framework.config.optimizers import OptimizerConfig, optimizer_configs
from framework.distributed.sharded import local_tensor, num_parameters
from framework.engine.builders.optimizer import build_one_optimizer
from framework.engine.setup import RankSetup
from framework.strategies.base import Strategy
from framework.system.rank_log import logger
from framework.training.trainer import Trainer
from framework.types import hooks

# The shape of a small parameter to try an optimizer on. One with two dimensions has the shape (3, 5).
_PROBE_SHAPE = (3, 5, 7, 11, 13)
# In a checkpoint: the generators of each rank, on the CPU.
_BYTES_PER_RANK = 16_000
# In a checkpoint: the configuration, the manifest, progress, and what files have between tensors.
_REST_BYTES = 12_000


# The state of a rank


@dataclass(frozen=True)
class StateSizes:
    """Bytes of this rank's training state, and of a checkpoint of all ranks."""

    # With buffers.
    weights: int
    gradients: int
    # None: not known before the first step.
    optimizer: int | None
    checkpoint: int


def state_sizes(setup: RankSetup, trainer: Trainer) -> StateSizes:
    """Return the sizes; those of optimizer and checkpoint are estimates."""
    model = trainer.state.bare_model
    parameters = list(model.parameters())
    # What this rank has of each parameter: a part if it is sharded.
    shards = [local_tensor(parameter) for parameter in parameters]
    trained_shards = [local_tensor(parameter) for parameter in parameters if parameter.requires_grad]

    # Both count sharded parameters as wholes.
    optimizer = _whole_optimizer_bytes(setup, trainer)
    checkpoint = checkpoint_bytes(
        model,
        optimizer or 0,
        world_size=setup.context.world_size,
        averages=len(hooks(trainer.state.callbacks.values(), "evaluation_weights")),
        strategy=setup.strategy,
        only_trained=setup.config.checkpoint.only_trained,
    )

    num_here = max(sum(parameter.numel() for parameter in parameters), 1)
    if optimizer is not None:
        num_local = sum(shard.numel() for shard in shards)
        optimizer = round(optimizer * num_local / num_here)
    return StateSizes(
        weights=tensor_bytes([*shards, *model.buffers()]),
        gradients=tensor_bytes(trained_shards),
        optimizer=optimizer,
        # If the model is cut into stages, those of other ranks are in the checkpoint, too.
        checkpoint=checkpoint * num_parameters(model) // num_here,
    )


def _whole_optimizer_bytes(setup: RankSetup, trainer: Trainer) -> int | None:
    """Return what the trainer's optimizers keep of unsharded parameters; None if that isn't known before a step."""
    size = 0
    configs = optimizer_configs(setup.config.optimizer)
    try:
        # Without names, one option of the configuration made all optimizers.
        state = trainer.state
        optimizers = state.optimizers if configs[0].name else [state.optimizer]
        for config, optimizer in zip(configs, optimizers, strict=True):
            parameters: list[nn.Parameter] = []
            for group in optimizer.param_groups:
                parameters += group["params"]
            size += optimizer_bytes(config, parameters, model=trainer.state.bare_model)
    except Exception as error:
        # A user's optimizer may raise anything; training shows if it works.
        logger.info("the size of the optimizer's state isn't known before the first step: %r", error)
        return None
    return size


# Tensors


def tensor_bytes(tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> int:
    """Return the tensors' bytes; dtype: the type to count in, if not their own."""
    return sum(tensor.numel() * (dtype or tensor.dtype).itemsize for tensor in tensors)


def average_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of an average of the tensors, whose floats are float32 or wider."""
    return sum(tensor.numel() * average_dtype(tensor).itemsize for tensor in tensors)


def average_dtype(tensor: Tensor) -> torch.dtype:
    """Return the type that an average of the tensor has."""
    if tensor.is_floating_point() and tensor.itemsize < torch.float32.itemsize:
        return torch.float32
    return tensor.dtype


# Optimizers


def optimizer_bytes(config: OptimizerConfig, parameters: Sequence[nn.Parameter], *, model: nn.Module) -> int:
    """Return the bytes that an optimizer keeps from step to step for `parameters`; see `optimizer_state_bytes`."""

    def make(probes: list[nn.Parameter]) -> Optimizer:
        return build_one_optimizer(config, {config.name: probes}, model=model)

    return optimizer_state_bytes(make, parameters)


def optimizer_state_bytes(make: Callable[[list[nn.Parameter]], Optimizer], parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes that an optimizer keeps from step to step, found by a step on small parameters: probes.

    Each tensor of its state is assumed to have the size of its parameter, or a fixed one. parameters: on any device.
    Raises what the optimizer raises.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return 0
    probes = {_kind(parameter): _probe(parameter) for parameter in trained}
    # Training must draw the same numbers afterwards.
    with torch.random.fork_rng(devices=[]):
        optimizer = make(list(probes.values()))
        for group in optimizer.param_groups:
            # Those of the model itself, if the target has made the groups from that.
            kinds = dict.fromkeys(_kind(parameter) for parameter in group["params"])
            group["params"] = [probes[kind] for kind in kinds if kind in probes]
        for probe in probes.values():
            probe.grad = torch.zeros_like(probe)
        optimizer.step()

    size = 0
    for parameter in trained:
        probe = probes[_kind(parameter)]
        for value in optimizer.state[probe].values():
            if isinstance(value, Tensor):
                has_size_of_parameter = value.numel() == probe.numel()
                num_values = parameter.numel() if has_size_of_parameter else value.numel()
                size += num_values * value.element_size()
    return size


def _kind(parameter: Tensor) -> tuple[int, torch.dtype]:
    """Return what parameters must have in common for one probe to stand for all of them."""
    return min(parameter.dim(), len(_PROBE_SHAPE)), parameter.dtype


def _probe(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.zeros(_PROBE_SHAPE[: parameter.dim()], dtype=parameter.dtype))


# Checkpoints


def checkpoint_bytes(
    model: nn.Module,
    optimizer_size: int,
    *,
    world_size: int,
    averages: int,
    strategy: Strategy,
    only_trained: bool = False,
) -> int:
    """Return about how many bytes a checkpoint takes on the disk.

    Args:
        model: on any device.
        optimizer_size: what `optimizer_state_bytes` returns.
        averages: how many callbacks evaluate with weights of their own.
        strategy: of the run; some keep every rank's weights, copies of them, or gradients.
        only_trained: frozen parameters are left out.
    """
    costs = strategy.costs()
    state = model.state_dict(keep_vars=True).values()
    # Tied weights are in it several times, and are saved once.
    tensors = {id(value): value for value in state if isinstance(value, Tensor)}
    weight_bytes = tensor_bytes(tensors.values())
    trained_bytes = tensor_bytes(parameter for parameter in model.parameters() if parameter.requires_grad)
    if only_trained:
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        weight_bytes -= tensor_bytes(frozen)
    averages_bytes = averages * average_bytes(tensors.values())

    num_replicas = 1
    if strategy.replicas_differ:
        num_replicas = world_size
    replica_bytes = optimizer_size + averages_bytes
    if averages or num_replicas > 1:
        # The weights that are trained, beside those to evaluate.
        replica_bytes += weight_bytes
    shared_bytes = (1 + costs.weight_copies) * weight_bytes
    gradient_bytes = world_size * costs.gradients_kept * trained_bytes
    return shared_bytes + gradient_bytes + num_replicas * replica_bytes + world_size * _BYTES_PER_RANK + _REST_BYTES

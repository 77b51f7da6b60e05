"""How many bytes tensors, optimizer states and checkpoints take, and if the disk has room for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from framework.checkpoint.direct_io import BLOCK_BYTES
from framework.checkpoint.lookup import complete_steps
from framework.distributed.sharded import num_parameters
from framework.errors import RunError
from framework.monitoring.rank_log import logger, warn
from framework.strategies.base import Strategy
from framework.system.files import free_bytes
from framework.system.formatting import format_bytes
from framework.training import build
from framework.types import hooks

if TYPE_CHECKING:
    from framework.training.rank_setup import RankSetup
    from framework.training.trainer import Trainer

_PROBE = (3, 5, 7, 11, 13)
_HEADER_BYTES = 200  # what `torch.save` puts between two tensors' data
_GENERATORS_BYTES = 20_000  # of one rank, on the CPU
_REST_BYTES = 92_000  # configuration, manifest, progress, and the overhead of each file


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def optimizer_state_bytes(
    make: Callable[[list[nn.Parameter]], Optimizer], parameters: Iterable[nn.Parameter]
) -> list[int]:
    """Return the bytes of each tensor that an optimizer keeps from step to step, found by a step on small parameters.

    Each tensor of its state is assumed to have the size of its parameter, or a fixed one. parameters: on any device.
    Raises what the optimizer raises.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    probes = {_kind(each): nn.Parameter(torch.zeros(_PROBE[: each.dim()], dtype=each.dtype)) for each in trained}
    if not probes:
        return []
    with torch.random.fork_rng(devices=[]):  # training must draw the same numbers afterwards
        optimizer = make(list(probes.values()))
        for probe in probes.values():
            probe.grad = torch.zeros_like(probe)
        optimizer.step()
    sizes = []
    for parameter in trained:
        probe = probes[_kind(parameter)]
        for kept in optimizer.state[probe].values():
            if isinstance(kept, Tensor):
                count = parameter.numel() if kept.numel() == probe.numel() else kept.numel()
                sizes.append(count * kept.element_size())
    return sizes


def checkpoint_bytes(
    model: nn.Module, optimizer_sizes: Iterable[int], *, world_size: int, averages: int, strategy: Strategy
) -> int:
    """Return about how many bytes a checkpoint takes on the disk, within a few per cent.

    Args:
        model: on any device.
        optimizer_sizes: see `optimizer_state_bytes`.
        averages: how many callbacks evaluate with weights of their own.
        strategy: of the run; some keep every rank's weights, copies of them, or gradients.
    """
    tied_once = {id(each): each for each in model.state_dict(keep_vars=True).values() if isinstance(each, Tensor)}
    weight_bytes = sum(_in_blocks(tensor_bytes([each])) for each in tied_once.values())
    trained_bytes = tensor_bytes(each for each in model.parameters() if each.requires_grad)
    own = sum(map(_in_blocks, optimizer_sizes))
    replicas = world_size if strategy.replicas_differ else 1
    if averages or replicas > 1:
        own += (averages + 1) * weight_bytes
    kept = (1 + strategy.weight_copies) * weight_bytes + world_size * strategy.gradients_kept * trained_bytes
    return kept + replicas * own + world_size * _GENERATORS_BYTES + _REST_BYTES


def _kind(parameter: Tensor) -> tuple[int, torch.dtype]:
    return min(parameter.dim(), len(_PROBE)), parameter.dtype


def _in_blocks(size_bytes: int) -> int:
    """Return what a tensor takes in a file of a checkpoint, where it begins at a multiple of a block."""
    return -(-(size_bytes + _HEADER_BYTES) // BLOCK_BYTES) * BLOCK_BYTES


# Room on the disk


def check_disk_space(rank: RankSetup, trainer: Trainer) -> None:
    """On rank 0, warn if the disk has no room for as many checkpoints as are kept at a time.

    Raises RunError if not even one fits.
    """
    folder, settings = rank.run_dir.checkpoints, rank.config.checkpoint
    free = free_bytes(folder) if settings.enabled and rank.context.is_main else None
    if free is None:
        return
    existing = [manifest for _, manifest in complete_steps(folder).values()]
    if existing:  # of the same training: about as large as those to come
        size = sum(facts.size_bytes for facts in existing[-1].files.values())
    else:
        size = _estimated_bytes(rank, trainer)
    if free < size:
        raise RunError(
            f"There is no room for a checkpoint: one takes about {format_bytes(size)}, and {format_bytes(free)} are "
            f"free in {folder}.\nMake room, choose another disk with path.outputs=FOLDER, or train without "
            "checkpoints: checkpoint=none"
        )
    best = max(settings.save_top_k, 0) if settings.monitor is not None else 0
    kept = best + settings.save_last_k + 1
    if free < size * (kept - len(existing)):
        warn(
            f"{format_bytes(free)} are free in {folder}, and {kept} checkpoints of about {format_bytes(size)} are kept "
            "at a time: the newest, the best ones and the one being written. Make room, or lower "
            "checkpoint.save_last_k or save_top_k: what doesn't fit isn't saved"
        )


def _estimated_bytes(rank: RankSetup, trainer: Trainer) -> int:
    model = trainer.state.bare_model
    try:
        sizes = optimizer_state_bytes(partial(build.build_optimizer, rank.config.optimizer), model.parameters())
    except Exception as error:  # a user's optimizer may raise anything; training shows if it works
        logger.info("the size of the optimizer's state isn't known before the first step: %r", error)
        sizes = []
    estimated = checkpoint_bytes(
        model,
        sizes,
        world_size=rank.context.world_size,
        averages=len(hooks(trainer.state.callbacks.values(), "evaluation_weights")),
        strategy=rank.strategy,
    )
    here = sum(each.numel() for each in model.parameters())
    return estimated * num_parameters(model) // max(here, 1)  # with several stages, this rank has only some of them

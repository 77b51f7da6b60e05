"""Gradient clipping: `trainer.gradient_clip_val` and `gradient_clip_algorithm`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from framework.config.schema import TrainerConfig
from framework.distributed.sharded import by_mesh, total_norm


def clip_gradients(
    parameters: Sequence[Tensor], settings: TrainerConfig, *, norm_over_ranks: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """Clip the gradients in place as the settings say, and return their 2-norm before; doesn't wait for the device.

    They must be unscaled and synchronised. If they are sharded, every rank must call it.

    Args:
        norm_over_ranks: `Strategy.total_norm`: returns the norm over all ranks, given that of this rank's gradients.

    Returns:
        The norm, on the first gradient's device; None if elements are clipped.
    """
    clip_value = settings.gradient_clip_val
    if clip_value is not None and settings.gradient_clip_algorithm == "value":
        for group in by_mesh(parameters):
            nn.utils.clip_grad_value_(group, clip_value)
        return None

    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    with torch.no_grad():
        norm = norm_over_ranks(total_norm(gradients))
    if clip_value is not None:
        for group in by_mesh(parameters):
            nn.utils.clip_grads_with_norm_(group, clip_value, norm)
    return norm

"""Compute BatchNorm statistics for averaged weights, which no forward pass of the training has used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

# The base of all BatchNorm layers, SyncBatchNorm included; `torch.optim.swa_utils.update_bn` looks for it too.
from torch.nn.modules.batchnorm import _BatchNorm

from framework.data.source import SourceLoader
from framework.distributed.collectives import sum_over_ranks
from framework.training.evaluation import eager
from framework.types import MicroBatch

if TYPE_CHECKING:
    from framework.distributed.context import Context
    from framework.training.train_state import TrainState


@torch.no_grad()
def batchnorm_statistics(
    state: TrainState, repeat_window: Callable[..., None], *, takes_info: bool
) -> dict[str, Tensor]:
    """Return the buffers of the BatchNorm layers for the weights to evaluate, by their names in the bare model.

    They are the mean of the statistics of all micro-batches of the last epoch, over all ranks, each with the same
    weight. Layers in evaluation mode, whose statistics are frozen, are left out. The model, the task and all generators
    stay as they are. Every rank must call it between two epochs.

    None are computed with a Source, whose batches can't be repeated.

    Args:
        repeat_window: Computes a window, and calls `begin` with each micro-batch before.
        takes_info: The task may exchange what it computes, so each rank computes its stand-ins, too.
    """
    if isinstance(state.train_loader, SourceLoader):
        return {}
    layers: dict[str, Any] = {}
    for name, module in state.bare_model.named_modules():
        if isinstance(module, _BatchNorm) and module.training and module.running_mean is not None:
            layers[name] = module
    if not layers:
        return {}
    sums = {name: _Sums(layer) for name, layer in layers.items()}
    mixes_samples = state.strategy.mixes_samples

    def begin(micro: MicroBatch) -> bool:
        is_stand_in = micro.num_samples == 0
        for layer_sums in sums.values():
            # Layers that exchange statistics have those of all samples, whatever this rank has.
            layer_sums.counts = mixes_samples or not is_stand_in
        return not is_stand_in or mixes_samples or takes_info

    with (
        state.evaluation_weights(),
        state.without_side_effects(),
        state.slots.set_aside(),
        _recorded(layers, sums),
        eager(),
    ):
        for window in state.train_loader.epoch(state.progress.last_epoch):
            repeat_window(window, begin=begin)
    statistics: dict[str, Tensor] = {}
    for name, (count, mean, variance) in _means_over_ranks(sums, state.context).items():
        prefix = f"{name}." if name else ""
        statistics[f"{prefix}num_batches_tracked"] = count
        statistics[f"{prefix}running_mean"] = mean
        statistics[f"{prefix}running_var"] = variance
    return statistics


@final
class _Sums:
    """The statistics of a layer's batches, summed in float32 or wider: bfloat16 would lose the later ones."""

    def __init__(self, layer: Any) -> None:
        # False while a stand-in is computed.
        self.counts = True
        dtype = torch.promote_types(layer.running_mean.dtype, torch.float32)
        self.count = torch.zeros(1, dtype=dtype, device=layer.running_mean.device)
        self.mean = torch.zeros_like(layer.running_mean, dtype=dtype)
        self.variance = torch.zeros_like(layer.running_var, dtype=dtype)

    def add(self, layer: Any, _inputs: Any, _output: Any) -> None:
        """Add the statistics of the layer's last batch. A forward hook."""
        if not self.counts:
            return
        self.count += 1
        self.mean += layer.running_mean
        self.variance += layer.running_var


@contextmanager
def _recorded(layers: dict[str, Any], sums: dict[str, _Sums]) -> Iterator[None]:
    """Sum up the statistics of each batch: with a momentum of 1, a layer keeps those of its last batch alone."""
    momenta = {name: layer.momentum for name, layer in layers.items()}
    handles = [layer.register_forward_hook(sums[name].add) for name, layer in layers.items()]
    for layer in layers.values():
        layer.momentum = 1.0
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for name, layer in layers.items():
            layer.momentum = momenta[name]


def _means_over_ranks(sums: dict[str, _Sums], context: Context) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return each layer's number of batches, mean and variance over the batches of all ranks.

    A layer that saw no batch keeps the statistics of a new one.
    """
    parts: list[Tensor] = []
    for layer_sums in sums.values():
        parts += [layer_sums.count, layer_sums.mean, layer_sums.variance]
    flat = torch.cat([part.to(context.device) for part in parts])
    sizes = [part.numel() for part in parts]
    # As many tensors as parts, in the same order.
    totals = iter(sum_over_ranks(flat, context).split(sizes))
    means = {}
    for name in sums:
        count = next(totals).squeeze()
        mean = next(totals)
        variance = next(totals)
        if count == 0:
            means[name] = (count, torch.zeros_like(mean), torch.ones_like(variance))
        else:
            means[name] = (count, mean / count, variance / count)
    return means

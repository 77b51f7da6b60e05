"""The toy network split over the devices of one process, with one layer on each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from framework import ConfigError

INPUTS, HIDDEN, OUTPUTS = 10, 10, 5


class ToyModelParallel(nn.Module):
    """k linear layers on k ≥ 2 devices: k − 1 times 10→10 with ReLU, then 10→5. With k = 2, it is the toy network.

    Weights are initialised on the CPU in the order of the layers, so they depend on the seed only.

    Args:
        devices: One device per layer, given by the framework; a device may occur twice. The input may be on any
            device, the output is on the last one.
    """

    def __init__(self, devices: Sequence[torch.device | str]) -> None:
        super().__init__()
        self.devices = [torch.device(device) for device in devices]
        if len(self.devices) < 2:
            raise ConfigError(
                f"ToyModelParallel got {len(self.devices)} device(s) and needs at least 2, one for each layer.\n"
                "Set topology.gpus_per_process=2 (or topology=model_parallel); without GPUs, that is the CPU twice."
            )
        self.relu = nn.ReLU()
        sizes = [HIDDEN] * (len(self.devices) - 1) + [OUTPUTS]
        for number, (size, device) in enumerate(zip(sizes, self.devices, strict=True), start=1):
            layer = nn.Linear(INPUTS if number == 1 else HIDDEN, size, device="cpu")
            self.add_module(f"net{number}", layer.to(device))

    def stages(self, number: int) -> list[nn.Module]:
        """Return one layer with its ReLU per device, for strategy=pipeline."""
        if number != len(self.devices):
            raise ConfigError(f"ToyModelParallel has {len(self.devices)} layers and can't be cut into {number} stages.")
        layers = [self.get_submodule(f"net{layer}") for layer in range(1, number + 1)]
        return [nn.Sequential(layer, self.relu) for layer in layers[:-1]] + layers[-1:]

    def forward(self, x: Tensor) -> Tensor:
        last = len(self.devices)
        for number, device in enumerate(self.devices, start=1):
            x = self.get_submodule(f"net{number}")(x.to(device))
            if number < last:
                x = self.relu(x)
        return x

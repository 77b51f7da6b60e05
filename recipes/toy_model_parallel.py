"""The toy network split over the devices of one process, with one layer on each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from framework import ConfigError

INPUTS = 10
HIDDEN = 10
OUTPUTS = 5


class ToyModelParallel(nn.Module):
    """One linear layer per device: 10→10 with ReLU, and 10→5 on the last. With two devices it is the toy network.

    Weights are initialised on the CPU in the order of the layers, so they depend on the seed only.

    Args:
        devices: Two devices or more, given by the framework; a device may occur twice. The input may be on any device,
            the output is on the last one.
    """

    def __init__(self, devices: Sequence[torch.device | str]) -> None:
        super().__init__()
        self.devices = [torch.device(device) for device in devices]
        self.num_layers = len(self.devices)
        if self.num_layers < 2:
            raise ConfigError(
                f"ToyModelParallel got {self.num_layers} device(s) and needs at least 2, one for each layer.\n"
                "Set topology.gpus_per_process=2 (or topology=model_parallel); without GPUs, that is the CPU twice."
            )
        self.relu = nn.ReLU()
        for number, device in enumerate(self.devices, start=1):
            inputs = INPUTS if number == 1 else HIDDEN
            outputs = OUTPUTS if number == self.num_layers else HIDDEN
            layer = nn.Linear(inputs, outputs, device="cpu")
            self.add_module(f"net{number}", layer.to(device))

    def layer(self, number: int) -> nn.Module:
        return self.get_submodule(f"net{number}")

    def forward(self, x: Tensor) -> Tensor:
        for number, device in enumerate(self.devices, start=1):
            x = self.layer(number)(x.to(device))
            if number < self.num_layers:
                x = self.relu(x)
        return x

    def stages(self, number: int) -> list[nn.Module]:
        """Return one layer with its ReLU per device, for strategy=pipeline."""
        if number != self.num_layers:
            raise ConfigError(f"ToyModelParallel has {self.num_layers} layers and can't be cut into {number} stages.")
        stages: list[nn.Module] = []
        for layer_number in range(1, self.num_layers):
            stages.append(nn.Sequential(self.layer(layer_number), self.relu))
        stages.append(self.layer(self.num_layers))
        return stages

"""A callback that changes frozen weights, as a momentum encoder does."""

from __future__ import annotations

import torch

from framework import Callback, FitInfo, StepInfo


class Drift(Callback):
    """Add 1 to net1's frozen bias after every step."""

    def on_fit_start(self, info: FitInfo) -> None:
        self.model = info.model

    @torch.no_grad()
    def on_train_step_end(self, info: StepInfo) -> None:
        self.model.get_parameter("net1.bias").add_(1)

"""A model that notices if it is called once more than it is trained."""

from __future__ import annotations

from torch import Tensor, nn

from framework import FitInfo


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 5))
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        output: Tensor = self.net(x) * (1 + self.num_calls / 100)
        return output


class CountCalls:
    """Counts the model's forwards in training by a hook, and prints how many there were."""

    def on_fit_start(self, info: FitInfo) -> None:
        self.num_calls = 0
        info.model.register_forward_hook(self._count)

    def _count(self, model: nn.Module, inputs: object, output: object) -> None:
        self.num_calls += model.training

    def on_fit_end(self) -> None:
        print(f"{self.num_calls} forwards")


class Uncopyable(Counting):
    def __deepcopy__(self, memo: object) -> Counting:
        raise TypeError("holds a lock")

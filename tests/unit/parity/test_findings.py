"""What the notes of three trainings say, for models, losses and optimizers that are the same and that aren't."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.unit.parity_runs import Training, points

pytestmark = pytest.mark.usefixtures("own_state")  # each simulated rank has generators of its own


def network(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), *between, nn.ReLU(), nn.Linear(16, 4))


def adam(parameters: Iterable[Tensor], *, world_size: int) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


class Around(nn.Module):
    """Two layers and a function of its own between them."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.function = nn.Linear(8, 16), nn.Linear(16, 4), function

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.two(self.function(self.one(x)))
        return output


class SequenceFirst(nn.Module):
    """Sequence, sample, features; then several rows for each sample, place by place; dropout in torch's own ways."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(2, 16, num_layers=2, dropout=0.3)
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        size = len(x)
        x, _ = self.recurrent(x.reshape(size, 4, 2).transpose(0, 1))
        x, _ = self.attention(x, x, x)
        output: Tensor = self.out(x.reshape(-1, 16)).reshape(4, size, 4).mean(dim=0)
        return output


class Pairs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.T


class Similar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pairs = nn.Linear(8, 4), Pairs()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        output: Tensor = x + self.pairs(x).mean(dim=1, keepdim=True)
        return output


class Counting(nn.Module):
    """A running mean that nothing is computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.mean, Tensor)
        self.mean.lerp_(x.mean(dim=0), 0.1)
        output: Tensor = self.out(x)
        return output


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


class NoisySGD(torch.optim.SGD):
    """Adds noise of its own to weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter in (each for group in self.param_groups for each in group["params"]):
            parameter.add_(0.01 * torch.randn_like(parameter))


def noisy(parameters: Iterable[Tensor], *, world_size: int) -> torch.optim.Optimizer:
    return NoisySGD(parameters, lr=1e-3)


def classes(model: nn.Module, x: Tensor, y: Tensor, **keywords: Any) -> Tensor:
    return functional.cross_entropy(model(x), y.argmax(dim=1), **keywords)


def in_float64(size: int) -> tuple[Tensor, Tensor]:
    x, y = points(size)
    return x.double(), y.double()


THE_SAME = {
    "sgd": Training(network),
    "adam": Training(network, optimizer=adam),
    "accumulated": Training(network, accumulate=2),
    "uneven": Training(network, batches=(16, 16, 7), optimizer=adam),
    "a rank without samples": Training(network, batches=(16, 1), accumulate=2),
    "dropout off": Training(lambda: network(nn.Dropout(0.5))),
    "sequence first": Training(SequenceFirst, optimizer=adam, batches=(12,)),
    "rows for each sample": Training(
        lambda: nn.Sequential(
            nn.Unflatten(1, (4, 2)),
            nn.Flatten(0, 1),
            nn.Linear(2, 6),
            nn.Unflatten(0, (-1, 4)),
            nn.Flatten(),
            nn.Linear(24, 4),
        )
    ),
    "float64": Training(lambda: network().double(), data=in_float64, precision="64-true"),
    "batch norm in eval mode": Training(lambda: network(nn.BatchNorm1d(16).eval())),
}


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("training", THE_SAME.values(), ids=THE_SAME)
def test_the_same(tmp_path: Path, training: Training, processes: int) -> None:
    found = training.findings(tmp_path, processes=processes)
    assert found["departure"] is None
    assert (found["same"], found["layer_alone"], found["unsure"]) == (True, None, [])
    assert found["steps"] == len(training.batches)
    for part in ("layers", "gradients", "weights"):
        assert found["parts"][part]["compared"] > 1
        # Far from what is allowed: another sum's order, another run's luck must not turn it over.
        assert found["parts"][part]["greatest"]["difference"] < 0.5 * found["parts"][part]["greatest"]["allowed"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_every_layer_is_compared(tmp_path: Path) -> None:
    found = Training(SequenceFirst, batches=(12,)).findings(tmp_path)
    # The model itself, two that hold others or weights of their own, and the last; `out_proj` is never called.
    assert found["parts"]["layers"]["compared"] == 4
    assert found["dropouts"] == 2


DEPARTING = {
    "batch_norm": Training(lambda: network(nn.BatchNorm1d(16))),
    "batch_norm adam": Training(lambda: network(nn.BatchNorm1d(16)), optimizer=adam, accumulate=2),
    "random": Training(lambda: network(Noise())),
    "random between": Training(lambda: Around(lambda x: functional.dropout(x, 0.3))),
    "mixing": Training(lambda: Around(lambda x: x - x.mean(dim=0))),
    "pairs": Training(Similar),
    "sum": Training(network, loss=lambda model, x, y: functional.mse_loss(model(x), y, reduction="sum")),
    "loss": Training(
        network, loss=lambda model, x, y: classes(model, x, y, weight=torch.tensor([1.0, 5, 1, 1])), batches=(12, 12)
    ),
    "loss ignoring": Training(
        network, loss=lambda model, x, y: classes(model, x, y, ignore_index=1), batches=(12, 12), optimizer=adam
    ),
    "uneven": Training(
        network,
        loss=lambda model, x, y: functional.mse_loss(model(x), y) * (1.5 if len(x) % 2 else 1.0),
        batches=(12, 11),
    ),
    "factor": Training(network, loss=lambda model, x, y: functional.mse_loss(model(x), y) * len(x) ** 0.5),
    "task_random": Training(network, loss=lambda model, x, y: functional.mse_loss(model(x), y + torch.randn_like(y))),
    "input_random": Training(network, loss=lambda model, x, y: functional.mse_loss(model(x + torch.randn_like(x)), y)),
    "input": Training(network, loss=lambda model, x, y: functional.mse_loss(model(x - x.mean(dim=0)), y)),
    "optimizer": Training(network, optimizer=lambda p, world_size: torch.optim.Adam(p, lr=1e-3 * world_size)),
    "replicas": Training(network, optimizer=noisy),
    "buffers": Training(Counting),
    "backward": Training(
        lambda: Around(torch.tanh),
        loss=lambda model, x, y: functional.mse_loss(model(x), y) + 0.01 * model.one(x).square().sum(),  # type: ignore[operator]
    ),
}


@pytest.mark.parametrize("name", DEPARTING)
def test_what_departs_is_found_with_its_reason(tmp_path: Path, name: str) -> None:
    found = DEPARTING[name].findings(tmp_path)
    assert not found["same"]
    assert found["departure"]["reason"] == name.partition(" ")[0]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


@pytest.mark.parametrize(
    ("name", "kind", "module", "type_"),
    [
        ("batch_norm", "left", "1", "BatchNorm1d"),
        ("random", "left", "1", "Noise"),
        ("random between", "entered", "two", "Linear"),
        ("mixing", "entered", "two", "Linear"),
        ("pairs", "left", "pairs", "Pairs"),
        ("input", "entered", "", "Sequential"),
    ],
)
def test_the_first_layer_to_depart_is_named(tmp_path: Path, name: str, kind: str, module: str, type_: str) -> None:
    layer = DEPARTING[name].findings(tmp_path)["departure"]["layer"]
    assert (layer["kind"], layer["name"], layer["type"]) == (kind, module, type_)


def test_gradients_that_are_rounding_are_no_departure_but_said(tmp_path: Path) -> None:
    """Adam makes whole steps of a gradient that in truth is 0."""
    found = Training(Softmaxed, optimizer=adam).findings(tmp_path, processes=3)
    assert found["same"]
    assert found["unsure"] == ["shift"]


class Softmaxed(nn.Module):
    """A softmax doesn't change with what is added to all its values."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((1,), 0.3))
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.two(torch.softmax(self.one(x) + self.shift, dim=1))
        return output


def test_weights_that_begin_differently_are_named(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)  # goes on from one model to the next

    def drawn() -> nn.Module:
        model = network()
        with torch.no_grad():
            model[2].weight.normal_(generator=generator)  # type: ignore[index]
        return model

    departure = Training(drawn).findings(tmp_path)["departure"]
    assert (departure["step"], departure["reason"], departure["names"]) == (0, "start", ["2.weight"])


def test_one_value_among_many_that_is_off_is_found(tmp_path: Path) -> None:
    def optimizer(parameters: Iterable[Tensor], *, world_size: int) -> torch.optim.Optimizer:
        kept = list(parameters)
        if world_size > 1:
            off = torch.zeros_like(kept[0])
            off[1234, 5] = 0.03
            kept[0].register_hook(lambda gradient: gradient + off * gradient.norm())
        return torch.optim.SGD(kept, lr=1e-2)

    wide = Training(lambda: nn.Sequential(nn.Linear(8, 5000), nn.Linear(5000, 4)), optimizer=optimizer, batches=(8,))
    departure = wide.findings(tmp_path)["departure"]
    assert (departure["reason"], departure["names"]) == ("backward", ["0.weight"])
    assert departure["parts"]["gradients"]["worst"]["difference"] == pytest.approx(0.03, rel=0.3)

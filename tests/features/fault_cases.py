"""Faults that end a training in NaN: callbacks, datasets, a model that mixes samples."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from framework import Callback, Datasets, FitInfo, StepInfo, StepOutput
from recipes.toy import toy_regression


class Fault(Callback):
    """A fault in one step, on one rank unless `rank` is None.

    kind: `layer` multiplies what the layer returns, `activation` sets one value of it for the sample in row 3,
    `gradient` the gradient of its weight, `backward` that of what it returns; `learning_rate` sets it, and stays.
    """

    def __init__(
        self, kind: str, step: int = 7, layer: str = "net2", rank: int | None = None, value: float = float("nan")
    ) -> None:
        self.kind = kind
        self.step = step
        self.layer = layer
        self.value = value
        self.is_here = rank is None or os.environ.get("RANK", "0") == str(rank)
        self.step_now = 0

    def on_fit_start(self, info: FitInfo) -> None:
        self.step_now = info.start_step + 1
        layer: Any = info.model.get_submodule(self.layer)
        layer.register_forward_hook(self._forward)
        layer.weight.register_hook(self._gradient)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.kind == "learning_rate" and self.step_now >= self.step:
            for group in optimizer.param_groups:
                group["lr"] = 1e10 if math.isnan(self.value) else self.value

    def on_train_step_end(self, info: StepInfo) -> None:
        self.step_now = info.step + 1

    def _is_due(self, kind: str) -> bool:
        return self.is_here and self.kind == kind and self.step_now == self.step

    def _forward(self, layer: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if not layer.training or not torch.is_grad_enabled():
            return None
        if self._is_due("layer"):
            return output * 1e38 * 1e38
        if self._is_due("activation"):
            output = output.clone()
            output[3, 0] = self.value
            return output
        if self._is_due("backward"):
            # Its value is 0, the gradient of the root infinite.
            return output + (output * 0.0).abs().sqrt()
        return None

    def _gradient(self, gradient: Tensor) -> Tensor | None:
        if self._is_due("gradient"):
            return gradient * float("nan")
        return None


class KilledOnce(Callback):
    """Kills its process after a step, or with `step=None` when training has failed, unless the file is there."""

    def __init__(self, file: str, step: int | None = None) -> None:
        self._file = Path(file)
        self._step = step

    def on_train_step_end(self, info: StepInfo) -> None:
        if info.step == self._step:
            self._kill()

    def close(self) -> None:
        if self._step is None:
            self._kill()

    def _kill(self) -> None:
        if not self._file.exists():
            self._file.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Interrupted(Callback):
    """Gets a Ctrl-C in a step, once, if the file is there. The steps after it are slow, until the command acts."""

    def __init__(self, file: str, step: int) -> None:
        self._file = Path(file)
        self._step = step
        self._is_interrupted = False

    def on_train_step_end(self, info: StepInfo) -> None:
        if self._is_interrupted:
            time.sleep(1.0)
        if info.step == self._step and self._file.exists():
            self._file.unlink()
            self._is_interrupted = True
            os.kill(os.getpid(), signal.SIGINT)


def two_targets(index: int, value: float) -> Datasets:
    """Return samples for the two heads of `optimizer_cases.Heads`, one with a wrong target of the second."""
    x = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))
    y = x[:, :2].tanh()
    y[index] = value
    return Datasets(TensorDataset(x, y))


def poisoned(index: int, value: float = float("nan"), target: bool = False, **settings: Any) -> Datasets:
    """Return the toy recipe's data with one wrong value, in the input or target of a training sample."""
    data = toy_regression(**settings)
    inputs, targets = data.train.tensors
    tensor = targets if target else inputs
    tensor[index, 1] = value
    return data


class Normed(nn.Module):
    """A network whose BatchNorm mixes the samples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.norm = nn.BatchNorm1d(10)
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net2(torch.relu(self.norm(self.net1(x))))
        return out


class Masked(nn.Module):
    """A network with infinite values in every step, which change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.mask = nn.Identity()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net1(x)
        masked = self.mask(hidden.masked_fill(hidden < 0, float("-inf")))
        out: Tensor = self.net2(masked.softmax(dim=1))
        return out


class Query(nn.Module):
    """As many rows as a micro-batch has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(20, 10))

    def forward(self) -> Tensor:
        return self.weight


class Queried(nn.Module):
    """One of its modules returns its parameter, on which nobody may leave hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.query = Query()
        self.net = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        assert not self.query.weight._backward_hooks
        return self.net(x + self.query())


class Dropped(nn.Module):
    """A network whose dropout has a seed of its own."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.drop = SeededDropout(seed)
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net2(self.drop(self.net1(x)))
        return out


class SeededDropout(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        generator = torch.Generator().manual_seed(self.seed)
        return x * (torch.rand(x.shape, generator=generator) > 0.1)


def blank(index: int, **settings: Any) -> Datasets:
    """Return the toy recipe's data with a training sample whose input is all zeros."""
    data = toy_regression(**settings)
    inputs, _ = data.train.tensors
    inputs[index] = 0.0
    return data


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10, bias=False)
        self.net2 = nn.Linear(10, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net2(torch.relu(self.net1(x)))
        return out


class Contrast:
    """Compares the embeddings of all samples with each other; that of a blank sample has no direction.

    Args:
        gathers: those of all ranks.
    """

    def __init__(self, gathers: bool = False) -> None:
        self.gathers = gathers

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        x, _ = batch
        embeddings = model(x)
        if self.gathers:
            embeddings = torch.cat(all_gather(embeddings))
        directions = embeddings / embeddings.norm(dim=1, keepdim=True)
        labels = torch.arange(len(directions))
        return StepOutput(cross_entropy(directions @ directions.T, labels), len(x))

    validation_step = training_step

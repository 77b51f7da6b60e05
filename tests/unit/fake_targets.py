"""Things for `_target_` nodes to name in tests of what checks and builds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from framework.errors import DataError
from framework.types import Callback, Datasets, Logger, StepInfo


class Net(nn.Linear):
    def __init__(self, hidden: int = 3, activation: nn.Module | None = None) -> None:
        super().__init__(hidden, 2)
        self.activation = activation


class Spread(nn.Module):
    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.devices = devices
        self.layer = nn.Linear(2, 2)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a model that takes devices must not be moved")


class HalfFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.trained = nn.Parameter(torch.zeros(4))


class Anything(nn.Module):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.given = kwargs


def echo(**kwargs: Any) -> dict[str, Any]:
    return kwargs


def datasets(parts: int = 3, wrong: bool = False) -> Any:
    made = [TensorDataset(torch.zeros(4, 2), torch.zeros(4))] * parts
    return (*made, iter([])) if wrong else tuple(made)


def named_datasets() -> Datasets:
    return Datasets(TensorDataset(torch.zeros(4, 2)))


def missing_data(root: str) -> Any:
    raise DataError(f"{root} isn't there.")


def broken(text: str = "x") -> Any:
    try:
        raise KeyError(text)
    except KeyError:
        raise ZeroDivisionError("a bug") from None


class FakeTask:
    def __init__(self, loss: Any = None) -> None:
        self.loss = loss

    def training_step(self, model: Any, batch: Any) -> Any: ...
    def validation_step(self, model: Any, batch: Any) -> Any: ...


class HalfTask:
    def validation_step(self, model: Any, batch: Any) -> Any: ...


class Watcher:
    def __init__(self, patience: int, /) -> None:
        self.patience = patience

    def on_train_step_end(self, report: StepInfo) -> None: ...


class Observer:
    def __init__(self, patience: int = 1) -> None:
        self.patience = patience

    def on_train_step_end(self, report: StepInfo) -> None: ...


class Misspelt:
    def on_train_step_ends(self, report: StepInfo) -> None: ...


class MisspeltState(Callback):
    def on_fit_end(self) -> None: ...
    def load_statedict(self, state: dict[str, Any]) -> None: ...


class NoHook(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {}


class WithHelpers(Callback):
    """Methods and properties that are none of a callback's, and private ones with a similar name."""

    def on_fit_end(self) -> None: ...
    def save_weights(self) -> None: ...
    def _on_fit_ended(self) -> None: ...
    def _close(self) -> None: ...

    @property
    def step(self) -> int:
        raise AssertionError("nothing reads it")


class MisspeltLogger(Logger):
    def log(self, values: Any, *, step: int, epoch: int) -> None: ...
    def flushh(self) -> None: ...


class LoggerWithHelpers(Logger):
    def log(self, values: Any, *, step: int, epoch: int) -> None: ...
    def write_image(self) -> None: ...
    def restart(self) -> None: ...
    def _flushed(self) -> None: ...


class EarlierLogger:
    """The methods of a logger in earlier versions."""

    def metrics(self, values: Any, *, step: int, epoch: int) -> None: ...
    def text(self, tag: str, text: str, *, step: int) -> None: ...
    def close(self) -> None: ...


class FakeLogger:
    def __init__(self, run_dir: Any, prefix: str = "") -> None:
        self.run_dir = run_dir
        self.prefix = prefix

    def log(self, values: Any, *, step: int, epoch: int) -> None: ...
    def close(self) -> None: ...


class PlainLogger:
    def log(self, values: Any, *, step: int, epoch: int) -> None: ...
    def close(self) -> None: ...


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def stream() -> Datasets:
    return Datasets(Endless(), val=TensorDataset(torch.zeros(4, 2)))


class NeedsClosure(torch.optim.SGD):
    """An optimizer that computes the loss several times, as sharpness-aware ones do."""

    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise RuntimeError("this step needs a closure")
        return super().step(closure)


class Called:
    """What it was called with."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        self.args = args
        self.keywords = keywords

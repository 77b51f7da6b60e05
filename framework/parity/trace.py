"""What a rank notes of one optimizer step, and how it gets from the rank to who compares: a file of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ENTERED, LEFT = "entered", "left"


@dataclass(frozen=True)
class Passage:
    """A tensor that a module was given or gave, sample by sample.

    views: the ways to read it by sample, each (samples of this rank, k). is_leading: its first dimension is the samples
    in every micro-batch, so it ought to have a view that all ranks share.
    """

    views: Mapping[str, Tensor]
    is_leading: bool


@dataclass(frozen=True)
class Event:
    """A module's forward began or ended. `call` counts the module's calls in one micro-batch, from 1.

    inside: the module whose forward it is called from; None for the model itself, whose name is empty.
    drew: random numbers were drawn since the event before. own: nothing else was called inside it.
    """

    kind: str
    module: str
    type: str
    inside: str | None
    call: int
    drew: bool
    own: bool
    is_batch_norm: bool
    passages: tuple[Passage, ...]

    @property
    def place(self) -> tuple[str, str, int]:
        """What is the same for the same event of another run."""
        return self.kind, self.module, self.call


@dataclass(frozen=True)
class StepTrace:
    """indices: the samples this rank took, in the order of the rows in `events`.

    events: None where its micro-batches went different ways through the model. gradients: as the optimizer got them,
    sketched; None for a parameter without. changes: of weights since the start, those values left out whose gradient
    was too small for its sign to be known; norms: of the whole weights. is_left_out: a loss scaler skipped the step.
    drew_after: random numbers were drawn between the last event and the optimizer's step.
    """

    indices: Tensor
    events: tuple[Event, ...] | None
    gradients: Mapping[str, Tensor | None]
    changes: Mapping[str, Tensor]
    norms: Mapping[str, float]
    buffers: Mapping[str, Tensor]
    is_left_out: bool = False
    drew_after: bool = False


@dataclass(frozen=True)
class StartTrace:
    """The model as training found it. unit: the greatest relative error of one rounding in its number formats.

    dropouts: modules in which dropout was switched off.
    """

    weights: Mapping[str, Tensor]
    model: str
    unit: float
    dropouts: int


def save(folder: Path, trace: StepTrace | StartTrace, *, rank: int, step: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(_plain(trace), _file(folder, rank, step))


def load_start(folder: Path) -> StartTrace:
    return StartTrace(**_load(folder, rank=0, step=0))


def load_step(folder: Path, *, rank: int, step: int) -> StepTrace:
    plain = _load(folder, rank=rank, step=step)
    events = plain.pop("events")
    return StepTrace(**plain, events=None if events is None else tuple(map(_event, events)))


def has_step(folder: Path, step: int) -> bool:
    return _file(folder, 0, step).exists()


def _plain(value: StepTrace | StartTrace | Event | Passage) -> dict[str, Any]:
    """The fields. `asdict` would copy every tensor."""
    fields = dict(vars(value))
    for name in ("events", "passages"):
        if fields.get(name) is not None:
            fields[name] = [_plain(each) for each in fields[name]]
    return fields


def _event(plain: Mapping[str, Any]) -> Event:
    return Event(**{**plain, "passages": tuple(Passage(**each) for each in plain["passages"])})


def _load(folder: Path, *, rank: int, step: int) -> dict[str, Any]:
    plain: dict[str, Any] = torch.load(_file(folder, rank, step), weights_only=True)
    return plain


def _file(folder: Path, rank: int, step: int) -> Path:
    return folder / f"rank_{rank}_step_{step}.pt"

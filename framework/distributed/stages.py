"""Models of which each rank holds some stages and nothing of the others, and what it knows of the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import nn

_NAME = "_stage_layout"


@final
@dataclass(frozen=True)
class StageLayout:
    """What a rank knows of the whole model of which it has kept a part.

    names: of the whole state dict. parameters: names of all parameters, in order. num_parameters: numbers in them.
    written: names of the state dict that this rank writes to a checkpoint, and no other. has_output: whether this rank
    has the last stage.
    """

    names: frozenset[str]
    parameters: tuple[str, ...]
    num_parameters: int
    written: frozenset[str]
    has_output: bool


def set_layout(model: nn.Module, layout: StageLayout) -> None:
    setattr(model, _NAME, layout)


def layout_of(model: nn.Module) -> StageLayout | None:
    """None for a model that every rank has as a whole, or spread tensor by tensor."""
    layout: StageLayout | None = vars(model).get(_NAME)
    return layout


def gives_output(model: nn.Module) -> bool:
    """Whether what the model gives on this rank is its output; another rank's stages give stand-ins of that shape."""
    layout = layout_of(model)
    return layout is None or layout.has_output


def num_parameters(model: nn.Module) -> int:
    """Numbers in all parameters, of stages on other ranks too."""
    layout = layout_of(model)
    return sum(each.numel() for each in model.parameters()) if layout is None else layout.num_parameters

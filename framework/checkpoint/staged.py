"""The state of a model whose stages lie on several ranks: each rank's part in the shards, by the whole model's names.

Parameters are numbered as an optimizer of the whole model would number them, so that what is put together is the state
of a run of one process, and any number of stages can take its parts out of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from framework.distributed.stages import StageLayout, layout_of
from framework.errors import CheckpointError


@dataclass(frozen=True)
class _Mine:
    """What one rank's optimizer has. orders: for each group the places of its parameters in the whole model."""

    orders: list[list[int]]
    settings: list[dict[str, Any]]
    entries: dict[int, dict[str, Any]]  # by place, what isn't in the shards
    taken: list[tuple[int, str, str]]


def state_of_all(
    model: nn.Module, optimizer: Optimizer, *, prefix: str
) -> tuple[dict[str, Tensor], dict[str, Any], list[list[Any]]]:
    """Of the optimizer: this rank's tensors by their names in the shards, the rest of all ranks' state, and the note of
    what was taken out of it. Every rank must call it.
    """
    layout = _layout(model)
    own = _own_state(optimizer)
    places = _places(model, layout, optimizer)
    tensors: dict[str, Tensor] = {}
    entries: dict[int, dict[str, Any]] = {}
    taken: list[tuple[int, str, str]] = []
    for place, number in places.items():
        entries[place] = {}
        for name, value in own["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.ndim:
                key = f"{prefix}{layout.parameters[place]}.{name}"
                tensors[key] = value
                taken.append((place, name, key))
            else:
                entries[place][name] = value
        if number not in own["state"]:
            del entries[place]
    everyone = _gathered(_Mine(_orders(places, optimizer), _settings(own), entries, taken))
    numbers = _numbers(everyone)
    state = {numbers[place]: entry for mine in everyone for place, entry in mine.entries.items()}
    note = {(numbers[place], name): key for mine in everyone for place, name, key in mine.taken}
    groups = [
        {**settings, "params": sorted(numbers[place] for place in {p for mine in everyone for p in mine.orders[index]})}
        for index, settings in enumerate(everyone[0].settings)
    ]
    if layout.written.isdisjoint(layout.parameters):  # another rank has the same and writes it
        tensors = {}
    whole = {"state": dict(sorted(state.items())), "param_groups": groups}
    return tensors, whole, [[number, name, key] for (number, name), key in sorted(note.items())]


def numbers_of(model: nn.Module, optimizer: Optimizer) -> dict[int, int]:
    """The number in the whole model's optimizer of each parameter → its number in this one. Every rank must call it."""
    places = _places(model, _layout(model), optimizer)
    numbers = _numbers(_gathered(_Mine(_orders(places, optimizer), [], {}, [])))
    return {numbers[place]: number for place, number in places.items()}


def own_optimizer(
    whole: Mapping[str, Any], tensors: Mapping[tuple[int, str], Any], *, numbers: Mapping[int, int], own: Optimizer
) -> dict[str, Any]:
    """The state dict for this rank's optimizer out of that of the whole model, with `tensors` by number and name."""
    plain = _own_state(own)
    if len(plain["param_groups"]) != len(whole["param_groups"]):
        raise CheckpointError(
            f"The checkpoint's optimizer has {len(whole['param_groups'])} groups of parameters, and this run's has "
            f"{len(plain['param_groups'])}. Go on with the same optimizer, or begin anew with init_from."
        )
    state: dict[int, dict[str, Any]] = {
        numbers[number]: dict(entry) for number, entry in whole["state"].items() if number in numbers
    }
    for (number, name), value in tensors.items():
        state.setdefault(numbers[number], {})[name] = value
    groups = [
        {**saved, "params": mine["params"]}
        for saved, mine in zip(whole["param_groups"], plain["param_groups"], strict=True)
    ]
    return {"state": state, "param_groups": groups}


def own_entries(model: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """Of a whole state dict what this rank has, and what no rank has: that is another model's."""
    layout, own = layout_of(model), model.state_dict()
    return {name: value for name, value in given.items() if layout is None or name in own or name not in layout.names}


def _layout(model: nn.Module) -> StageLayout:
    layout = layout_of(model)
    assert layout is not None
    return layout


def _own_state(optimizer: Optimizer) -> dict[str, Any]:
    state: dict[str, Any] = optimizer.state_dict()
    return state


def _settings(plain: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in plain["param_groups"]]


def _places(model: nn.Module, layout: StageLayout, optimizer: Optimizer) -> dict[int, int]:
    """Place in the whole model of each of this rank's parameters → its number in the optimizer's state dict."""
    place = {name: index for index, name in enumerate(layout.parameters)}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    in_order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {place[names[id(parameter)]]: number for number, parameter in enumerate(in_order)}


def _orders(places: Mapping[int, int], optimizer: Optimizer) -> list[list[int]]:
    by_number = {number: place for place, number in places.items()}
    numbers = iter(range(len(by_number)))
    return [[by_number[next(numbers)] for _ in group["params"]] for group in optimizer.param_groups]


def _numbers(everyone: Sequence[_Mine]) -> dict[int, int]:
    """Place → number: group by group, in the model's order."""
    most = max(len(mine.orders) for mine in everyone)
    if any(len(mine.orders) != most for mine in everyone):
        raise CheckpointError(
            "The optimizer makes other groups of parameters for one stage than for another, so their state can't be "
            "told together. Let it make as many groups for any parameters, empty ones too."
        )
    places = [place for index in range(most) for place in sorted({p for mine in everyone for p in mine.orders[index]})]
    return {place: number for number, place in enumerate(places)}


def _gathered(mine: _Mine) -> list[_Mine]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone

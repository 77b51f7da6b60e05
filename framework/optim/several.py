"""Several optimizers of one training as one, for a task whose losses each train a part of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


@final
class Optimizers(Optimizer):
    """Several optimizers by name, as one: their groups one after another, their state in one numbering."""

    def __init__(self, named: Mapping[str, Optimizer]) -> None:
        # Each of them has all that torch's own constructor would make.
        self.named = dict(named)
        # Each has its own.
        self.defaults = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        groups = []
        for optimizer in self.named.values():
            groups += optimizer.param_groups
        return groups

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        state: dict[Tensor, Any] = {}
        for optimizer in self.named.values():
            state.update(optimizer.state)
        return state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for optimizer in self.named.values():
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.named.values():
            optimizer.zero_grad(set_to_none=set_to_none)

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        handles = [optimizer.register_step_pre_hook(hook) for optimizer in self.named.values()]
        return handles[-1]

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        handles = [optimizer.register_step_post_hook(hook) for optimizer in self.named.values()]
        return handles[-1]

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of one optimizer with all groups."""
        return join_states(optimizer.state_dict() for optimizer in self.named.values())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        sizes = [len(optimizer.param_groups) for optimizer in self.named.values()]
        for optimizer, own_state in zip(self.named.values(), split_state(state_dict, sizes), strict=True):
            optimizer.load_state_dict(own_state)


def split_state(state_dict: Mapping[str, Any], sizes: Iterable[int]) -> list[dict[str, Any]]:
    """Return the state dict of each optimizer from that of all. sizes: the number of groups of each."""
    states = []
    begin = 0
    first_group = 0
    for size in sizes:
        groups = state_dict["param_groups"][first_group : first_group + size]
        end = begin + _num_params(groups)
        own = {number - begin: state for number, state in state_dict["state"].items() if begin <= number < end}
        states.append({"state": own, "param_groups": _renumbered(groups, by=-begin)})
        begin = end
        first_group += size
    return states


def join_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state dict of one optimizer with all groups, from those of several."""
    joined: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    begin = 0
    for state_dict in states:
        for number, state in state_dict["state"].items():
            joined[begin + number] = state
        groups += _renumbered(state_dict["param_groups"], by=begin)
        begin += _num_params(state_dict["param_groups"])
    return {"state": joined, "param_groups": groups}


def _renumbered(groups: Iterable[Mapping[str, Any]], *, by: int) -> list[dict[str, Any]]:
    """Return the groups of a state dict with `by` added to the numbers of their parameters."""
    return [dict(group, params=[number + by for number in group["params"]]) for group in groups]


def _num_params(groups: Iterable[Mapping[str, Any]]) -> int:
    return sum(len(group["params"]) for group in groups)

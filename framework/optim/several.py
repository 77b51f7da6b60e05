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
        states: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        begin = 0
        for optimizer in self.named.values():
            state_dict = optimizer.state_dict()
            for number, state in state_dict["state"].items():
                states[begin + number] = state
            groups += _renumbered(state_dict["param_groups"], by=begin)
            begin += _num_params(optimizer.param_groups)
        return {"state": states, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        begin = 0
        first_group = 0
        for optimizer in self.named.values():
            end_group = first_group + len(optimizer.param_groups)
            groups = state_dict["param_groups"][first_group:end_group]
            end = begin + _num_params(groups)
            states = {n - begin: state for n, state in state_dict["state"].items() if begin <= n < end}
            optimizer.load_state_dict({"state": states, "param_groups": _renumbered(groups, by=-begin)})
            begin = end
            first_group = end_group


def _renumbered(groups: Iterable[Mapping[str, Any]], *, by: int) -> list[dict[str, Any]]:
    """Return the groups of a state dict with `by` added to the numbers of their parameters."""
    return [dict(group, params=[number + by for number in group["params"]]) for group in groups]


def _num_params(groups: Iterable[Mapping[str, Any]]) -> int:
    return sum(len(group["params"]) for group in groups)

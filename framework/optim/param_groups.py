"""Which parameter belongs to which optimizer and group, and several optimizers as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from framework.config.optimizers import OptimizerConfig
from framework.errors import ConfigError

_REST = 0  # the group of what no pattern matches


@final
@dataclass(frozen=True)
class ParamGroups:
    """The place of each parameter of a whole model: (number of the optimizer, number of the group), by name."""

    configs: Sequence[OptimizerConfig]
    places: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, model: nn.Module, configs: Sequence[OptimizerConfig]) -> ParamGroups:
        """Place every parameter of `model`, which must be whole: not cut into stages yet.

        Raises ConfigError for a pattern that matches nothing, and for a parameter that no optimizer takes.
        """
        places: dict[str, tuple[int, int]] = {}
        for name, parameter in model.named_parameters():
            ndim = parameter.ndim
            for number, config in enumerate(configs):
                if config.pattern is None or config.pattern.matches(name, ndim=ndim):
                    own = (i for i, group in enumerate(config.groups, 1) if group.pattern.matches(name, ndim=ndim))
                    places[name] = (number, next(own, _REST))
                    break
        names = [name for name, _ in model.named_parameters()]
        used = set(places.values())
        for number, config in enumerate(configs):
            if config.pattern is not None and not any(place[0] == number for place in used):
                raise config.pattern.refused(names)
            if config.name and not any(place[0] == number for place in used):
                raise ConfigError(f"{config.key} gets no parameter: the optimizers before it take all. Leave it out.")
            for group_number, group in enumerate(config.groups, 1):
                if (number, group_number) not in used:
                    raise group.pattern.refused(names)
        if left := [name for name in names if name not in places]:
            raise ConfigError(
                f"optimizer: no optimizer takes {left[0]} and {len(left) - 1} other parameters. Leave `params` out of "
                "the last one, which then takes the rest."
            )
        return cls(configs, places)

    def groups(self, model: nn.Module) -> list[tuple[OptimizerConfig, dict[str, list[nn.Parameter]]]]:
        """Return each optimizer's parameters in `model` by the label of their group.

        Groups are the same for every stage of the whole model: some may be empty.
        """
        used, found = set(self.places.values()), []
        for number, config in enumerate(self.configs):
            own: dict[str, list[nn.Parameter]] = {
                label: [] for group, label in enumerate(config.labels) if (number, group) in used
            }
            found.append((config, own))
        for name, parameter in model.named_parameters():
            number, group = self.places[name]
            config, own = found[number]
            own[config.labels[group]].append(parameter)
        return found


@final
class Optimizers(Optimizer):
    """Several optimizers by name, as one: their groups one after another, their state in one numbering."""

    def __init__(self, named: Mapping[str, Optimizer]) -> None:
        self.named = dict(named)  # which have all that torch's own constructor would make

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for each in self.named.values() for group in each.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        return dict(chain.from_iterable(each.state.items() for each in self.named.values()))

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for each in self.named.values():
            each.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.named.values():
            each.zero_grad(set_to_none=set_to_none)

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        return [each.register_step_pre_hook(hook) for each in self.named.values()][-1]

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        return [each.register_step_post_hook(hook) for each in self.named.values()][-1]

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of one optimizer with all groups."""
        state, groups, begin = {}, [], 0
        for each in self.named.values():
            own = each.state_dict()
            state.update({begin + number: entry for number, entry in own["state"].items()})
            groups += [{**group, "params": [begin + i for i in group["params"]]} for group in own["param_groups"]]
            begin += _count(each.param_groups)
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        groups, begin = list(state_dict["param_groups"]), 0
        for each in self.named.values():
            own, groups = groups[: len(each.param_groups)], groups[len(each.param_groups) :]
            end = begin + _count(own)
            entries = {number - begin: entry for number, entry in state_dict["state"].items() if begin <= number < end}
            own = [{**group, "params": [number - begin for number in group["params"]]} for group in own]
            each.load_state_dict({"state": entries, "param_groups": own})
            begin = end


def _count(groups: Iterable[Mapping[str, Any]]) -> int:
    return sum(len(group["params"]) for group in groups)

"""Which optimizer and group each parameter belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from torch import nn

from framework.config.optimizers import OptimizerConfig
from framework.errors import ConfigError

# The number of the group of the parameters that no pattern matches.
_REST = 0


class Place(NamedTuple):
    """Where a parameter belongs, by numbers."""

    optimizer: int
    group: int


@final
@dataclass(frozen=True)
class ParamGroups:
    """The place of each parameter of a whole model, by name."""

    configs: Sequence[OptimizerConfig]
    places: Mapping[str, Place]

    @classmethod
    def of(cls, model: nn.Module, configs: Sequence[OptimizerConfig]) -> ParamGroups:
        """Place every parameter of `model`, which must be whole: not cut into stages yet.

        Raises ConfigError for a pattern that matches nothing, and for a parameter that no optimizer takes.
        """
        places: dict[str, Place] = {}
        left_over = []
        for name, parameter in model.named_parameters():
            place = _place_of(name, parameter, configs)
            if place is None:
                left_over.append(name)
            else:
                places[name] = place

        _check_all_are_used(configs, places, [name for name, _ in model.named_parameters()])
        if left_over:
            raise ConfigError(
                f"optimizer: no optimizer takes {left_over[0]} and {len(left_over) - 1} other parameters. Leave "
                "`params` out of the last one, which then takes the rest."
            )
        return cls(configs, places)

    def groups(self, model: nn.Module) -> list[tuple[OptimizerConfig, dict[str, list[nn.Parameter]]]]:
        """Return each optimizer's parameters in `model` by the label of their group.

        Groups are the same for every stage of the whole model: some may be empty.
        """
        used = set(self.places.values())
        optimizers: list[tuple[OptimizerConfig, dict[str, list[nn.Parameter]]]] = []
        for number, config in enumerate(self.configs):
            labels = [label for group, label in enumerate(config.labels) if Place(number, group) in used]
            optimizers.append((config, {label: [] for label in labels}))

        for name, parameter in model.named_parameters():
            place = self.places[name]
            config, parameters_by_label = optimizers[place.optimizer]
            parameters_by_label[config.labels[place.group]].append(parameter)
        return optimizers


def _place_of(name: str, parameter: nn.Parameter, configs: Sequence[OptimizerConfig]) -> Place | None:
    """Return the first optimizer that takes the parameter, and its first group that does; None if none takes it."""
    ndim = parameter.ndim
    for number, config in enumerate(configs):
        if config.pattern is None or config.pattern.matches(name, ndim=ndim):
            matching = [i for i, group in enumerate(config.groups, start=1) if group.pattern.matches(name, ndim=ndim)]
            return Place(number, next(iter(matching), _REST))
    return None


def _check_all_are_used(configs: Sequence[OptimizerConfig], places: Mapping[str, Place], names: Sequence[str]) -> None:
    """Raise ConfigError for an optimizer or a group without a parameter.

    Args:
        names: The names of all parameters, for messages.
    """
    used_groups = set(places.values())
    used_optimizers = {place.optimizer for place in used_groups}
    for number, config in enumerate(configs):
        if number not in used_optimizers:
            if config.pattern is not None:
                raise config.pattern.refused(names)
            if config.name:
                raise ConfigError(f"{config.key} gets no parameter: the optimizers before it take all. Leave it out.")
        for group_number, group in enumerate(config.groups, start=1):
            if Place(number, group_number) not in used_groups:
                raise group.pattern.refused(names)

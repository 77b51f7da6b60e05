"""What the section `optimizer` says: one optimizer or several by name, and their parameter groups. No torch here.

    optimizer:                                      optimizer:
      _target_: torch.optim.AdamW                     matrices:
      lr: 0.001                                         _target_: torch.optim.Muon
      weight_decay: 0.1                                 params: ['^blocks\\.', ndim==2]
      groups:                                           schedule: {...}  # null: constant; else as scheduler.schedule
        - {params: ndim<2, weight_decay: 0}           rest:
        - {params: '^head\\.', lr: 0.01}                _target_: torch.optim.AdamW

A pattern (`params`) is a regular expression that is searched in a parameter's name, a rule on its number of dimensions
(`ndim<2`, `ndim==2`), or a list of those, all of which must hold. The first match wins, among optimizers and among
groups. What no group matches is trained with the optimizer's own keys.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from framework.config.schema import Config, Node
from framework.config.suggest import did_you_mean, nearest
from framework.errors import ConfigError

OWN_KEYS = ("params", "groups", "schedule")
"""The keys of an optimizer that the framework reads; the others are the target's."""

_COMPARE = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}
_NDIM = re.compile(r"ndim\s*(<=|>=|==|!=|<|>)\s*(\d+)")


class Pattern:
    """Chooses parameters by name and number of dimensions. key: where it is written. Raises ConfigError."""

    def __init__(self, given: Any, *, key: str) -> None:
        parts = given if isinstance(given, list) else [given]
        if not parts or not all(isinstance(part, str) and part for part in parts):
            raise ConfigError(
                f"{key}={given}: must be a regular expression of parameter names, a rule such as ndim<2, or a list of "
                "those, all of which must hold."
            )
        self.key, self._text = key, " and ".join(parts)
        rules = [_NDIM.fullmatch(part.strip()) for part in parts]
        self._rules = [(_COMPARE[rule[1]], int(rule[2])) for rule in rules if rule]
        try:
            self._names = [re.compile(part) for part, rule in zip(parts, rules, strict=True) if not rule]
        except re.error as error:
            raise ConfigError(f"{key}={given}: is no regular expression: {error}.") from error

    def __str__(self) -> str:
        return self._text

    def matches(self, name: str, *, ndim: int) -> bool:
        """Return True if everything holds for a parameter."""
        return all(each.search(name) for each in self._names) and all(test(ndim, n) for test, n in self._rules)

    def refused(self, names: Iterable[str]) -> ConfigError:
        """Return the error for a pattern that chooses none of the parameters `names`."""
        names = list(names)
        plain = [re.sub(r"[^\w.]", "", each.pattern.replace("\\.", ".")).strip(".") for each in self._names]
        close = next(filter(None, (nearest(each, names) for each in plain)), None)
        close = close or next((name for name in names for part in plain if nearest(part, name.split("."))), None)
        known = f" The model has {', '.join(names[:4])}{', …' if len(names) > 4 else ''}." if names else ""
        return ConfigError(
            f"{self.key}: no parameter matches {self}, or an earlier pattern takes all that do."
            f"{did_you_mean(close)}{known}"
        )


@dataclass(frozen=True)
class GroupConfig:
    """One entry of `groups`: which parameters, and the optimizer's keys that differ for them."""

    name: str
    pattern: Pattern
    options: Mapping[str, Any]


@dataclass(frozen=True)
class OptimizerConfig:
    """One optimizer. name: its key among several, empty for the only one. node: without the framework's keys."""

    name: str
    key: str
    node: Node
    pattern: Pattern | None  # None: all parameters that no earlier optimizer takes
    groups: tuple[GroupConfig, ...]
    schedule: Any  # a node, None for a constant rate; ... : the one of `scheduler.schedule`

    @property
    def labels(self) -> list[str]:
        """The names of its groups in logs: first the one of what no group matches."""
        return [self.name, *("/".join(filter(None, (self.name, group.name))) for group in self.groups)]

    @property
    def own_schedule(self) -> Mapping[str, Any]:
        """The node of its own schedule; empty without one."""
        return {} if self.schedule is ... else self.schedule or {}

    @property
    def choice(self) -> tuple[str, str, list[str]]:
        """What decides which parameters it and each of its groups get."""
        return self.name, str(self.pattern), [str(group.pattern) for group in self.groups]

    def settings(self, label: str) -> dict[str, Any]:
        """Return the optimizer's keys for the group of this label."""
        options = dict(zip(self.labels[1:], (group.options for group in self.groups), strict=True))
        own = options.get(label, {})  # none for a group that the target itself has made
        return {name: value for name, value in {**self.node, **own}.items() if not name.startswith("_")}


def is_several(section: Mapping[str, Any]) -> bool:
    """Return True for a mapping from names to optimizers."""
    return "_target_" not in section


def optimizer_configs(section: Mapping[str, Any]) -> list[OptimizerConfig]:
    """Return the optimizers that the section `optimizer` describes. Raises ConfigError for a wrong key or pattern."""
    if not is_several(section):
        for key in ("params", "schedule"):
            if key in section:
                raise ConfigError(
                    f"optimizer.{key} is for one of several optimizers by name, and there is one. Leave it out"
                    + (": scheduler.schedule is its schedule." if key == "schedule" else ", or use optimizer.groups.")
                )
        return [_optimizer("", section, key="optimizer")]
    found = [_optimizer(name, node, key=f"optimizer.{name}") for name, node in section.items() if node is not None]
    if not found:
        raise ConfigError("optimizer has neither a `_target_` nor optimizers by name. Choose an option of its group.")
    return found


def schedules(config: Config) -> list[tuple[str, Node | None]]:
    """Return the key and the node of every learning-rate schedule."""
    own = ((f"{each.key}.schedule", each.schedule) for each in optimizer_configs(config.optimizer))
    return [("scheduler.schedule", config.scheduler.schedule), *((key, node) for key, node in own if node is not ...)]


def described(section: Mapping[str, Any]) -> str:
    """Return the names of the optimizers' classes."""
    return " and ".join(each.node["_target_"].rpartition(".")[2] for each in optimizer_configs(section))


def _optimizer(name: str, node: Node, *, key: str) -> OptimizerConfig:
    given = node.get("groups") or []
    if not isinstance(given, list):
        raise ConfigError(f"{key}.groups: must be a list of mappings such as {{params: ndim<2, weight_decay: 0}}.")
    groups = [_group(each, key=f"{key}.groups.{number}", default=str(number)) for number, each in enumerate(given)]
    names = [group.name for group in groups]
    if len(set(names)) < len(names):
        raise ConfigError(f"{key}.groups: the names {', '.join(names)} must differ.")
    return OptimizerConfig(
        name,
        key,
        node={each: value for each, value in node.items() if each not in OWN_KEYS},
        pattern=None if node.get("params") is None else Pattern(node["params"], key=f"{key}.params"),
        groups=tuple(groups),
        schedule=node.get("schedule", ...),
    )


def _group(given: Any, *, key: str, default: str) -> GroupConfig:
    if not isinstance(given, Mapping) or "params" not in given:
        raise ConfigError(f"{key}: must be a mapping with `params`, such as {{params: ndim<2, weight_decay: 0}}.")
    options = {name: value for name, value in given.items() if name not in ("params", "name")}
    return GroupConfig(str(given.get("name", default)), Pattern(given["params"], key=f"{key}.params"), options)

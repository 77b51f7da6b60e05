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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from framework.config.schema import Config, Node, Precision
from framework.config.suggest import did_you_mean, nearest
from framework.errors import ConfigError

OWN_KEYS = ("params", "groups", "schedule", "closure")
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
_MAX_SHOWN = 4
"""Names of parameters in a message."""


class _Range(NamedTuple):
    """The numbers that torch's constructors take for a keyword."""

    text: str
    refuses: Callable[[float], bool]


_FROM_0 = _Range("at least 0", lambda value: value < 0)
_FROM_0_TO_1 = _Range("at least 0 and at most 1", lambda value: value < 0 or value > 1)
_FROM_0_BELOW_1 = _Range("at least 0 and below 1", lambda value: value < 0 or value >= 1)
# Where several of torch.optim's classes have a keyword, they agree; but Muon takes an `eps` below 0, which has no use.
_RANGES = {
    "lr": _FROM_0,
    "eps": _FROM_0,
    "weight_decay": _FROM_0,
    "momentum": _FROM_0,
    "momentum_decay": _FROM_0,
    "lr_decay": _FROM_0,
    "initial_accumulator_value": _FROM_0,
    "rho": _FROM_0_TO_1,
    "betas": _FROM_0_BELOW_1,
}


class Pattern:
    """Chooses parameters by name and number of dimensions.

    Args:
        value: What the configuration says.
        key: Where it says so, for messages.

    Raises:
        ConfigError: It isn't a pattern.
    """

    def __init__(self, value: Any, *, key: str) -> None:
        parts = value if isinstance(value, list) else [value]
        if not parts or not all(isinstance(part, str) and part for part in parts):
            raise ConfigError(
                f"{key}={value}: must be a regular expression of parameter names, a rule such as ndim<2, or a list of "
                "those, all of which must hold."
            )
        self.key = key
        self._text = " and ".join(parts)
        self._rules: list[tuple[Callable[[int, int], bool], int]] = []
        self._expressions: list[re.Pattern[str]] = []
        for part in parts:
            rule = _NDIM.fullmatch(part.strip())
            if rule is not None:
                self._rules.append((_COMPARE[rule[1]], int(rule[2])))
                continue
            try:
                self._expressions.append(re.compile(part))
            except re.error as error:
                raise ConfigError(f"{key}={value}: is no regular expression: {error}.") from error

    def __str__(self) -> str:
        return self._text

    def matches(self, name: str, *, ndim: int) -> bool:
        """Return True if every part of the pattern holds for a parameter."""
        for expression in self._expressions:
            if not expression.search(name):
                return False
        return all(compare(ndim, number) for compare, number in self._rules)

    def refused(self, names: Iterable[str]) -> ConfigError:
        """Return the error for a pattern that chooses none of the parameters `names`."""
        names = list(names)
        known = ""
        if names:
            others = ", …" if len(names) > _MAX_SHOWN else ""
            known = f" The model has {', '.join(names[:_MAX_SHOWN])}{others}."
        return ConfigError(
            f"{self.key}: no parameter matches {self}, or an earlier pattern takes all that do."
            f"{did_you_mean(self._similar_name(names))}{known}"
        )

    def _similar_name(self, names: list[str]) -> str | None:
        """Return the parameter whose name, or a part of it, is most like one of the expressions."""
        plain_texts = []
        for expression in self._expressions:
            unescaped = expression.pattern.replace("\\.", ".")
            plain_texts.append(re.sub(r"[^\w.]", "", unescaped).strip("."))

        for text in plain_texts:
            similar = nearest(text, names)
            if similar is not None:
                return similar
        for name in names:
            if any(nearest(text, name.split(".")) for text in plain_texts):
                return name
        return None


@dataclass(frozen=True)
class GroupConfig:
    """One entry of `groups`: which parameters, and the optimizer's keys that differ for them."""

    name: str
    pattern: Pattern
    options: Mapping[str, Any]


@dataclass(frozen=True)
class OptimizerConfig:
    """One optimizer of the section `optimizer`."""

    # Its name among several optimizers; empty for the only one.
    name: str
    # Where it is written: `optimizer`, or `optimizer.NAME`.
    key: str
    # The target and its keywords, without the keys that the framework reads.
    node: Node
    # None: all parameters that no earlier optimizer takes.
    pattern: Pattern | None
    groups: tuple[GroupConfig, ...]
    # The node of its schedule; None for a constant rate; `...` for the one of `scheduler.schedule`.
    schedule: Any
    # Its step takes a closure, and reads gradients before it calls that, as SAM does.
    closure: bool

    @property
    def labels(self) -> list[str]:
        """The names of its groups in logs: first that of the parameters that no group matches."""
        labels = [self.name]
        for group in self.groups:
            label = group.name
            if self.name:
                label = f"{self.name}/{label}"
            labels.append(label)
        return labels

    @property
    def own_schedule(self) -> Mapping[str, Any]:
        """The node of its own schedule; empty without one."""
        if self.schedule is ... or self.schedule is None:
            return {}
        schedule: Mapping[str, Any] = self.schedule
        return schedule

    @property
    def choice(self) -> tuple[str, str, list[str]]:
        """What decides which parameters it and each of its groups get."""
        return self.name, str(self.pattern), [str(group.pattern) for group in self.groups]

    def settings(self, label: str) -> dict[str, Any]:
        """Return the optimizer's keys for the group of this label."""
        settings = dict(self.node)
        # A group that the target itself has made is none of these, and has the optimizer's keys.
        for group_label, group in zip(self.labels[1:], self.groups, strict=True):
            if group_label == label:
                settings.update(group.options)
        return {name: value for name, value in settings.items() if not name.startswith("_")}


def is_several(section: Mapping[str, Any]) -> bool:
    """Return True for a mapping from names to optimizers."""
    return "_target_" not in section


def optimizer_configs(section: Mapping[str, Any]) -> list[OptimizerConfig]:
    """Return the optimizers that the section `optimizer` describes. Raises ConfigError for a wrong key or pattern."""
    if not is_several(section):
        for key, instead in (
            ("params", ", or use optimizer.groups."),
            ("schedule", ": scheduler.schedule is its schedule."),
        ):
            if key in section:
                raise ConfigError(
                    f"optimizer.{key} is for one of several optimizers by name, and there is one. Leave it out{instead}"
                )
        return [_optimizer("", section, key="optimizer")]

    optimizers = [_optimizer(name, node, key=f"optimizer.{name}") for name, node in section.items() if node is not None]
    if not optimizers:
        raise ConfigError("optimizer has neither a `_target_` nor optimizers by name. Choose an option of its group.")
    return optimizers


def schedules(config: Config) -> list[tuple[str, Node | None]]:
    """Return the key and the node of every learning-rate schedule."""
    nodes: list[tuple[str, Node | None]] = [("scheduler.schedule", config.scheduler.schedule)]
    for optimizer in optimizer_configs(config.optimizer):
        if optimizer.schedule is not ...:
            nodes.append((f"{optimizer.key}.schedule", optimizer.schedule))
    return nodes


def described(section: Mapping[str, Any]) -> str:
    """Return the names of the optimizers' classes."""
    targets = [optimizer.node["_target_"] for optimizer in optimizer_configs(section)]
    return " and ".join(target.rpartition(".")[2] for target in targets)


def refused_by_torch(section: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the constructors of torch's own optimizers refuse.

    The ranks build the optimizers, and learn of all other mistakes; a sweep has started by then.
    """
    for optimizer in optimizer_configs(section):
        target = optimizer.node["_target_"]
        if not target.startswith("torch.optim."):
            continue
        for keyword, value in optimizer.node.items():
            if keyword in _RANGES:
                yield from _out_of_range(f"{optimizer.key}.{keyword}", value, _RANGES[keyword], target=target)
        if target.endswith(".SGD"):
            yield from _nesterov_mistakes(optimizer)


def takes_closure(optimizer: OptimizerConfig) -> bool:
    """Return True if the optimizer's step takes a closure, as far as the configuration tells."""
    return optimizer.closure or optimizer.node["_target_"] == "torch.optim.LBFGS"


def closure_mistakes(optimizers: Sequence[OptimizerConfig], precision: Precision) -> Iterator[str]:
    """Yield what can't go with an optimizer whose step is known to take a closure."""
    for optimizer in optimizers:
        if not takes_closure(optimizer):
            continue
        name = optimizer.node["_target_"].rpartition(".")[2]
        if len(optimizers) > 1:
            yield f"{optimizer.key}: {name} computes the loss in its step, so it must be the only optimizer."
        if precision == "16-mixed":
            yield refuses_scaled_losses(optimizer.key, name)


def refuses_scaled_losses(key: str, name: str) -> str:
    """Return the message for an optimizer whose step takes a closure, and 16-mixed."""
    return (
        f"{key}: {name} computes the loss several times in a step, which can't go with the scaled losses of "
        "trainer.precision=16-mixed. Use bf16-mixed or 32-true."
    )


def _out_of_range(key: str, value: Any, allowed: _Range, *, target: str) -> Iterator[str]:
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _out_of_range(f"{key}.{number}", item, allowed, target=target)
    elif type(value) in (int, float) and allowed.refuses(value):
        yield f"{key}={value}: must be {allowed.text} for {target}."


def _nesterov_mistakes(optimizer: OptimizerConfig) -> Iterator[str]:
    node = optimizer.node
    if node.get("nesterov") is not True:
        return
    if node.get("momentum", 0) == 0 or node.get("dampening", 0) != 0:
        yield (
            f"{optimizer.key}.nesterov=true needs momentum and no dampening. Set {optimizer.key}.momentum, to 0.9 for "
            f"instance, and {optimizer.key}.dampening=0, or {optimizer.key}.nesterov=false."
        )


def _optimizer(name: str, node: Node, *, key: str) -> OptimizerConfig:
    entries = node.get("groups") or []
    if not isinstance(entries, list):
        raise ConfigError(f"{key}.groups: must be a list of mappings such as {{params: ndim<2, weight_decay: 0}}.")
    groups = []
    for number, entry in enumerate(entries):
        groups.append(_group(entry, key=f"{key}.groups.{number}", default_name=str(number)))
    names = [group.name for group in groups]
    if len(set(names)) < len(names):
        raise ConfigError(f"{key}.groups: the names {', '.join(names)} must differ.")

    closure = node.get("closure", False)
    if not isinstance(closure, bool):
        raise ConfigError(f"{key}.closure={closure}: must be true or false.")
    pattern = None
    if node.get("params") is not None:
        pattern = Pattern(node["params"], key=f"{key}.params")
    return OptimizerConfig(
        name=name,
        key=key,
        node={keyword: value for keyword, value in node.items() if keyword not in OWN_KEYS},
        pattern=pattern,
        groups=tuple(groups),
        schedule=node.get("schedule", ...),
        closure=closure,
    )


def _group(entry: Any, *, key: str, default_name: str) -> GroupConfig:
    if not isinstance(entry, Mapping) or "params" not in entry:
        raise ConfigError(f"{key}: must be a mapping with `params`, such as {{params: ndim<2, weight_decay: 0}}.")
    return GroupConfig(
        name=str(entry.get("name", default_name)),
        pattern=Pattern(entry["params"], key=f"{key}.params"),
        options={keyword: value for keyword, value in entry.items() if keyword not in ("params", "name")},
    )

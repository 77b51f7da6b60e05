"""The parameters to train: checks for strategies, and changes of `requires_grad` during training."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, final

import torch.distributed as dist
from torch import nn

from framework.config.optimizers import Pattern
from framework.distributed.collectives import gather_to_all
from framework.distributed.context import Context
from framework.distributed.sharded import layout_of
from framework.errors import ConfigError, RunError, TargetError

_SHOWN = 4
_requires_grad = operator.attrgetter("requires_grad")


def trained(model: nn.Module, *, strategy: str) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, by name. Raises ConfigError if there are none."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not parameters:
        raise ConfigError(
            f"strategy={strategy} has nothing to average: no parameter of {type(model).__name__} requires a gradient.\n"
            "Set requires_grad on those to train, or use one process: topology.procs_per_node=1."
        )
    return parameters


def chosen(model: nn.Module, patterns: Any, *, key: str) -> list[nn.Parameter]:
    """Return the parameters that match any of `patterns`, in the form of `optimizer.groups`' `params`.

    Raises ConfigError for a pattern that matches nothing, unless the model is cut into stages.
    """
    named = dict(model.named_parameters())
    if isinstance(patterns, list):
        parsed = [Pattern(pattern, key=f"{key}.{number}") for number, pattern in enumerate(patterns)]
    else:
        parsed = [Pattern(patterns, key=key)]

    parameters: dict[str, nn.Parameter] = {}
    for pattern in parsed:
        matching = {name: parameter for name, parameter in named.items() if pattern.matches(name, ndim=parameter.ndim)}
        if not matching and layout_of(model) is None:
            raise pattern.refused(named)
        parameters |= matching
    return list(parameters.values())


def check_dense(model: nn.Module, *, strategy: str) -> None:
    """Raise ConfigError if a module to train has sparse gradients, as nn.Embedding(sparse=True) does."""
    names = []
    for module_name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            for name, parameter in module.named_parameters(recurse=False, prefix=module_name):
                if parameter.requires_grad:
                    names.append(name)
    if names:
        raise ConfigError(
            f"strategy={strategy} averages dense gradients, and there is a sparse one: {', '.join(names)}.\n"
            "Make it dense (sparse=False of nn.Embedding), or use strategy=ddp with backend=gloo and comm_hook=null."
        )


def check_same_change(changed: Mapping[str, bool], context: Context, *, group: dist.ProcessGroup | None = None) -> None:
    """Raise RunError on every rank of `group` (None: of the run) if they don't all train the same parameters now.

    Args:
        changed: By name, whether the parameter is trained now; only those where that has changed.
    """
    changes = gather_to_all(dict(changed), context, group=group)
    if all(change == changed for change in changes):
        return
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    lines = []
    for rank, change in list(zip(ranks, changes, strict=True))[:_SHOWN]:
        lines.append(f"\n  rank {rank}: {described_change(change) or 'nothing'}")
    raise RunError(
        f"The ranks would train different parameters from here on. What has changed: {''.join(lines)}\n"
        "Set requires_grad on every rank, after the same step; it must not depend on the rank or on its samples."
    )


def described_change(changed: Mapping[str, bool]) -> str:
    """Return what changed, for messages: "unfrozen: a, b; frozen: c"."""
    parts = []
    for text, flag in (("unfrozen", True), ("frozen", False)):
        names = [name for name, is_trained in changed.items() if is_trained is flag]
        if names:
            parts.append(f"{text}: {first_few(names)}")
    return "; ".join(parts)


def first_few(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are, for messages."""
    text = ", ".join(names[:_SHOWN])
    if len(names) > _SHOWN:
        text += f" and {len(names) - _SHOWN} more"
    return text


@final
class Trainable:
    """The parameters of a model that require a gradient, and their names, as of the last `update`."""

    def __init__(self, model: nn.Module) -> None:
        self._named = dict(model.named_parameters())
        self._flags = [False] * len(self._named)
        self.parameters: list[nn.Parameter] = []
        self.names: list[str] = []
        self.update()

    def has_changed(self) -> bool:
        """Return True if any `requires_grad` differs from what it was. Called in every step."""
        return list(map(_requires_grad, self._named.values())) != self._flags

    def check_all_known(self, model: nn.Module) -> None:
        """Raise TargetError for a parameter that was made since, as in a forward: no optimizer or other rank has it."""
        known = set(map(id, self._named.values()))
        late = []
        for name, parameter in model.named_parameters():
            if name not in self._named and id(parameter) not in known:
                late.append(name)
        if late:
            raise TargetError(
                f"{type(model).__name__} has made {first_few(late)} after the start of the training, such as in its "
                "forward. No optimizer trains it, and other processes have another one.\n"
                "Make every parameter in __init__. What isn't trained is a buffer: self.register_buffer(name, tensor)"
            )

    def update(self) -> dict[str, bool]:
        """Take the flags as they are now; return the new ones of the parameters that changed, by name.

        A gradient left on a frozen parameter is dropped, since the optimizer would apply it.
        """
        before = self._flags
        self._flags = list(map(_requires_grad, self._named.values()))
        self.parameters = list(itertools.compress(self._named.values(), self._flags))
        self.names = list(itertools.compress(self._named, self._flags))
        for parameter in self._named.values():
            if not parameter.requires_grad:
                parameter.grad = None
        changed = {}
        for name, flag_before, flag in zip(self._named, before, self._flags, strict=True):
            if flag is not flag_before:
                changed[name] = flag
        return changed

    def restore(self, names: Collection[str]) -> None:
        """Make the parameters of these names require a gradient, and no others."""
        for name, parameter in self._named.items():
            parameter.requires_grad_(name in names)

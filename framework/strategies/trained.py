"""Checks of the parameters to train, for strategies: at the start and when `requires_grad` changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from framework.distributed.context import Context
from framework.errors import ConfigError, RunError

_SHOWN = 4
_WAY_OUT = "Set requires_grad on every rank, after the same step; it must not depend on the rank or on its samples."


def trained(model: nn.Module, *, strategy: str, averages: str = "gradients") -> list[nn.Parameter]:
    """Return the parameters that require a gradient. Raises ConfigError if there are none."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ConfigError(
            f"strategy={strategy} averages {averages}, but no parameter of {type(model).__name__} requires a "
            "gradient.\nSet requires_grad on those to train, or use one process: topology.procs_per_node=1."
        )
    return parameters


def check_dense(model: nn.Module, *, strategy: str) -> None:
    """Raise ConfigError if a module to train has sparse gradients, as nn.Embedding(sparse=True) does."""
    names = [
        f"{name}.{own}".lstrip(".")
        for name, module in model.named_modules()
        if getattr(module, "sparse", False) is True
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
    ]
    if names:
        raise refused_sparse(names, strategy=strategy)


def refused_sparse(names: Iterable[str], *, strategy: str) -> ConfigError:
    return ConfigError(
        f"strategy={strategy} averages dense gradients, and there is a sparse one: {', '.join(names)}.\n"
        "Make it dense (sparse=False of nn.Embedding), or use strategy=ddp with backend=gloo and comm_hook=null."
    )


def check_same_change(changed: Mapping[str, bool], context: Context, *, group: dist.ProcessGroup | None = None) -> None:
    """Raise RunError on every rank of `group` (None: of the run) if they don't all train the same parameters now.

    changed: name → whether it is trained now, for the parameters where that has changed. If a rank without
    any change doesn't call this, the others raise RunError when the group's time-out has passed.
    """
    if context.world_size == 1:
        return
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    of_ranks: list[Any] = [None] * len(ranks)
    try:
        dist.all_gather_object(of_ranks, dict(changed), group=group)
    except RuntimeError as error:  # gloo's time-out raises nothing finer
        raise RunError(
            f"requires_grad of parameters has changed on rank {context.rank} ({described_change(changed)}), and "
            f"another rank made no such change after the same step: {error}\n{_WAY_OUT}"
        ) from error
    if all(each == changed for each in of_ranks):
        return
    lines = []
    for name, flag in {name: flag for each in of_ranks for name, flag in each.items()}.items():
        # It was the same on all ranks before.
        trains = {rank: each.get(name, not flag) for rank, each in zip(ranks, of_ranks, strict=True)}
        on, off = ([str(rank) for rank in ranks if trains[rank] is wanted] for wanted in (True, False))
        if on and off:
            lines.append(f"{name} on ranks {', '.join(on)}, not on {', '.join(off)}")
    shown = first_few(lines, separator="\n  ")
    raise RunError(f"The ranks would train different parameters from here on:\n  {shown}\n{_WAY_OUT}")


def described_change(changed: Mapping[str, bool]) -> str:
    """Return what changed, for messages: "unfrozen: a, b; frozen: c"."""
    parts = []
    for text, flag in (("unfrozen", True), ("frozen", False)):
        names = [name for name, is_trained in changed.items() if is_trained is flag]
        if names:
            parts.append(f"{text}: {first_few(names)}")
    return "; ".join(parts)


def first_few(names: Sequence[str], *, separator: str = ", ") -> str:
    """Return the first names, and how many more there are, for messages."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return separator.join(names[:_SHOWN]) + more

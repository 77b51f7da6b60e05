"""Which parameters are trained: what strategies need to know of it, at the start and when it changes."""

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
    """The parameters to train. Raises ConfigError where there are none, as `strategy` has nothing to average then."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ConfigError(
            f"strategy={strategy} averages {averages}, but no parameter of {type(model).__name__} requires a "
            "gradient.\nSet requires_grad on those to train, or use one process: topology.procs_per_node=1."
        )
    return parameters


def check_dense(model: nn.Module, *, strategy: str) -> None:
    """Raise ConfigError for a module to train that says that its gradients are sparse, as torch's embeddings do."""
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
    """Raise RunError, on every rank of `group` (of the run), where they don't train the same parameters from here on.

    changed: name → whether it is trained now, of the parameters for which that has changed. Every rank must call it.
    A rank on which nothing has changed doesn't; the others raise RunError when the group's time-out ends their wait.
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
        is_trained = [each.get(name, not flag) for each in of_ranks]  # it was the same on all before
        if len(set(is_trained)) > 1:
            with_it = ", ".join(str(number) for number, is_so in zip(ranks, is_trained, strict=True) if is_so)
            without = ", ".join(str(number) for number, is_so in zip(ranks, is_trained, strict=True) if not is_so)
            lines.append(f"{name} on ranks {with_it}, not on {without}")
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    raise RunError(
        "The ranks would train different parameters from here on:\n  "
        + "\n  ".join(lines[:_SHOWN] + more)
        + f"\n{_WAY_OUT}"
    )


def described_change(changed: Mapping[str, bool]) -> str:
    """What changed, for a message: "unfrozen: a, b; frozen: c"."""
    parts = []
    for text, flag in (("unfrozen", True), ("frozen", False)):
        names = [name for name, is_trained in changed.items() if is_trained is flag]
        if names:
            parts.append(f"{text}: {some(names)}")
    return "; ".join(parts)


def some(names: Sequence[str]) -> str:
    """The first of the names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more

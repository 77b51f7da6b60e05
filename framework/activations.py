"""What passes through chosen modules is not kept for the backward: they are computed again there.

https://pytorch.org/docs/stable/checkpoint.html, the form without re-entrance. Modules, names and state dicts stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from framework.errors import ConfigError
from framework.strategies.wrapping import AUTO, READ_FROM_OUTSIDE, by_class, has_forward

_KEY = "trainer.activation_checkpointing"


def recompute(model: nn.Module, which: str | Sequence[str] | None) -> None:
    """Have the modules of these classes keep only what they are given; None: nothing is changed.

    `auto` takes what the model repeats: modules with others in them of which several of one class stand in one list or
    sequence, and nothing inside of those. Draws of torch's generators are those of the first time again, and statistics
    of BatchNorm count once. To be called before the model is wrapped. Raises ConfigError where there is no such module.
    """
    if which is None:
        return
    for module in _repeated(model) if which == AUTO else by_class(model, which, key=_KEY):
        # Bound to the module, so that a copy of it computes with its own weights.
        module.forward = MethodType(_forward, module)


def _repeated(model: nn.Module) -> list[nn.Module]:
    found = list(_repeated_in(model))
    if not found:
        raise ConfigError(
            f"{_KEY}=auto takes what a model repeats, and {type(model).__name__} has no list or sequence with several "
            f"modules of one class that have others in them.\nName the classes of modules: {_KEY}=[CLASS]."
        )
    return found


def _repeated_in(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, READ_FROM_OUTSIDE):
        return
    children = list(module.children())
    counts: Counter[type] = Counter()
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        counts.update(type(child) for child in children if has_forward(child) and any(child.children()))
    for child in children:
        if counts[type(child)] > 1:
            yield child
        else:
            yield from _repeated_in(child)


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """In place of the module's own forward, which its class has."""
    own = MethodType(type(module).forward, module)
    return checkpoint(own, *args, use_reentrant=False, context_fn=partial(_contexts, module), **kwargs)


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Around the first time, and around the second."""
    return nullcontext(), _Again(module)


@final
class _Again:
    """Around computing a module again: gives BatchNorm's statistics back as they were.

    Raises ConfigError where another buffer was changed, which would be done twice in each step.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._statistics: list[tuple[Tensor, Tensor]] = []
        self._others: list[tuple[str, Tensor, int]] = []

    def __enter__(self) -> None:
        kept = {id(buffer): buffer for norm in self._module.modules() for buffer in _statistics(norm)}
        self._statistics = [(buffer, buffer.clone()) for buffer in kept.values()]
        named = self._module.named_buffers()
        self._others = [(name, each, each._version) for name, each in named if id(each) not in kept]

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        for buffer, before in self._statistics:
            buffer.copy_(before)
        now = dict(self._module.named_buffers())
        for name, before, version in self._others:
            if now.get(name) is not before or before._version != version:
                kind = type(self._module).__name__
                raise ConfigError(
                    f"{_KEY}: the forward of {kind} changes its buffer {name}, and would do so twice in each step.\n"
                    f"Leave out {kind}: name other classes, {_KEY}=[CLASS]."
                )


def _statistics(module: nn.Module) -> list[Tensor]:
    if not isinstance(module, nn.modules.batchnorm._NormBase) or not module.training:
        return []
    return list(module.buffers(recurse=False))

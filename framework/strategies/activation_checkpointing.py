"""Activation checkpointing: recompute chosen modules in the backward instead of keeping their activations.

With torch.utils.checkpoint, non-reentrant: https://pytorch.org/docs/stable/checkpoint.html. Modules, names and state
dicts stay the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from framework.errors import ConfigError
from framework.strategies.wrapping import AUTO, READ_FROM_OUTSIDE, by_class, has_forward

_KEY = "trainer.activation_checkpointing"


def apply_activation_checkpointing(model: nn.Module, which: str | Sequence[str] | None) -> None:
    """Have the modules of these classes keep only their inputs for the backward; None: change nothing.

    `auto` takes blocks that the model repeats: several modules of one class in a list or sequence, with children.
    Random numbers are the same in the recomputation, and BatchNorm's statistics are updated once. Call it before the
    model is wrapped. Raises ConfigError if there is no such module.
    """
    if which is None:
        return
    modules = list(_repeated(model)) if which == AUTO else by_class(model, which, key=_KEY)
    if which == AUTO and not modules:
        raise ConfigError(
            f"{_KEY}=auto takes what a model repeats, and {type(model).__name__} has no list or sequence with several "
            f"modules of one class that have others in them.\nName the classes of modules: {_KEY}=[CLASS]."
        )
    for module in modules:
        # Bound to the module, so that a copy of it computes with its own weights.
        module.forward = MethodType(_forward, module)


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
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
            yield from _repeated(child)


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replace the module's forward, which its class still has."""
    own = MethodType(type(module).forward, module)

    def forward(_: object, *values: Any) -> Any:
        keywords = dict(zip(kwargs, values[len(args) :], strict=True))
        return own(*values[: len(args)], **keywords)

    # Pass everything by position: only for positional arguments does torch save the generators of their devices and
    # detect changes before the backward.
    return checkpoint(
        forward,
        _of_devices(module),
        *args,
        *kwargs.values(),
        use_reentrant=False,
        # Contexts of the forward and of the recomputation.
        context_fn=lambda: (nullcontext(), _recomputation(module)),
    )


def _of_devices(module: nn.Module) -> list[nn.Parameter]:
    """Return one parameter on each of the module's accelerators, so that torch saves the generators of all."""
    on_devices = {each.device: each for each in module.parameters() if each.device.type != "cpu"}
    return list(on_devices.values())


@contextmanager
def _recomputation(module: nn.Module) -> Iterator[None]:
    """Surround the recomputation of a module: restore BatchNorm's statistics afterwards.

    Raises ConfigError if another buffer was changed, which would happen twice in each step.
    """
    norms = (each for each in module.modules() if isinstance(each, nn.modules.batchnorm._NormBase) and each.training)
    statistics = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers(recurse=False)]
    kept = {id(buffer) for buffer, _ in statistics}
    others = [(name, each, each._version) for name, each in module.named_buffers() if id(each) not in kept]
    try:
        yield
    finally:  # torch ends most recomputations with an exception, once it has what it needs
        with torch.no_grad():
            for buffer, before in statistics:
                buffer.copy_(before)
        now = dict(module.named_buffers())
        for name, buffer, version in others:
            if now.get(name) is not buffer or buffer._version != version:
                kind = type(module).__name__
                raise ConfigError(
                    f"{_KEY}: the forward of {kind} changes its buffer {name}, and would do so twice in each step.\n"
                    f"Leave out {kind}: name other classes, {_KEY}=[CLASS]."
                )

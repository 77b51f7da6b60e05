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
from torch import Tensor, nn
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
    if which == AUTO:
        modules = list(_repeated(model))
        if not modules:
            raise ConfigError(
                f"{_KEY}=auto takes what a model repeats, and {type(model).__name__} has no list or sequence with "
                "several modules of one class that have others in them.\n"
                f"Name the classes of modules: {_KEY}=[CLASS]."
            )
    else:
        modules = by_class(model, which, key=_KEY)
    for module in modules:
        # Bound to the module, so that a copy of it computes with its own weights.
        module.forward = MethodType(_forward, module)


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks that a model repeats; nothing in them is yielded again."""
    if isinstance(module, READ_FROM_OUTSIDE):
        return
    children = list(module.children())
    blocks: Counter[type] = Counter()
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        blocks.update(type(child) for child in children if has_forward(child) and any(child.children()))
    for child in children:
        if blocks[type(child)] > 1:
            yield child
        else:
            yield from _repeated(child)


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replace the module's forward, which its class still has."""
    original_forward = MethodType(type(module).forward, module)

    # Everything is passed by position: only for positional arguments does torch save the generators of their devices,
    # and detect changes before the backward.
    def forward(_: object, *values: Any) -> Any:
        keywords = dict(zip(kwargs, values[len(args) :], strict=True))
        return original_forward(*values[: len(args)], **keywords)

    return checkpoint(
        forward,
        _one_parameter_per_device(module),
        *args,
        *kwargs.values(),
        use_reentrant=False,
        # Contexts of the forward and of the recomputation.
        context_fn=lambda: (nullcontext(), _recomputation(module)),
    )


def _one_parameter_per_device(module: nn.Module) -> list[nn.Parameter]:
    """Return one parameter on each of the module's accelerators, so that torch saves the generators of all."""
    by_device = {parameter.device: parameter for parameter in module.parameters()}
    return [parameter for device, parameter in by_device.items() if device.type != "cpu"]


@contextmanager
def _recomputation(module: nn.Module) -> Iterator[None]:
    """Surround the recomputation of a module: restore BatchNorm's statistics afterwards.

    Raises ConfigError if another buffer was changed, which would happen twice in each step.
    """
    statistics: list[Tensor] = []
    for inner in module.modules():
        if isinstance(inner, nn.modules.batchnorm._NormBase) and inner.training:
            statistics += inner.buffers(recurse=False)
    values_before = [buffer.clone() for buffer in statistics]
    ids_of_statistics = {id(buffer) for buffer in statistics}
    other_buffers = {}
    for name, buffer in module.named_buffers():
        if id(buffer) not in ids_of_statistics:
            other_buffers[name] = (buffer, buffer._version)

    # Torch ends most recomputations with an exception, once it has what it needs.
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(statistics, values_before, strict=True):
                buffer.copy_(value)
        buffers_now = dict(module.named_buffers())
        for name, (buffer, version) in other_buffers.items():
            if buffers_now.get(name) is not buffer or buffer._version != version:
                kind = type(module).__name__
                raise ConfigError(
                    f"{_KEY}: the forward of {kind} changes its buffer {name}, and would do so twice in each step.\n"
                    f"Leave out {kind}: name other classes, {_KEY}=[CLASS]."
                )

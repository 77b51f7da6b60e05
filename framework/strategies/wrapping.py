"""Which modules of a model are taken by themselves: of classes that were named, or of so many parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from torch import nn

from framework.errors import ConfigError

AUTO = "auto"
"""In place of names of classes."""

READ_FROM_OUTSIDE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Modules of torch that read weights of their children without calling them: they stay whole."""


def check_classes(given: str | Sequence[str] | None, *, key: str) -> None:
    """Raise ConfigError for what is neither `auto` nor a list of names, and for an empty one."""
    if isinstance(given, str) and given != AUTO:
        raise ConfigError(f"{key}={given}: must be {AUTO}, or a list of class names: {key}=[{given}]")
    if given is not None and not given:
        raise ConfigError(f"{key}=[]: must be {AUTO}, or a list of class names, such as {key}=[Block].")


def by_class(model: nn.Module, names: Collection[str], *, key: str) -> list[nn.Module]:
    """The modules in `model` of the classes that `key` named, children before their parents.

    Raises ConfigError for a name no module has, and for a class that is never called.
    """
    found = [(type(module).__name__, module) for module in inside_out(model) if module is not model]
    missing = set(names) - {name for name, _ in found}
    if missing:
        there = ", ".join(sorted({name for name, _ in found}))
        raise ConfigError(
            f"{key}: {type(model).__name__} has no module of the class {', '.join(sorted(missing))}.\n"
            f"It has {there or 'no modules in it'}."
        )
    taken = [(name, module) for name, module in found if name in names]
    for name, module in taken:
        if not has_forward(module):
            raise ConfigError(f"{key}: {name} only holds other modules. Name the class of those.")
    return [module for _, module in taken]


def by_size(model: nn.Module, at_least: int) -> Iterator[nn.Module]:
    """Modules in `model` with so many parameters that none yielded before has, children before their parents."""
    uses = _uses(model)
    taken: set[int] = set()

    def within(module: nn.Module) -> Iterator[nn.Module]:
        if not isinstance(module, READ_FROM_OUTSIDE):
            for child in module.children():
                yield from within(child)
        # The output of attention is a view, and torch warns of what may be done to one that a gathered module gave.
        if module is model or not has_forward(module) or isinstance(module, nn.MultiheadAttention):
            return
        rest = {id(each): each.numel() for each in module.parameters() if id(each) not in taken}
        here = _uses(module)
        # What others use as well has to be gathered for them too: it is left to a module that has all of them in it.
        if sum(rest.values()) >= at_least and all(uses[each] == here[each] for each in rest):
            taken.update(rest)
            yield module

    yield from within(model)


def inside_out(module: nn.Module) -> Iterator[nn.Module]:
    """All modules in it and itself, children before their parents."""
    for child in module.children():
        yield from inside_out(child)
    yield module


def has_forward(module: nn.Module) -> bool:
    """Whether it is called, and doesn't only hold others."""
    return type(module).forward is not nn.Module.forward


def _uses(model: nn.Module) -> Counter[int]:
    """In how many places each parameter is, by its id."""
    return Counter(id(each) for module in model.modules() for each in module._parameters.values() if each is not None)

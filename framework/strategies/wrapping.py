"""Choose modules of a model by the names of their classes."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from framework.errors import ConfigError

# Stands in place of names of classes.
AUTO = "auto"
# Modules of torch that read weights of their children without calling them: they stay whole.
READ_FROM_OUTSIDE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def by_class(model: nn.Module, names: Collection[str], *, key: str) -> list[nn.Module]:
    """Return the modules in `model` of the classes that `key` names, children before their parents.

    Raises ConfigError for a name no module has, and for a class that is never called.
    """
    inner = [module for module in reversed(list(model.modules())) if module is not model]
    class_names = {type(module).__name__ for module in inner}
    missing = set(names) - class_names
    if missing:
        raise ConfigError(
            f"{key}: {type(model).__name__} has no module of the class {', '.join(sorted(missing))}.\n"
            f"It has {', '.join(sorted(class_names)) or 'no modules in it'}."
        )
    modules = [module for module in inner if type(module).__name__ in names]
    for module in modules:
        if not has_forward(module):
            raise ConfigError(f"{key}: {type(module).__name__} only holds other modules. Name the class of those.")
    return modules


def has_forward(module: nn.Module) -> bool:
    """Return True if it is called, False if it only holds other modules."""
    return type(module).forward is not nn.Module.forward

"""The table of a model's modules and their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from torch import nn

from framework.distributed.sharded import layout_of, num_parameters


def module_table(model: nn.Module, *, rows: int) -> str:
    """Return a table of the model's modules that have parameters, as deep as `rows` lines allow."""
    modules = list(_modules(model, depth=1))
    for depth in count(2):
        deeper = list(_modules(model, depth=depth))
        if len(deeper) == len(modules) or len(deeper) > rows:
            break
        modules = deeper
    num_left_out = 0
    if len(modules) > rows:
        # One row says how many there are besides.
        num_left_out = len(modules) - rows + 1
        modules = modules[: rows - 1]

    lines = [("model", "", "parameters", "trainable"), _whole_model(model).row]
    lines += [module.row for module in modules]
    if num_left_out:
        lines.append((f"  … {num_left_out} more", "", "", ""))

    # Not by rich, which takes 50 ms to load: training waits for this.
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = []
    for name, kind, number, trainable in lines:
        cells = (f"  {name:<{widths[0]}}", f"{kind:<{widths[1]}}", f"{number:>{widths[2]}}", trainable)
        padded.append("  ".join(cells).rstrip())
    return "\n".join(padded)


class _Module(NamedTuple):
    name: str
    kind: str
    depth: int
    num_parameters: int
    num_trained: int

    @property
    def row(self) -> tuple[str, str, str, str]:
        """The module's row of the table."""
        trainable = f"{self.num_trained:,}"
        if self.num_trained == self.num_parameters:
            trainable = "all"
        elif self.num_trained == 0:
            trainable = "none"
        indent = "  " * self.depth
        return f"{indent}{self.name}", self.kind, f"{self.num_parameters:,}", trainable


def _whole_model(model: nn.Module) -> _Module:
    num_frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    total = num_parameters(model)
    kind = ""
    if layout_of(model) is not None:
        kind = "rank 0's part"
    return _Module(type(model).__name__, kind, 0, total, total - num_frozen)


def _modules(module: nn.Module, *, depth: int, level: int = 1, prefix: str = "") -> Iterator[_Module]:
    """Yield the modules inside `module` down to a depth, parents first."""
    for name, child in module.named_children():
        number = sum(parameter.numel() for parameter in child.parameters())
        if number:
            yield _Module(f"{prefix}{name}", _kind(child), level, number, _num_trained(child))
            if level < depth:
                yield from _modules(child, depth=depth, level=level + 1, prefix=f"{prefix}{name}.")


def _kind(module: nn.Module) -> str:
    """Return the class's name; `4 × Block` for a container of several modules of one class."""
    kinds = [type(child).__name__ for child in module.children()]
    is_container = isinstance(module, (nn.ModuleList, nn.Sequential))
    if is_container and len(kinds) > 1 and len(set(kinds)) == 1:
        return f"{len(kinds)} × {kinds[0]}"
    return type(module).__name__


def _num_trained(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)

"""Watch what passes through a model's modules: the tensors that each forward is given and returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle


class Passed(NamedTuple):
    """Tensors that a module's forward is given or returns."""

    # "input" or "output".
    kind: str
    # The module's name; empty for the model itself.
    module: str
    type: str
    # The module whose forward calls it; None for the model itself.
    inside: str | None
    # With at least one value each.
    tensors: Sequence[Tensor]


@final
class ModuleWatch:
    """Calls `see` for each forward of each module of a model in training mode, from `start` until `stop`.

    A forward that activation checkpointing repeats in the backward isn't seen again.
    """

    def __init__(self, model: nn.Module, see: Callable[[Passed], None]) -> None:
        self._model = model
        self._see = see
        self._handles: list[RemovableHandle] = []
        # Modules whose forward is running.
        self._open: list[str] = []

    def start(self) -> None:
        for name, module in self._model.named_modules():
            self._watch(name, module)

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._open = []

    def _watch(self, name: str, module: nn.Module) -> None:
        # Hooks are functions, not bound methods: a copy of the model copies its hooks and what they are bound to.
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._pass("input", name, module, (args, kwargs))
            self._open.append(name)

        def leave(module: nn.Module, _: Any, output: Any) -> None:
            self._open.pop()
            self._pass("output", name, module, output)

        self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    def _pass(self, kind: str, name: str, module: nn.Module, tree: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.numel()]
        if not tensors or not self._model.training or _is_in_backward():
            return
        inside = None
        if self._open:
            inside = self._open[-1]
        self._see(Passed(kind, name, type(module).__name__, inside, tensors))


def _is_in_backward() -> bool:
    # Private, but what torch's own activation checkpointing asks. Without it, repeated forwards would count twice.
    return torch._C._current_graph_task_id() != -1

"""Which parameters are trained: a change of `requires_grad` is noticed before the next step."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection
from typing import final

from torch import nn

_requires_grad = operator.attrgetter("requires_grad")


@final
class Trainable:
    """The parameters of a model that require a gradient, as of the last `update`.

    parameters: those parameters; names: their names, both in the model's order.
    """

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        self._names, self._all = list(named), list(named.values())
        self._flags = [False] * len(named)
        self.parameters: list[nn.Parameter] = []
        self.names: list[str] = []
        self.update()

    def has_changed(self) -> bool:
        """Whether any `requires_grad` differs from what it was. Called in every step."""
        return list(map(_requires_grad, self._all)) != self._flags

    def update(self) -> dict[str, bool]:
        """Take the flags as they are now; return the new ones of the parameters that changed, by name.

        A gradient left on a frozen parameter is dropped, since the optimizer would apply it.
        """
        before, self._flags = self._flags, list(map(_requires_grad, self._all))
        self.parameters = list(itertools.compress(self._all, self._flags))
        self.names = list(itertools.compress(self._names, self._flags))
        for parameter, flag in zip(self._all, self._flags, strict=True):
            if not flag:
                parameter.grad = None
        pairs = zip(self._names, before, self._flags, strict=True)
        return {name: flag for name, was, flag in pairs if flag is not was}

    def restore(self, names: Collection[str]) -> None:
        """Have the parameters of these names require a gradient, and no others."""
        for name, parameter in zip(self._names, self._all, strict=True):
            parameter.requires_grad_(name in names)

"""Find which targets a loss over classes ignores, and the weights of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from torch import Tensor, nn
from torch.nn import functional

IGNORE_INDEX = -100
"""torch's default `ignore_index`, which is never a class."""

_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)
_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)


@final
@dataclass(frozen=True)
class IgnoredTargets:
    """The targets that a loss ignores."""

    # Targets of this value are ignored.
    index: float
    # Returns the weights of the classes, or None if they have none.
    class_weights: Callable[[], Tensor | None] = lambda: None
    # True for cross entropy, which takes scores before softmax.
    takes_scores: bool = False
    # If floating-point targets are probabilities of classes, of which none is ignored.
    takes_probabilities: bool = True
    # If nothing says that the loss ignores anything, but -100 can't be a class.
    is_guess: bool = False

    def weight(self, output: Any, target: Tensor) -> float | Tensor | None:
        """Return the weight of the loss: a number on the CPU, else a tensor; None if it is a mean over samples.

        Costs two kernels: a few microseconds on a CPU.
        """
        if self.takes_probabilities and target.is_floating_point():
            return None
        if self.is_guess and not _are_classes(output, target):
            return None

        counted = target != self.index
        weights = self.class_weights()
        if weights is None:
            total = counted.sum()
        else:
            weights = weights.to(target.device)
            weight_of_each = weights[target.where(counted, 0)]
            total = weight_of_each.where(counted, 0).sum()
        if total.device.type == "cpu":
            return total.item()
        # On a GPU, reading the number would wait for the device.
        return total

    def leaves_out(self, target: Tensor) -> bool:
        """Return True if the loss of these targets isn't a mean over samples; waits for the device."""
        if self.class_weights() is not None:
            return True
        return bool((target == self.index).any())


def ignored_by(loss: Any) -> IgnoredTargets | None:
    """Return the targets that a loss ignores; None if it ignores none.

    Recognises torch's cross entropy and `nll_loss`, as module, function or partial, or held by a module of the user's,
    and other losses by `ignore_index`, as an attribute or a keyword of a partial.
    """
    keywords: dict[str, Any] = {}
    if isinstance(loss, partial):
        keywords = loss.keywords
        loss = loss.func
    if loss in _FUNCTIONS:
        return IgnoredTargets(
            keywords.get("ignore_index", IGNORE_INDEX),
            lambda: keywords.get("weight"),
            takes_scores=loss is functional.cross_entropy,
        )
    if isinstance(loss, _MODULES):
        return _of_module(loss)

    index = keywords.get("ignore_index", getattr(loss, "ignore_index", ...))
    if index is None:
        return None
    if index is not ...:
        return IgnoredTargets(index, takes_probabilities=False)

    if isinstance(loss, nn.Module):
        inner = [module for module in loss.modules() if isinstance(module, _MODULES)]
        if len(inner) == 1:
            return _of_module(inner[0])
    # Other losses of torch ignore nothing. Both a function and an object have the attribute `__module__`.
    if getattr(loss, "__module__", "").startswith("torch.nn."):
        return None
    return IgnoredTargets(IGNORE_INDEX, is_guess=True)


def _of_module(loss: Any) -> IgnoredTargets:
    # The weights are looked up at each call: they move to another device with the module.
    return IgnoredTargets(loss.ignore_index, lambda: loss.weight, takes_scores=isinstance(loss, nn.CrossEntropyLoss))


def _are_classes(output: Any, target: Tensor) -> bool:
    """Return True if the output has a row of scores for each element of the target.

    The rows may be those of samples, tokens or pixels, flattened or not. Of an output with several parts, any part may
    have them.
    """
    if isinstance(output, Tensor):
        if output.ndim < 2:
            return False
        # Classes are in the second dimension, or in the last one.
        numbers_of_classes = (output.shape[1], output.shape[-1])
        return any(number > 1 and output.numel() == target.numel() * number for number in numbers_of_classes)
    if isinstance(output, Mapping):
        return any(_are_classes(part, target) for part in output.values())
    if isinstance(output, (list, tuple)):
        return any(_are_classes(part, target) for part in output)
    return False

"""Gradients in a few flat tensors: a small collective costs about a millisecond over gloo, however small."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from framework.errors import ConfigError

_MB = 1 << 20


def by_kind(tensors: Iterable[Tensor], *, cap_bytes: float = math.inf) -> Iterator[list[Tensor]]:
    """All of them in lists of one type and device, in order, of at most so many bytes where they are several."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for kind in kinds.values():
        group: list[Tensor] = []
        size = 0
        for tensor in kind:
            if group and size + tensor.nbytes > cap_bytes:
                yield group
                group, size = [], 0
            group.append(tensor)
            size += tensor.nbytes
        yield group


def cap_in_bytes(bucket_cap_mb: float) -> float:
    """Of `strategy.bucket_cap_mb`. Raises ConfigError below 0."""
    if not bucket_cap_mb >= 0:
        raise ConfigError(f"strategy.bucket_cap_mb={bucket_cap_mb} must be 0, for a call for each tensor, or greater.")
    return bucket_cap_mb * _MB


@final
class Bucket:
    """The gradients of some parameters, of one type and device, in `flat`: what ranks reduce, laid out alike on all.

    Behind them is a flag for each that says whether there is one: 0 after the reduction where no rank has it. So ranks
    agree about that without a collective of its own, and only a rank that lacks one has to look (and wait for the
    device). The memory stays; after `hand_out` the gradients lie in it, with strides as the parameters'.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        sizes = [parameter.numel() for parameter in self.parameters]
        first = self.parameters[0]
        self.flat = torch.zeros(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
        *parts, self._flags = self.flat.split([*sizes, len(sizes)])
        self._views = [
            part.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride())
            for part, parameter in zip(parts, self.parameters, strict=True)
        ]
        self._missing: list[int] = []

    @torch.no_grad()
    def fill(self) -> None:
        """Take the gradients in, zeros for those that this rank hasn't. Raises RuntimeError for a sparse one."""
        gradients = [parameter.grad for parameter in self.parameters]
        there = [gradient for gradient in gradients if gradient is not None]
        self._flags.fill_(1.0)
        if len(there) == len(gradients):
            self._missing = []
            torch._foreach_copy_(self._views, there)
            return
        self._missing = [number for number, gradient in enumerate(gradients) if gradient is None]
        for number in self._missing:
            self._views[number].zero_()
            self._flags[number] = 0.0
        for view, gradient in zip(self._views, gradients, strict=True):
            if gradient is not None:
                view.copy_(gradient)

    def hand_out(self) -> None:
        """Give the parameters their gradients; what no rank has used keeps having none."""
        absent: set[int] = set()
        if self._missing:
            flags = self._flags.tolist()
            absent = {number for number in self._missing if flags[number] == 0}
        for number, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            if number not in absent:
                parameter.grad = view

    def sparse(self) -> list[Tensor]:
        """Parameters whose gradient here is sparse."""
        return [each for each in self.parameters if each.grad is not None and each.grad.layout != torch.strided]

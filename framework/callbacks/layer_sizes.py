"""Records how large the values are in a step: of the batch, of what passes through layers, of gradients and weights.

Of each tensor it keeps a norm, one for each sample if the first dimension is that of the samples. A norm is NaN or
infinite if a value is. The 2-norm is the cheapest reduction that also says how large the values are; on the CPU the
largest value takes ten times as long. Norms stay on their device until a step is read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeGuard, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path
from torch.utils.hooks import RemovableHandle

from framework.distributed.sharded import local_tensor
from framework.types import MicroBatchInfo, StepOutput

Direction = Literal["forward", "backward", "update"]
Kind = Literal["batch", "input", "output", "loss", "parameter", "weight"]

# Entries of a batch with the lengths of its sequences, or with a 1 for each place that isn't padding.
LENGTHS = ("length", "lengths", "attention_mask")

_HALF = (torch.float16, torch.bfloat16)


@dataclass(slots=True)
class Event:
    """A tensor that was measured.

    In the forward it is an entry of the batch, the input or output of a layer, or the loss. In the backward it is the
    gradient of one of these, or of a parameter, before ranks exchange it. In the update it is a weight after the step.
    """

    direction: Direction
    kind: Kind
    # The module's name, empty for the model itself; of a parameter or weight, the parameter's name; of an entry of the
    # batch, such as `batch[1]` or `batch['image']`.
    layer: str
    type: str
    # How often the place came before in this micro-batch, since a layer may be called several times.
    occurrence: int
    # Its position in `StepSizes.micro_batches`; -1 in the update.
    micro_batch: int
    # Of the tensor: `float32`.
    dtype: str = ""
    # The module whose forward was running; None if none was.
    inside: str | None = None
    # The layer that returned last before this one was called, in this micro-batch; None if none had.
    after: str | None = None
    # The innermost module that got this tensor as its input; None if none did.
    consumer: str | None = None
    # There is a norm for each sample of the micro-batch.
    is_per_sample: bool = False
    num_norms: int = 1
    # Values that each norm is of; 1 if it is the largest of them.
    num_values: int = 1
    # Large values are infinite in the norm, since it squares them.
    squares: bool = True

    @property
    def place(self) -> tuple[str, str, str, int]:
        return self.direction, self.kind, self.layer, self.occurrence


class _Known(NamedTuple):
    """A tensor that was measured."""

    tensor: Tensor
    # Changes in place count it up.
    version: int
    event: Event


@dataclass(frozen=True)
class Measured:
    """An event with the sizes of its tensor's values: one, or one for each sample.

    A size is the root of the mean of the squares, or the largest value.
    """

    event: Event
    sizes: Sequence[float]

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, self.sizes))

    @property
    def largest(self) -> float:
        """The largest of the sizes; infinite or NaN if one is."""
        if not self.is_finite:
            return math.inf
        return max(self.sizes, default=0.0)


@dataclass
class StepSizes:
    """What was measured in one optimizer step of this rank."""

    # Optimizer steps done, this one included; as many as before it until it is done.
    step: int
    # Of each micro-batch, in the order of their forward passes. A task with several losses has each several times.
    micro_batches: list[MicroBatchInfo] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    # The learning rates of the optimizers' groups, by optimizer and number.
    lrs: dict[tuple[int, int], float] = field(default_factory=dict)
    # The norms of all events, one after another.
    norms: Tensor | None = None
    # Those of losses and weights, one after another.
    deciding: Tensor | None = None

    def is_bad(self) -> bool:
        """Return True if a loss or weight isn't finite; waits for the device.

        Other values may be infinite in a good step, as those of a mask.
        """
        return self.deciding is not None and not bool(self.deciding.isfinite().all())

    def measured(self) -> list[Measured]:
        """Return what was measured, in order; waits for the device."""
        if self.norms is None:
            return []
        norms = iter(self.norms.tolist())
        result = []
        for event in self.events:
            scale = 1 / math.sqrt(event.num_values)
            result.append(Measured(event, [next(norms) * scale for _ in range(event.num_norms)]))
        return result


@final
class LayerSizes:
    """Measures each training step, from `begin` to `end`, with hooks on a model and its optimizer.

    Nothing is measured in compiled code, or in the forward passes that activation checkpointing repeats.

    Args:
        norm: 2, or infinite for the largest value.
        dtype: of the norms; None: float32, or that of wider tensors.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, norm: float = 2.0, dtype: torch.dtype | None = None
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._norm = norm
        self._dtype = dtype
        self._handles: list[RemovableHandle] = []
        self._is_open = False
        # Modules whose forward is running.
        self._running: list[str] = []
        # What is known already: the batch, and what was measured last, since what a layer returns is the next one's
        # input.
        self._batch: list[_Known] = []
        self._last: _Known | None = None
        # The layer that returned last.
        self._after: str | None = None
        self._occurrences: Counter[tuple[str, str, str]] = Counter()
        self._norms: list[Tensor] = []
        self._deciding: list[Tensor] = []
        self._sizes = StepSizes(0)

    def begin(self, info: MicroBatchInfo) -> None:
        """Measure from here on, for this micro-batch. A stand-in isn't measured."""
        if not self._handles:
            # Not before the first step: hooks are called in the order in which they were registered, and others may
            # change what a layer returns.
            self._install()
        self._forget()
        self._is_open = info.num_samples > 0
        if not self._is_open:
            return
        # Steps are kept for a while, and whole batches would take much memory.
        self._sizes.micro_batches.append(info._replace(batch=lengths_of(info.batch)))
        for path, tensor in tree_leaves_with_path(info.batch):
            if _is_measurable(tensor):
                event = self._measure(tensor.detach(), "forward", "batch", f"batch{keystr(path)}", "")
                if event is not None:
                    self._batch.append(_Known(tensor, tensor._version, event))

    def note_loss(self, output: StepOutput) -> None:
        """Measure the loss, if it counts."""
        if self._is_open and output.num_samples:
            loss = output.loss.detach()
            if isinstance(output.weight, Tensor):
                # The mean over nothing is NaN, and doesn't count.
                loss = torch.where(output.weight > 0, loss, 0)
            if not isinstance(output.weight, (int, float)) or output.weight:
                self._measure(loss, "forward", "loss", "", "")
                self._deciding.append(self._norms[-1])

    def note_gradient(self, name: str, gradient: Tensor) -> None:
        """Measure the gradient of a parameter."""
        if self._is_open:
            self._measure(gradient, "backward", "parameter", name, "")

    def end(self, step: int) -> StepSizes:
        """Measure the weights and return the step."""
        self._is_open = False
        self._forget()
        self.measure_weights()
        sizes = self._sizes
        sizes.step = step
        sizes.norms = _joined(self._norms)
        sizes.deciding = _joined(self._deciding)
        self._norms = []
        self._deciding = []
        self._sizes = StepSizes(step)
        return sizes

    def measure_weights(self) -> None:
        """Measure the weights, in one call for all of a device."""
        names = []
        weights = []
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and parameter.is_floating_point() and parameter.numel():
                names.append(name)
                weights.append(local_tensor(parameter))
        if not weights:
            return
        norms = torch._foreach_norm(weights, self._norm, dtype=self._dtype)
        for name, weight, norm in zip(names, weights, norms, strict=True):
            event = Event("update", "weight", name, "", 0, -1, dtype=_dtype(weight))
            self._finish(event, norm.reshape(1), num_values=weight.numel())
            self._deciding.append(self._norms[-1])

    def remove(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._is_open = False
        self._forget()

    def _forget(self) -> None:
        """Forget the micro-batch, whose tensors would stay in memory."""
        self._occurrences.clear()
        self._batch.clear()
        self._last = None
        self._after = None
        self._running.clear()

    # Hooks are functions, not bound methods: a copy of the model copies its hooks and what they are bound to.

    def _install(self) -> None:
        for name, module in self._model.named_modules():
            self._handles += self._watch(name, module)
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                hook = partial(_measure_gradient, self, name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self._handles.append(self._optimizer.register_step_pre_hook(partial(_note_lrs, self)))

    def _watch(self, name: str, module: nn.Module) -> list[RemovableHandle]:
        kind = type(module).__name__

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self._is_measuring():
                self._measure_all((args, kwargs), "input", name, kind)
                self._running.append(name)

        def leave(_: nn.Module, __: Any, output: Any) -> None:
            if self._is_measuring():
                if self._running:
                    self._running.pop()
                self._measure_all(output, "output", name, kind)
                self._after = name

        return [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave),
        ]

    def _is_measuring(self) -> bool:
        if torch.compiler.is_compiling() or not self._is_open:
            return False
        # Activation checkpointing runs forward passes in the backward.
        return torch._C._current_graph_task_id() == -1

    def _measure_all(self, tree: Any, kind: Kind, layer: str, layer_type: str) -> None:
        """Measure the tensors that a module gets or returns, and have their gradients measured.

        Parameters are measured as such, and a hook on one would stay after the step.
        """
        for tensor in tree_leaves(tree):
            if not _is_measurable(tensor) or isinstance(tensor, nn.Parameter):
                continue
            known = self._known(tensor)
            if known is not None:
                if kind == "input":
                    known.consumer = layer
                continue
            event = self._measure(tensor.detach(), "forward", kind, layer, layer_type)
            if event is None:
                continue
            event.after = self._after
            self._last = _Known(tensor, tensor._version, event)
            if tensor.requires_grad:
                tensor.register_hook(self._gradient_hook(event))

    def _known(self, tensor: Tensor) -> Event | None:
        """Return the event in which this tensor was measured, if it is of the batch or the last one."""
        candidates = list(self._batch)
        if self._last is not None:
            candidates.append(self._last)
        for known in candidates:
            if known.tensor is tensor and known.version == tensor._version:
                return known.event
        return None

    def _gradient_hook(self, event: Event) -> Callable[[Tensor], None]:
        def measure(gradient: Tensor) -> None:
            if self._is_open:
                measured = self._measure(gradient.detach(), "backward", event.kind, event.layer, event.type)
                if measured is not None:
                    measured.micro_batch = event.micro_batch
                    measured.occurrence = event.occurrence
                    measured.inside = event.inside
                    measured.consumer = event.consumer

        return measure

    def _measure(self, tensor: Tensor, direction: Direction, kind: Kind, layer: str, layer_type: str) -> Event | None:
        """Note the norm of a tensor, or of each sample's part."""
        tensor = local_tensor(tensor)
        if tensor.layout is not torch.strided or not tensor.numel():
            return None
        sizes = self._sizes
        number = len(sizes.micro_batches) - 1
        occurrence = self._occurrences[direction, kind, layer]
        self._occurrences[direction, kind, layer] += 1
        event = Event(direction, kind, layer, layer_type, occurrence, number, dtype=_dtype(tensor))
        if self._running:
            event.inside = self._running[-1]
        num_values = tensor.numel()
        num_samples = _num_rows(sizes.micro_batches[number])
        dtype = self._dtype
        if dtype is None and tensor.dtype in _HALF:
            dtype = torch.float32
        if kind not in ("parameter", "loss") and tensor.ndim and tensor.shape[0] == num_samples:
            event.is_per_sample = True
            event.num_norms = num_samples
            num_values //= num_samples
            if tensor.ndim == 1:
                norms = tensor.abs()
            else:
                dims = tuple(range(1, tensor.ndim))
                norms = torch.linalg.vector_norm(tensor, self._norm, dim=dims, dtype=dtype)
        else:
            norms = torch.linalg.vector_norm(tensor, self._norm, dtype=dtype).reshape(1)
        self._finish(event, norms, num_values=num_values)
        return event

    def _finish(self, event: Event, norms: Tensor, *, num_values: int) -> None:
        """Add an event with its norms, each of which is of `num_values` values."""
        event.squares = self._norm == 2.0
        if event.squares:
            event.num_values = num_values
        self._sizes.events.append(event)
        self._norms.append(norms)


def _measure_gradient(sizes: LayerSizes, name: str, parameter: Tensor) -> None:
    if parameter.grad is not None:
        sizes.note_gradient(name, parameter.grad)


def _note_lrs(sizes: LayerSizes, optimizer: Optimizer, *_: Any) -> None:
    """Keep the learning rates of a step, without those in tensors: reading one may wait for the device."""
    for number, group in enumerate(optimizer.param_groups):
        if isinstance(group.get("lr"), (int, float)):
            sizes._sizes.lrs[id(optimizer), number] = group["lr"]


def lengths_of(batch: Any) -> dict[str, Any]:
    """Return the entries of a batch that say how long its padded sequences are."""
    if not isinstance(batch, Mapping):
        return {}
    return {name: batch[name] for name in LENGTHS if isinstance(batch.get(name), Tensor)}


def _is_measurable(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _joined(norms: Sequence[Tensor]) -> Tensor | None:
    """Return the values of all in one tensor, on the device of the first."""
    if not norms:
        return None
    return torch.cat([norm.to(norms[0].device) for norm in norms])


def _num_rows(info: MicroBatchInfo) -> int:
    """Return how many samples the micro-batch has, in its rows."""
    if info.indices is not None:
        return len(info.indices)
    return info.num_samples


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

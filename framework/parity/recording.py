"""A callback that notes, in every rank, what passes through the model's modules and what the optimizer makes of it."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from framework.distributed.context import Context
from framework.distributed.tensors import local, whole
from framework.parity.sketch import sample_sketches, sketch_whole, tensors_in, views_by_sample
from framework.parity.tolerance import moved_by, shown_gradient, unit_of
from framework.parity.trace import ENTERED, LEFT, Event, Passage, StartTrace, StepTrace, save
from framework.run_dir import RunDir
from framework.types import FitInfo, MicroIndices, StepReport, Stop

FOLDER = "parity"
_FLOAT32_UNIT = 2.0**-24


@final
class Recording:
    """Writes RUN/parity/rank_N_step_T.pt after each of `steps` optimizer steps, then wishes to stop.

    Dropout is switched off, and so is the short format in which GPUs multiply float32 numbers. precision: of the
    trainer, which says how far rounding reaches. moves_weights: begin with weights moved by that, up or down at random
    but the same each time. All randomness but this is left as it is: the generators are looked at and not used.
    """

    compares_replicas = "job=parity"

    def __init__(
        self, *, run_dir: RunDir, context: Context, steps: int, precision: str, moves_weights: bool = False
    ) -> None:
        self._folder = run_dir.path / FOLDER
        self._context = context
        self._steps = steps
        self._precision = precision
        self._moves_weights = moves_weights
        self._model: nn.Module | None = None
        self._step = 0
        self._forward = _ForwardRecord(context.devices, unit=0.0)
        self._update: _UpdateRecord | None = None
        self._handles: list[Any] = []
        self._tf32: tuple[bool, bool] | None = None

    def on_fit_start(self, info: FitInfo) -> None:
        self._tf32 = (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32)
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        model = self._model = info.model
        unit = unit_of(self._precision, [parameter.dtype for parameter in model.parameters()])
        dropouts = switch_off_dropout(model)
        if self._moves_weights:
            move_weights(model, by=moved_by(unit))
        update = self._update = _UpdateRecord(model, unit=unit)
        forward = self._forward = _ForwardRecord(self._context.devices, unit=unit)
        if self._context.is_main:
            weights = {name: sketch_whole(tensor) for name, tensor in update.start.items()}
            start = StartTrace(weights, type(model).__name__, unit, dropouts)
            save(self._folder, start, rank=0, step=0)
        # Functions, since who copies the model copies its hooks, and what bound methods are bound to.
        self._handles = [info.optimizer.register_step_pre_hook(lambda *_: self._note_gradients())]
        for name, module in model.named_modules():
            self._handles += forward.watch(name, module, is_recorded=lambda: model.training)

    def on_train_step_end(self, report: StepReport) -> Stop | None:
        assert self._update is not None
        self._step += 1
        update, forward = self._update, self._forward
        sizes = [micro.num_samples for micro in report.indices]
        trace = StepTrace(
            indices=_taken(report.indices),
            events=forward.by_sample(sizes),
            **update.after_step(),
            drew_after=forward.drew_since_last,
        )
        save(self._folder, trace, rank=self._context.rank, step=self._step)
        forward.clear()
        return Stop(f"parity.steps={self._steps} compared") if self._step >= self._steps else None

    def on_fit_end(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self._tf32 is not None:
            torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = self._tf32

    def _note_gradients(self) -> None:
        assert self._update is not None
        self._update.before_step()
        self._forward.look_for_draws()


def switch_off_dropout(model: nn.Module) -> int:
    """Set every probability of torch's own modules that drop values to 0; gives in how many modules it wasn't."""
    found = 0
    for module in model.modules():
        for kind, name in ((_DropoutNd, "p"), (nn.MultiheadAttention, "dropout"), (nn.RNNBase, "dropout")):
            if isinstance(module, kind) and getattr(module, name) > 0:
                setattr(module, name, 0.0)
                found += 1
    return found


@torch.no_grad()
def move_weights(model: nn.Module, *, by: float) -> None:
    """Multiply each weight by 1 + `by` or 1 − `by`, at random but the same each time; no generator moves."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        own = local(parameter)
        if own.is_floating_point() or own.is_complex():
            signs = torch.randint(2, own.shape, generator=generator) * 2 - 1
            # In more than the weights' own format, where a short one has no number so near to 1.
            factors = (1 + by * signs.double()).to(torch.float64 if by < _FLOAT32_UNIT else torch.float32)
            own.mul_(factors.to(own.device))


@dataclass(frozen=True)
class _Raw:
    """An event whose tensors aren't yet known by sample: the number of samples comes with the step's report."""

    event: Event
    tensors: tuple[tuple[tuple[int, ...], dict[int, Tensor]], ...]


@dataclass(frozen=True, eq=False)
class _Given:
    """A tensor and which version of its values; held, so that no other takes its place in memory meanwhile."""

    tensor: Tensor
    version: int

    def is_same_as(self, other: _Given) -> bool:
        return self.tensor is other.tensor and self.version == other.version


@final
class _ForwardRecord:
    """What passes through modules in one optimizer step."""

    def __init__(self, devices: Sequence[torch.device], *, unit: float) -> None:
        self._devices = devices
        self._dtype = torch.float32 if unit >= _FLOAT32_UNIT else torch.float64
        self._raw: list[_Raw] = []
        self._open: list[tuple[str, int]] = []  # modules whose forward is under way, and where it began
        self._last: list[_Given] = []
        self._drawn = self._generators()
        self.drew_since_last = False

    def watch(self, name: str, module: nn.Module, *, is_recorded: Callable[[], bool]) -> list[Any]:
        """Note every forward of the module; gives the handles of the hooks."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if is_recorded():
                self._note(ENTERED, name, module, (args, kwargs))
                self._open.append((name, len(self._raw)))

        def leave(module: nn.Module, _: Any, output: Any) -> None:
            if is_recorded():
                began = len(self._raw)
                while self._open:  # more than one where a forward raised and somebody caught it
                    opened, began = self._open.pop()
                    if opened == name:
                        break
                self._note(LEFT, name, module, output, own=began == len(self._raw))

        return [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave),
        ]

    def look_for_draws(self) -> None:
        """Note whether numbers were drawn since the last event."""
        self.drew_since_last = self._drew() or self.drew_since_last

    def by_sample(self, sizes: Sequence[int]) -> tuple[Event, ...] | None:
        """The events, those of all micro-batches of these sizes together; None where they went different ways.

        A micro-batch of size 0 is a stand-in, whose values are left out.
        """
        each, rest = divmod(len(self._raw), max(1, len(sizes)))
        if rest:
            return None
        parts = [_with_calls(self._raw[begin : begin + each]) for begin in range(0, each * len(sizes), max(1, each))]
        if any([raw.event.place for raw in a] != [raw.event.place for raw in b] for a, b in pairwise(parts)):
            return None
        return tuple(self._merged(same, sizes) for same in zip(*parts, strict=True))

    def clear(self) -> None:
        self._raw, self._open, self._last, self.drew_since_last = [], [], [], False

    def _merged(self, same: Sequence[_Raw], sizes: Sequence[int]) -> Event:
        event = replace(same[0].event, drew=any(raw.event.drew for raw in same))
        real = [(raw, size) for raw, size in zip(same, sizes, strict=True) if size]
        number = min((len(raw.tensors) for raw, _ in real), default=0)
        return replace(
            event,
            passages=tuple(
                self._passage([(raw.tensors[place], size) for raw, size in real]) for place in range(number)
            ),
        )

    def _passage(self, parts: Sequence[tuple[tuple[tuple[int, ...], dict[int, Tensor]], int]]) -> Passage:
        views = [views_by_sample(sketches, shape, num_samples=size) for (shape, sketches), size in parts]
        shared = [name for name in views[0] if all(name in each for each in views)]
        return Passage(
            {name: torch.cat([each[name] for each in views]).to(self._dtype) for name in shared},
            is_leading=all(bool(shape) and shape[0] == size for (shape, _), size in parts),
        )

    @torch.no_grad()
    def _note(self, kind: str, name: str, module: nn.Module, tree: Any, *, own: bool = False) -> None:
        given = [_Given(tensor, tensor._version) for tensor in tensors_in(tree)]
        # Most often what a module is given is what the one before gave.
        is_new = len(given) != len(self._last) or not all(map(_Given.is_same_as, given, self._last))
        event = Event(
            kind=kind,
            module=name,
            type=type(module).__name__,
            inside=self._open[-1][0] if self._open else None,
            call=1,
            drew=self._drew(),
            own=own,
            is_batch_norm=_is_batch_norm(module),
            passages=(),
        )
        tensors = tuple((tuple(each.tensor.shape), sample_sketches(each.tensor)) for each in given if is_new)
        self._raw.append(_Raw(event, tensors))
        self._last = given

    def _drew(self) -> bool:
        before, self._drawn = self._drawn, self._generators()
        return before != self._drawn

    def _generators(self) -> tuple[Any, ...]:
        """The states of everybody's generators, to be compared."""
        others = [
            bytes(torch.get_device_module(device).get_rng_state(device).tolist())
            for device in self._devices
            if device.type not in ("cpu", "meta")
        ]
        numpy = sys.modules.get("numpy")
        _, words, *places = (None, None) if numpy is None else numpy.random.get_state()
        drawn = None if words is None else words.tobytes()
        return torch.get_rng_state().numpy().tobytes(), others, random.getstate(), drawn, places


@final
class _UpdateRecord:
    """What the optimizer is given and what it makes of the weights. Keeps two copies of them, on the CPU."""

    def __init__(self, model: nn.Module, *, unit: float) -> None:
        self._model = model
        self._shown = shown_gradient(unit)
        self.start = {name: _copy(parameter) for name, parameter in model.named_parameters()}
        self._weighs = {name: torch.ones(tensor.shape) for name, tensor in self.start.items()}
        self._gradients: dict[str, Tensor | None] | None = None

    @torch.no_grad()
    def before_step(self) -> None:
        """Note the gradients. Every rank must call it."""
        self._gradients = {}
        for name, parameter in self._model.named_parameters():
            gradient = None if parameter.grad is None else whole(parameter.grad)
            self._gradients[name] = None if gradient is None else sketch_whole(gradient)
            if gradient is not None:
                self._weighs[name] *= weights_shown(gradient.cpu(), least=self._shown)

    @torch.no_grad()
    def after_step(self) -> dict[str, Any]:
        """Fields of a StepTrace. Every rank must call it."""
        changes: dict[str, Tensor] = {}
        norms: dict[str, float] = {}
        for name, parameter in self._model.named_parameters():
            now = _copy(parameter)
            changes[name] = sketch_whole((now - self.start[name]) * self._weighs[name])
            norms[name] = float(now.norm())
        gradients, self._gradients = self._gradients, None
        return {
            "gradients": gradients or {},
            "changes": changes,
            "norms": norms,
            "buffers": {name: sketch_whole(whole(buffer)) for name, buffer in self._model.named_buffers()},
            "is_left_out": gradients is None,
        }


def weights_shown(gradient: Tensor, *, least: float) -> Tensor:
    """How much of each value's change to look at: all where its gradient is at least twice `least` of the tensor's root
    mean square, nothing below once `least`, in between a part. In float32.

    An optimizer may make a whole step of a gradient however small (Adam's first is its sign): where the gradient is no
    more than rounding, so is the step's direction.
    """
    size = gradient.abs().float()
    limit = least * size.square().mean().sqrt()
    return torch.ones_like(size) if limit == 0 else (size / limit - 1).clamp(0, 1)


def _with_calls(part: Sequence[_Raw]) -> list[_Raw]:
    """The events of one micro-batch, each with the number of the module's call."""
    seen: Counter[tuple[str, str]] = Counter()
    numbered = []
    for raw in part:
        key = (raw.event.kind, raw.event.module)
        seen[key] += 1
        numbered.append(replace(raw, event=replace(raw.event, call=seen[key])))
    return numbered


def _is_batch_norm(module: nn.Module) -> bool:
    """Whether its output depends on the samples that come together in this process."""
    statistics = module.training or getattr(module, "running_mean", None) is None
    return isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm) and statistics


def _taken(indices: Sequence[MicroIndices]) -> Tensor:
    parts = [micro.indices[: micro.num_samples].cpu() for micro in indices]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _copy(parameter: Tensor) -> Tensor:
    """In float64, where differences of nearly equal numbers lose nothing."""
    values = whole(parameter.detach()).cpu()
    return values.to(torch.complex128 if values.is_complex() else torch.float64, copy=True)

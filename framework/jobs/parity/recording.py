"""A callback that records, on every rank, what passes through the model's modules and what the optimizer does.

A tensor that a module is given or returns is recorded as moments of its values, which don't depend on where its samples
are: weighted by the samples of each micro-batch, their mean is that of the global batch. Gradients, weights and buffers
are recorded as sketches, whose distance is about that of the tensors: each value gets a random sign and a bucket, and
each bucket is summed (count sketch: Charikar, Chen and Farach-Colton, 2002).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from framework.distributed.context import Context
from framework.distributed.seed import fingerprint
from framework.distributed.sharded import full_tensor, local_tensor
from framework.system.run_dir import RunDir
from framework.training.module_watch import ModuleWatch, Passed
from framework.types import FitInfo, StepInfo, Stop

# In `moments`. A normalised tensor has the first moment and the second of any other.
POWERS = (1, 2, 4)
_BUCKETS = 1024
_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def tolerance(precision: str, dtypes: Iterable[torch.dtype]) -> tuple[float, float]:
    """Return how far two trainings may always differ, and how far to move weights to measure how rounding carries.

    That is for the coarsest of these formats and of `precision`; docs/parity.md explains the numbers.
    """
    formats = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    if precision in _AUTOCAST:
        formats.append(_AUTOCAST[precision])
    # The largest relative error of one rounding.
    unit = max(torch.finfo(dtype).eps / 2 for dtype in formats)
    has_16_bits = unit > 2.0**-16
    if has_16_bits:
        # Sums are in float32.
        return 4 * unit, unit
    return 128 * unit, 64 * unit


@dataclass(frozen=True)
class Event:
    """A tensor that a module's forward is given or returns."""

    # "input" or "output".
    kind: str
    # The module's name; empty for the model itself.
    module: str
    type: str
    # The module whose forward calls it; None for the model itself.
    inside: str | None
    # Random numbers were drawn since the event before.
    drew: bool
    # As `moments` returns them; in a StepTrace, times its samples.
    moments: Tensor

    @property
    def place(self) -> tuple[str, str]:
        return self.kind, self.module


@dataclass(frozen=True)
class StepTrace:
    """One optimizer step of one rank. Gradients, weights and buffers are sketches by name."""

    num_samples: int
    # None if its micro-batches took different paths through the model.
    events: Sequence[Event]
    # Averaged over ranks and unscaled, before they are clipped.
    gradients: Mapping[str, Tensor]
    # Their changes since the start.
    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True)
class Trace:
    """What one rank writes to `RUN/parity/rank_N.pt`."""

    # Before the first step.
    weights: Mapping[str, Tensor]
    # The model's class.
    model: str
    # How far two trainings may always differ: see `tolerance`.
    floor: float
    # Modules in which dropout was switched off.
    dropouts: int
    steps: list[StepTrace]


def trace_file(folder: Path, *, rank: int) -> Path:
    """Return where a rank's Trace is in a run directory."""
    return folder / "parity" / f"rank_{rank}.pt"


@final
class Recording:
    """Writes this rank's Trace of `steps` optimizer steps, after which it stops the training.

    Dropout and TF32 are switched off. The random generators are compared, never used.

    Args:
        precision: of the trainer, which decides how far rounding reaches.
        moves_weights: start with weights moved by rounding, up or down at random but the same each time.
    """

    compares_replicas = "job=parity"

    def __init__(
        self, *, run_dir: RunDir, context: Context, steps: int, precision: str, moves_weights: bool = False
    ) -> None:
        self._devices = context.devices
        self._file = trace_file(run_dir.path, rank=context.rank)
        self._steps = steps
        self._precision = precision
        self._moves_weights = moves_weights
        # Of this step.
        self._events: list[Event] = []
        self._gradients: dict[str, Tensor] = {}

    def on_fit_start(self, info: FitInfo) -> None:
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
        model = info.model
        self._model = model
        floor, moved_by = tolerance(self._precision, [parameter.dtype for parameter in model.parameters()])
        dropouts = switch_off_dropout(model)
        if self._moves_weights:
            move_weights(model, by=moved_by)
        self._trace = Trace(_sketches(model.named_parameters()), type(model).__name__, floor, dropouts, steps=[])
        self._drawn = fingerprint(self._devices)
        ModuleWatch(model, self._record).start()

    def on_before_optimizer_step(self, _: Optimizer) -> None:
        gradients = []
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                gradients.append((name, parameter.grad))
        self._gradients = _sketches(gradients)

    def on_train_step_end(self, info: StepInfo) -> Stop | None:
        sizes = [micro.num_samples for micro in info.indices]
        weights = _sketches(self._model.named_parameters())
        step = StepTrace(
            num_samples=sum(sizes),
            events=step_events(self._events, sizes),
            gradients=self._gradients,
            weights={name: moved - self._trace.weights[name] for name, moved in weights.items()},
            buffers=_sketches(self._model.named_buffers()),
        )
        self._events = []
        self._gradients = {}
        self._trace.steps.append(step)
        if len(self._trace.steps) >= self._steps:
            return Stop(f"parity.steps={self._steps} compared")
        return None

    def on_fit_end(self) -> None:
        self._file.parent.mkdir(exist_ok=True)
        torch.save(self._trace, self._file)

    def _record(self, passed: Passed) -> None:
        drawn_before = self._drawn
        self._drawn = fingerprint(self._devices)
        drew = self._drawn != drawn_before
        for tensor in passed.tensors:
            event = Event(passed.kind, passed.module, passed.type, passed.inside, drew, moments(tensor))
            self._events.append(event)


def step_events(recorded: Sequence[Event], sizes: Sequence[int]) -> list[Event]:
    """Return the events of all micro-batches of these sizes together; none if they took different paths.

    A micro-batch of size 0 is a stand-in, whose values are left out.
    """
    length, remainder = divmod(len(recorded), len(sizes))
    if length == 0 or remainder != 0:
        return []
    parts = [recorded[begin : begin + length] for begin in range(0, len(recorded), length)]
    events = []
    for of_parts in zip(*parts, strict=True):
        first = of_parts[0]
        if any(event.place != first.place for event in of_parts):
            return []
        weighted = [size * event.moments for size, event in zip(sizes, of_parts, strict=True)]
        drew = any(event.drew for event in of_parts)
        events.append(replace(first, drew=drew, moments=torch.stack(weighted).sum(dim=0)))
    return events


def switch_off_dropout(model: nn.Module) -> int:
    """Set the dropout of torch's own modules to 0. Return in how many modules it wasn't."""
    count = 0
    for module in model.modules():
        for kind, name in ((_DropoutNd, "p"), (nn.MultiheadAttention, "dropout"), (nn.RNNBase, "dropout")):
            if isinstance(module, kind) and getattr(module, name) > 0:
                setattr(module, name, 0.0)
                count += 1
    return count


@torch.no_grad()
def move_weights(model: nn.Module, *, by: float) -> None:
    """Multiply each weight by 1 + `by` or 1 − `by`, at random but the same each time; no global generator moves."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        own = local_tensor(parameter)
        if own.is_floating_point() or own.is_complex():
            signs = torch.randint(2, own.shape, generator=generator) * 2 - 1
            # In float64: the weights' format may have no number so near to 1.
            own.mul_((1 + by * signs.double()).to(own.device))


def moments(tensor: Tensor) -> Tensor:
    """Return the mean of a tensor's values and of each of `POWERS` of their absolute values."""
    values = _exact(tensor)
    # In place, since activations may be large; `sum` rounds less than the norms of torch.linalg.
    sums = [values.sum(), values.abs_().sum(), values.square_().sum(), values.square_().sum()]
    return torch.stack(sums).cpu() / values.numel()


def sketch(tensor: Tensor) -> Tensor:
    """Return sums of a tensor's values with random signs, always the same ones: (_BUCKETS,)."""
    values = _exact(tensor).cpu()
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, values.shape, generator=generator, dtype=torch.int8) * 2 - 1
    padded = nn.functional.pad(values * signs, (0, -len(values) % _BUCKETS))
    return padded.reshape(-1, _BUCKETS).sum(dim=0)


def _sketches(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return sketches by name. Every rank must call it."""
    return {name: sketch(full_tensor(tensor)) for name, tensor in tensors}


def _exact(tensor: Tensor) -> Tensor:
    """Return all values in one dimension and in float64, where nearly equal ones still differ; 0 for NaN and Inf."""
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    return values.flatten().to(torch.float64, copy=True).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

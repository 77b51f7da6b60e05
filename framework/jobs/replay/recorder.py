"""A callback that records on every rank what happens in the steps that job=replay shows.

Each rank writes `replay/rank_N.json` in the run directory. Numbers that JSON doesn't have are texts: "nan", "inf".
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from framework.distributed.context import Context
from framework.distributed.sharded import full_tensor, is_model_sharded
from framework.jobs.replay.pictures import save_picture
from framework.jobs.replay.sample_names import sample_names
from framework.jobs.replay.step_file import StepFile
from framework.jobs.replay.training import PICTURES, STEP_FILE
from framework.system.run_dir import RunDir, write_object
from framework.training.module_watch import ModuleWatch, Passed
from framework.training.trainer import MakeStep, Trainer
from framework.types import Callback, MicroBatch, StepOutput, Window


def record_file(folder: Path, *, rank: int) -> Path:
    """Return where a rank's record is in a run directory."""
    return folder / "replay" / f"rank_{rank}.json"


@final
class Recorder(Callback):
    """Records steps `first` to `last`.

    Args:
        detect_anomaly: name the forward operation whose backward gives NaN.
        saved_rank: the rank whose part of step `last` is saved as a StepFile, in the run directory; None: none is.
    """

    def __init__(
        self,
        *,
        run_dir: RunDir,
        context: Context,
        first: int,
        last: int,
        detect_anomaly: bool = False,
        saved_rank: int | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._context = context
        self._first = first
        self._last = last
        self._detect_anomaly = detect_anomaly
        self._saved_rank = saved_rank
        self._steps: list[dict[str, Any]] = []
        # The gradients' norms by parameter, in the step that is recorded; None outside of such steps.
        self._norms: dict[str, float] | None = None

    def observe_trainer(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._model = trainer.state.bare_model
        trainer.wrap_steps(lambda make_step: partial(self._step, make_step))

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if self._norms is None:
            return
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None and id(parameter) in trained:
                self._norms[name] = _norm(parameter.grad)

    def _step(self, make_step: MakeStep, window: Window) -> Tensor:
        """Make a step, and record it if it is one of those."""
        number = self._trainer.progress.step + 1
        if not self._first <= number <= self._last:
            return make_step(window)

        file = self._step_file(number, window)
        taken: list[MicroBatch] = []
        outputs: list[dict[str, Any]] = []
        modules = _Modules()
        before = {name: weight.detach().clone() for name, weight in self._model.named_parameters()}
        weights: list[dict[str, Any]] = []
        anomaly: list[str] = []
        self._norms = {}
        window = window._replace(micro_batches=_noting(window.micro_batches, taken, file))
        try:
            with self._outputs_noted(outputs), self._modules_watched(modules), self._anomalies_noted(anomaly):
                loss = make_step(window)
            weights = self._weights(before)
        finally:
            # What is known of a step that has failed is written, too.
            record = {
                "step": number,
                "epoch": self._trainer.progress.epoch,
                "micro_batches": self._micro_batches(number, taken, window, outputs),
                "inputs": modules.inputs.plain(),
                "modules": modules.plain() if self._is_watched else None,
                "weights": weights,
                "anomaly": "\n".join(anomaly) or None,
            }
            self._steps.append(record)
            self._norms = None
            if number == self._last or not weights:
                self._write()
            if file is not None and self._saved_rank == self._context.rank:
                # So that it can be made in a debugger.
                losses = [output["loss"] for output in outputs]
                file.save(self._run_dir.path / STEP_FILE, losses=losses)
        return loss

    def _step_file(self, number: int, window: Window) -> StepFile | None:
        """Return the file to fill, if this step's is to be saved."""
        if self._saved_rank is None or number != self._last:
            return None
        # What is sharded is gathered, in which every rank takes part.
        if self._saved_rank == self._context.rank or is_model_sharded(self._model):
            return StepFile(self._trainer, window)
        return None

    @property
    def _is_watched(self) -> bool:
        # Hooks in a compiled model would change how it is compiled, hence its numbers.
        return self._trainer.settings.compile is None

    @contextmanager
    def _outputs_noted(self, outputs: list[dict[str, Any]]) -> Iterator[None]:
        """Note what the task computes from each micro-batch."""

        def note(output: StepOutput, objective: str) -> None:
            outputs.append(_output(output, objective))

        listeners = self._trainer.state.meter.listeners
        listeners.append(note)
        try:
            yield
        finally:
            listeners.remove(note)

    @contextmanager
    def _modules_watched(self, modules: _Modules) -> Iterator[None]:
        watch = ModuleWatch(self._model, modules.see)
        if self._is_watched:
            watch.start()
        try:
            yield
        finally:
            watch.stop()

    @contextmanager
    def _anomalies_noted(self, anomaly: list[str]) -> Iterator[None]:
        """With `detect_anomaly`, note the operation whose backward gives NaN, and where its forward was called."""
        if not self._detect_anomaly:
            yield
            return
        with warnings.catch_warnings(record=True) as caught, torch.autograd.detect_anomaly(check_nan=True):
            try:
                yield
            except RuntimeError as error:
                anomaly += [str(error), *(str(warning.message) for warning in caught)]
                raise

    def _write(self) -> None:
        file = record_file(self._run_dir.path, rank=self._context.rank)
        file.parent.mkdir(exist_ok=True)
        record = {
            "rank": self._context.rank,
            "device": str(self._context.device),
            "log_every_n_steps": self._trainer.settings.log_every_n_steps,
            "steps": self._steps,
        }
        write_object(file, record)

    def _micro_batches(
        self, step: int, taken: Sequence[MicroBatch], window: Window, outputs: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the samples of each micro-batch, and what each objective computed from them."""
        dataset = getattr(self._trainer.train_loader, "dataset", None)
        # Stand-ins give no output. With several objectives, each has one for every other micro-batch.
        filled = [number for number, micro in enumerate(window.indices) if micro.num_samples]
        micro_batches = []
        for number, micro in enumerate(window.indices):
            indices = micro.indices[: micro.num_samples].tolist()
            own = []
            if number in filled:
                own = list(outputs[filled.index(number) :: len(filled)])
            names = sample_names(dataset, indices)
            picture = None
            if indices and number < len(taken):
                picture = f"step_{step}_rank_{self._context.rank}_{number}.png"
                file = self._run_dir.path / PICTURES / picture
                if not save_picture(taken[number].batch, file, captions=names or list(map(str, indices))):
                    picture = None
            micro_batches.append({"indices": indices, "names": names, "picture": picture, "outputs": own})
        return micro_batches

    def _weights(self, before: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Return what is known of each parameter: the norm of its gradient, and its update against its size."""
        weights = []
        norms = self._norms or {}
        for name, parameter in self._model.named_parameters():
            weights.append(
                {
                    "name": name,
                    "norm": plain(_norm(before[name])),
                    "gradient_norm": plain(norms.get(name)),
                    "update_norm": plain(_norm(parameter.detach() - before[name])),
                }
            )
        return weights


def _noting(
    micro_batches: Iterator[MicroBatch], taken: list[MicroBatch], file: StepFile | None
) -> Iterator[MicroBatch]:
    """Yield micro-batches when they are asked for, as ever, and note them."""
    for micro in micro_batches:
        taken.append(micro)
        if file is not None:
            file.add(micro)
        yield micro


def _norm(tensor: Tensor) -> float:
    """Return the 2-norm, also of a tensor that is sharded. Every rank must call it."""
    return float(full_tensor(torch.linalg.vector_norm(tensor)))


def _output(output: StepOutput, objective: str) -> dict[str, Any]:
    metrics = {}
    for name, (total, count) in output.metrics.items():
        if float(count):
            metrics[name] = plain(float(total) / float(count))
    return {
        "objective": objective,
        "loss": plain(float(output.loss.detach())),
        "num_samples": output.num_samples,
        "metrics": metrics,
    }


def plain(value: float | None) -> float | str | None:
    """Return a number for JSON, which has no NaN and no infinity: these are texts."""
    if value is None or math.isfinite(value):
        return value
    return str(value)


@final
class _Modules:
    """What passes through modules, forward and backward, over all micro-batches of a step."""

    def __init__(self) -> None:
        # What the model is given.
        self.inputs = Values()
        self._types: dict[str, str] = {}
        self._activations: dict[str, Values] = {}
        self._gradients: dict[str, Values] = {}

    def see(self, passed: Passed) -> None:
        if passed.kind == "input" and passed.inside is None:
            for tensor in passed.tensors:
                self.inputs.add(tensor)
        if passed.kind != "output":
            return
        self._types[passed.module] = passed.type
        activations = self._activations.setdefault(passed.module, Values())
        gradients = self._gradients.setdefault(passed.module, Values())
        for tensor in passed.tensors:
            activations.add(tensor)
            # A hook on a parameter, which is recorded as such, would stay after the step.
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                # Unlike a module's backward hook, this changes nothing in the graph.
                tensor.register_hook(gradients.add)

    def plain(self) -> list[dict[str, Any]]:
        modules = []
        for name, kind in self._types.items():
            modules.append(
                {
                    "name": name,
                    "type": kind,
                    "activations": self._activations[name].plain(),
                    "gradients": self._gradients[name].plain(),
                }
            )
        return modules


@final
class Values:
    """The largest absolute value of tensors, and how many values are 0, infinite and NaN."""

    def __init__(self) -> None:
        # One row for each tensor, on its device, so that adding doesn't wait for it.
        self._rows: list[Tensor] = []
        self._count = 0

    def add(self, tensor: Tensor) -> None:
        values = full_tensor(tensor.detach())
        if not (values.is_floating_point() or values.is_complex()) or not values.numel():
            return
        sizes = values.abs()
        is_nan = sizes.isnan()
        counts = [(sizes == 0).sum(), sizes.isinf().sum(), is_nan.sum()]
        largest = sizes.masked_fill_(is_nan, 0).max()
        # MPS has no double precision.
        dtype = torch.float32 if values.device.type == "mps" else torch.float64
        self._rows.append(torch.stack([number.to(dtype) for number in (largest, *counts)]))
        self._count += values.numel()

    def plain(self) -> dict[str, Any] | None:
        """Return plain numbers; None if there was no tensor. Waits for the device."""
        if not self._rows:
            return None
        rows = torch.stack([row.cpu() for row in self._rows])
        zeros, infinite, nan = rows[:, 1:].sum(dim=0).tolist()
        return {
            "absmax": plain(float(rows[:, 0].max())),
            "count": self._count,
            "zeros": int(zeros),
            "inf": int(infinite),
            "nan": int(nan),
        }

"""Evaluation: every sample once on any number of ranks, and one reduction for each set of samples."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn

from framework.distributed.context import Context
from framework.distributed.sharded import has_output, is_model_sharded
from framework.media import Media, Table, Text
from framework.optim.precision import PrecisionPlugin
from framework.training.meter import Meter
from framework.training.stateful_metrics import StatefulMetrics
from framework.training.step_output import check_output, copied, media_of
from framework.types import MicroBatch, StepOutput, Task, hooks


@final
@dataclass
class Evaluation:
    """Results over all ranks, named `prefix/name`."""

    metrics: dict[str, float] = field(default_factory=dict)
    # Of all metrics, those without samples included; in order.
    names: list[str] = field(default_factory=list)
    # Tables.
    texts: dict[str, Table | Text] = field(default_factory=dict)
    # Rank 0's.
    media: dict[str, Media] = field(default_factory=dict)

    def add_metrics(self, metrics: Mapping[str, float], *, prefix: str) -> None:
        for name, value in metrics.items():
            self.metrics[f"{prefix}/{name}"] = value
        self.add_names(metrics, prefix=prefix)

    def add_names(self, names: Iterable[str], *, prefix: str) -> None:
        for name in names:
            whole_name = f"{prefix}/{name}"
            if whole_name not in self.names:
                self.names.append(whole_name)


@final
@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluates a model with a task. Every rank makes one and calls `evaluate`."""

    # The unwrapped module. Unless its forward has collectives, ranks may have different numbers of batches.
    model: nn.Module
    task: Task
    precision: PrecisionPlugin
    context: Context
    # Also return media: of this rank's first batch, and of the metrics. Ranks may differ.
    with_media: bool = False
    # Include this rank's results; False if another rank gets the same batches and counts them.
    counts: bool = True
    # The model is compiled in one of CUDA_GRAPH_MODES.
    captures_graphs: bool = False
    # Run in `torch.inference_mode` where that is possible. What the model caches then can't be trained with.
    inference_mode: bool = False

    def evaluate(self, loaders: Mapping[str, Iterable[MicroBatch]]) -> Evaluation:
        """Return metrics over all ranks' batches, on each set by its prefix."""
        evaluation = Evaluation()
        if not loaders:
            return evaluation
        with self._evaluation_mode():
            for start in hooks([self.task], "on_evaluations_start"):
                start(self.model, list(loaders))
        for prefix, batches in loaders.items():
            self._evaluate_set(batches, prefix=prefix, evaluation=evaluation)
        with self._evaluation_mode():
            for end in hooks([self.task], "on_evaluations_end"):
                end()
        # A validation_step may have called `backward`: that is no part of the next training step.
        for parameter in self.model.parameters():
            parameter.grad = None

        # What the task computes of several sets together: `val` of `val/NAME`.
        part = next(iter(loaders)).partition("/")[0]
        for logged in hooks([self.task], "logged_evaluations"):
            evaluation.add_metrics(logged(), prefix=part)
        return evaluation

    def _evaluate_set(self, batches: Iterable[MicroBatch], *, prefix: str, evaluation: Evaluation) -> None:
        """Add the results of one set to `evaluation`."""
        meter = Meter()
        stateful = StatefulMetrics(self.task, self.context)
        media: dict[str, Media] = {}
        counts = self.counts and has_output(self.model)
        with self._evaluation_mode():
            for start in hooks([self.task], "on_evaluation_start"):
                start(self.model, prefix)
            for position, micro in enumerate(batches):
                is_first = position == 0
                output = self._validation_step(micro, is_first=is_first)
                # The results of a stand-in are dropped.
                if not counts or micro.num_samples == 0:
                    continue
                if output.num_samples:
                    # Cloned: the next batch may overwrite what a compiled model returned.
                    meter.add(output._replace(loss=output.loss.clone()))
                if output.updates:
                    stateful.update(output.updates)
                if is_first and self.with_media and output.media is not None:
                    media |= media_of(output.media)
            for end in hooks([self.task], "on_evaluation_end"):
                end()

        means = meter.reduce(self.context).means
        evaluation.add_names(meter.names, prefix=prefix)
        evaluation.add_metrics(means, prefix=prefix)
        evaluation.add_metrics(stateful.compute(self.context), prefix=prefix)
        for logged in hooks([self.task], "logged"):
            evaluation.add_metrics(logged("evaluation"), prefix=prefix)
        for name, text in stateful.texts().items():
            evaluation.texts[f"{prefix}/{name}"] = text
        if self.with_media:
            media |= stateful.media()
        for name, value in media.items():
            evaluation.media[f"{prefix}/{name}"] = value

    def _validation_step(self, micro: MicroBatch, *, is_first: bool) -> StepOutput:
        stand_in = nullcontext() if micro.num_samples else isolated(self.task)
        with self.precision.autocast(), stand_in:
            output = self.task.validation_step(self.model, self.precision.convert_batch(micro.batch))
        if is_first or not isinstance(output, StepOutput):
            check_output(output, self.task, "validation_step")
        if self.captures_graphs:
            output = copied(output)
        return output

    def _evaluation_mode(self) -> AbstractContextManager[None]:
        """Return the mode of evaluations; by default under `torch.no_grad`, as training may follow."""
        # FSDP2 fails in inference mode: https://github.com/pytorch/pytorch/issues/95957
        # Once a CUDA graph was captured in inference mode, later captures may fail:
        # https://github.com/pytorch/pytorch/issues/135892
        is_refused = self.captures_graphs or is_model_sharded(self.model)
        return evaluation_mode(self.model, inference_mode=self.inference_mode and not is_refused)


@contextmanager
def evaluation_mode(model: nn.Module, *, inference_mode: bool = False) -> Iterator[None]:
    """Put every module in evaluation mode, without gradients; afterwards each is in its former mode.

    The backward refuses tensors made in inference mode, such as the rotary tables that a model caches in its first
    forward, and `torch.enable_grad` has no effect there. Inference mode saves up to 5 % of the time of a model as small
    as the toy's, and nothing of larger ones.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.inference_mode() if inference_mode else torch.no_grad():
            yield
    finally:
        # One by one: a frozen part stays in evaluation mode.
        for module in training:
            module.training = True


def eager() -> AbstractContextManager[Any]:
    """Return a context in which compiled models run eagerly, for batches that would need another compilation."""
    # If Dynamo isn't imported, nothing has been compiled, and importing it would take seconds.
    if "torch._dynamo.eval_frame" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def isolated(task: Task) -> Iterator[None]:
    """Restore the task's own state after a step whose results are dropped."""
    with ExitStack() as stack:
        for without_side_effects in hooks([task], "without_side_effects"):
            stack.enter_context(without_side_effects())
        yield

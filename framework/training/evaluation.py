"""Evaluation: every sample once on any number of ranks, and one reduction at the end. What a task may return."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from numbers import Integral, Real
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn

from framework.data.batch_tree import map_tensors
from framework.distributed.context import Context
from framework.distributed.sharded import has_output, is_model_sharded
from framework.errors import TargetError
from framework.media import Media, Table, Text
from framework.optim.precision import PrecisionPlugin
from framework.tasks.supervised import describe
from framework.training.meter import LOSS, Meter
from framework.training.stateful_metrics import StatefulMetrics
from framework.types import MicroBatch, StepOutput, Task, hooks


class Evaluation(NamedTuple):
    """Metrics over all ranks, named `prefix/name`.

    names: all names, including metrics without samples. texts: tables by name. media: rank 0's, by name.
    """

    metrics: dict[str, float]
    names: list[str]
    texts: dict[str, Table | Text]
    media: dict[str, Media]


def evaluate(
    model: nn.Module,
    loaders: Mapping[str, Iterable[MicroBatch]],
    *,
    task: Task,
    precision: PrecisionPlugin,
    context: Context,
    with_media: bool = False,
    counts: bool = True,
    captures_graphs: bool = False,
) -> Evaluation:
    """Return metrics over all ranks' batches, on each set by its prefix. Every rank must call it.

    model: the unwrapped module; unless its forward has collectives, ranks may have different numbers of batches.
    with_media: also return media, of this rank's first batch and of the metrics. Ranks may differ.
    counts: include this rank's results; False if another rank gets the same batches and counts them.
    captures_graphs: the model is compiled in one of CUDA_GRAPH_MODES.
    """
    whole = Evaluation({}, [], {}, {})
    if not loaders:
        return whole
    with _evaluating(model, captures_graphs=captures_graphs):
        for start in hooks([task], "on_evaluations_start"):
            start(model, list(loaders))
    for prefix, batches in loaders.items():
        found = _evaluate_set(
            model,
            batches,
            task=task,
            precision=precision,
            context=context,
            prefix=prefix,
            with_media=with_media,
            counts=counts,
            captures_graphs=captures_graphs,
        )
        whole = Evaluation(
            whole.metrics | found.metrics,
            whole.names + found.names,
            whole.texts | found.texts,
            whole.media | found.media,
        )
    with _evaluating(model, captures_graphs=captures_graphs):
        for end in hooks([task], "on_evaluations_end"):
            end()
    part = next(iter(loaders)).partition("/")[0]
    for logged in hooks([task], "logged_evaluations"):
        values = {f"{part}/{name}": value for name, value in logged().items()}
        names = list(dict.fromkeys([*whole.names, *values]))
        whole = whole._replace(metrics=whole.metrics | values, names=names)
    return whole


@contextmanager
def _evaluating(model: nn.Module, *, captures_graphs: bool) -> Iterator[None]:
    """Put every module in evaluation mode, without gradients; afterwards each is in its former mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    # A sharded model keeps what it gathers for the next step; memory made in inference mode can't be trained on. Once a
    # CUDA graph was captured in inference mode, later captures may fail: https://github.com/pytorch/pytorch/issues/135892
    with torch.no_grad() if captures_graphs or is_model_sharded(model) else torch.inference_mode():
        yield
    for module in training:
        module.training = True  # one by one: a frozen part stays in evaluation mode


def _evaluate_set(
    model: nn.Module,
    batches: Iterable[MicroBatch],
    *,
    task: Task,
    precision: PrecisionPlugin,
    context: Context,
    prefix: str,
    with_media: bool,
    counts: bool,
    captures_graphs: bool,
) -> Evaluation:
    """Return metrics over all ranks' batches of one set."""
    stateful = StatefulMetrics(task, context)
    media: dict[str, Media] = {}
    meter = _run_batches(
        model,
        batches,
        stateful,
        task=task,
        precision=precision,
        prefix=prefix,
        media=media if with_media else None,
        counts=counts and has_output(model),
        captures_graphs=captures_graphs,
    )
    values, _ = meter.reduce(context)
    values |= stateful.compute(context)
    for logged in hooks([task], "logged"):
        values |= logged("evaluation")
    names = dict.fromkeys([*meter.names, *values])
    texts = stateful.texts()
    if with_media:
        media |= stateful.media()
    return Evaluation(
        {f"{prefix}/{name}": value for name, value in values.items()},
        [f"{prefix}/{name}" for name in names],
        {f"{prefix}/{name}": text for name, text in texts.items()},
        {f"{prefix}/{name}": value for name, value in media.items()},
    )


def _run_batches(
    model: nn.Module,
    batches: Iterable[MicroBatch],
    stateful: StatefulMetrics,
    *,
    task: Task,
    precision: PrecisionPlugin,
    prefix: str,
    media: dict[str, Media] | None,
    counts: bool,
    captures_graphs: bool,
) -> Meter:
    """Return what the task computes for this rank's batches, in evaluation mode and without gradients.

    A batch of `num_samples` 0 is a stand-in, whose results are dropped. Afterwards every module is in its former mode.
    media: is filled with the task's media of the first batch; None: not wanted.
    """
    meter = Meter()
    with _evaluating(model, captures_graphs=captures_graphs):
        for start in hooks([task], "on_evaluation_start"):
            start(model, prefix)
        for position, micro in enumerate(batches):
            with precision.autocast(), nullcontext() if micro.num_samples else isolated(task):
                output = task.validation_step(model, precision.convert_batch(micro.batch))
            if position == 0:
                check_output(output, task, "validation_step")
            if captures_graphs:
                output = copied(output)
            if micro.num_samples and counts:
                if output.num_samples:
                    # Cloned: the next batch may overwrite what a compiled model returned.
                    meter.add(output._replace(loss=output.loss.clone()))
                if output.updates:
                    stateful.update(output.updates)
                if position == 0 and media is not None and output.media is not None:
                    media |= media_of(output.media)
        for end in hooks([task], "on_evaluation_end"):
            end()
    return meter


def eager() -> AbstractContextManager[Any]:
    """Return a context in which compiled models run eagerly, for batches that would need another compilation.

    If Dynamo isn't imported, nothing has been compiled, and importing it would take seconds.
    """
    has_compiled = "torch._dynamo.eval_frame" in sys.modules
    return torch.compiler.set_stance("force_eager") if has_compiled else nullcontext()


def copied(output: StepOutput) -> StepOutput:
    """Return the output with tensors of its own, which the next call of a model with CUDA graphs doesn't overwrite."""
    loss, metrics, weight, updates = map_tensors(
        (output.loss, output.metrics, output.weight, output.updates), torch.clone
    )
    return output._replace(loss=loss, metrics=metrics, weight=weight, updates=updates)


@contextmanager
def isolated(task: Task) -> Iterator[None]:
    """Restore the task's own state after a step whose results are dropped."""
    with ExitStack() as stack:
        for without_side_effects in hooks([task], "without_side_effects"):
            stack.enter_context(without_side_effects())
        yield


def check_output(output: Any, task: Task, method: str) -> None:
    """Raise TargetError unless `output`, returned by the task's method, is a valid StepOutput; reads no values."""

    def refuse(what: str) -> NoReturn:
        raise TargetError(f"{type(task).__name__}.{method} returned {what}")

    if not isinstance(output, StepOutput):
        refuse(f"{describe(output)}. Return framework.StepOutput(loss, num_samples, metrics={{}}).")
    loss, num_samples, metrics, weight, updates, media = cast("tuple[Any, Any, Any, Any, Any, Any]", output)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        refuse(f"a loss that is {describe(loss)}. Return a tensor of one number, the batch's mean.")
    if method == "training_step" and not loss.requires_grad:
        refuse(
            "a loss that doesn't depend on a trained parameter. Leave out detach(), item(), torch.no_grad(), argmax() "
            "and comparisons: they cut the gradient."
        )
    if not isinstance(num_samples, Integral) or num_samples < 0:
        shown = num_samples if isinstance(num_samples, Integral) else describe(num_samples)
        refuse(f"a num_samples that is {shown}. Return the batch's size, an int.")
    if weight is not None and not is_number(weight):
        refuse(f"a weight that is {describe(weight)}. Return one number: what the loss is the mean over.")
    if not isinstance(metrics, Mapping):
        refuse(f"metrics that are {describe(metrics)}. Return a dict.")
    if not isinstance(updates, Mapping) or not all(isinstance(each, tuple) for each in updates.values()):
        refuse(f"updates that are {describe(updates)}. Return a dict from names of metrics to tuples of arguments.")
    if media is not None and not callable(media):
        refuse(f"media that is {describe(media)}. Return a function without arguments that returns a dict.")
    for name, pair in metrics.items():
        if not isinstance(name, str) or name == LOSS:
            refuse(f"a metric called {name!r}. Use a str other than {LOSS!r}.")
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(map(is_number, pair)):
            refuse(
                f"the metric {name!r} as {describe(pair)}. Return a pair (sum over samples, count) of numbers or "
                "one-element tensors; for a mean m of n samples, (m * n, n)."
            )


def media_of(make: Callable[[], Mapping[str, Media]]) -> Mapping[str, Media]:
    """Return what a StepOutput's `media` makes. Raises TargetError if that isn't a dict."""
    made: object = make()
    if not isinstance(made, Mapping):
        raise TargetError(f"media of StepOutput returned {made!r}. Return a dict, name → framework.Image, Table, …")
    return made


def is_number(value: object) -> bool:
    """Return True for a real number or a tensor of one."""
    return value.numel() == 1 and not value.is_complex() if isinstance(value, Tensor) else isinstance(value, Real)

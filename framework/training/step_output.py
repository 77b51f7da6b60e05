"""What a task's step may return, checked the first time that it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from framework.data.batch_tree import map_tensors
from framework.errors import TargetError
from framework.media import Media
from framework.tasks.supervised import describe
from framework.training.meter import LOSS
from framework.types import StepOutput, Task, is_logged_by_training


def check_output(output: Any, task: Task, method: str) -> None:
    """Raise TargetError unless `output`, returned by the task's method, is a valid StepOutput; reads no values."""
    problem = _problem_of(output, is_trained=method == "training_step")
    if problem is not None:
        raise TargetError(f"{type(task).__name__}.{method} returned {problem}")


def _problem_of(output: Any, *, is_trained: bool) -> str | None:
    """Return what is wrong with an output and what to return instead; None if nothing is."""
    if not isinstance(output, StepOutput):
        advice = "Return framework.StepOutput(loss, num_samples, metrics={})."
        if output is None and is_trained:
            advice += (
                " To leave a batch out, return 0 * loss and num_samples=0: every process takes part in every step."
            )
        return f"{describe(output)}. {advice}"
    # Any: a user's code may have put anything there.
    loss: Any = output.loss
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return f"a loss that is {describe(loss)}. Return a tensor of one number, the batch's mean."
    if is_trained and not loss.requires_grad:
        return (
            "a loss that doesn't depend on a trained parameter. Leave out detach(), item(), torch.no_grad(), argmax() "
            "and comparisons: they cut the gradient."
        )
    num_samples: Any = output.num_samples
    if not isinstance(num_samples, Integral):
        return f"a num_samples that is {describe(num_samples)}. Return the batch's size, an int."
    if num_samples < 0:
        return f"a num_samples that is {num_samples}. Return the batch's size, an int."
    if output.weight is not None and not is_number(output.weight):
        return f"a weight that is {describe(output.weight)}. Return one number: what the loss is the mean over."
    media: Any = output.media
    if media is not None and not callable(media):
        return f"media that is {describe(media)}. Return a function without arguments that returns a dict."
    return _problem_of_updates(output.updates) or _problem_of_metrics(output.metrics, is_trained=is_trained)


def _problem_of_updates(updates: Any) -> str | None:
    if isinstance(updates, Mapping) and all(isinstance(arguments, tuple) for arguments in updates.values()):
        return None
    return f"updates that are {describe(updates)}. Return a dict from names of metrics to tuples of arguments."


def _problem_of_metrics(metrics: Any, *, is_trained: bool) -> str | None:
    if not isinstance(metrics, Mapping):
        return f"metrics that are {describe(metrics)}. Return a dict."
    for name, pair in metrics.items():
        if not isinstance(name, str) or name == LOSS:
            return f"a metric called {name!r}. Use a str other than {LOSS!r}."
        if is_trained and is_logged_by_training(name):
            return f"a metric called {name!r}, and the framework logs train/{name} itself. Use another name."
        if not is_pair(pair):
            return (
                f"the metric {name!r} as {describe(pair)}. Return a pair (sum over samples, count) of numbers or "
                "one-element tensors; for a mean m of n samples, (m * n, n)."
            )
    return None


def copied(output: StepOutput) -> StepOutput:
    """Return the output with tensors of its own, which the next call of a model with CUDA graphs doesn't overwrite."""
    tensors = (output.loss, output.metrics, output.weight, output.updates)
    loss, metrics, weight, updates = map_tensors(tensors, torch.clone)
    return output._replace(loss=loss, metrics=metrics, weight=weight, updates=updates)


def media_of(make: Callable[[], Mapping[str, Media]]) -> Mapping[str, Media]:
    """Return what a StepOutput's `media` makes. Raises TargetError if that isn't a dict."""
    made: object = make()
    if not isinstance(made, Mapping):
        raise TargetError(f"media of StepOutput returned {made!r}. Return a dict, name → framework.Image, Table, …")
    return made


def is_number(value: object) -> bool:
    """Return True for a real number or a tensor of one."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real)


def is_pair(value: object) -> bool:
    """Return True for a sum and a count, as metrics have them."""
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(is_number(number) for number in value)

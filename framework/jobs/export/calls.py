"""Calls of a model, by which its graph is traced and compared with it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import IterableDataset

from framework.data.batch_dataset import BatchDataset, BatchKey
from framework.data.loader import dataset_size
from framework.data.stream_reader import first_batch
from framework.engine.builders.data import build_data
from framework.errors import ConfigError
from framework.jobs.export.source import Source
from framework.types import Batch

# The arguments of a model's call, in the order of its signature.
Call = tuple[tuple[Any, ...], dict[str, Any]]


def first_call(source: Source, *, num_samples: int) -> Call:
    """Return how `validation_step` first calls the model with samples of the test, validation or train part.

    Raises ConfigError if it doesn't call the model.
    """
    task = source.task
    if not callable(getattr(task, "validation_step", None)):
        raise ConfigError(
            f"{type(task).__name__} has no method validation_step, whose call of the model is traced. Give it "
            "validation_step(model, batch), or use export.format=state_dict or safetensors."
        )
    batch = source.precision.convert_batch(_first_batch(source, num_samples=num_samples))
    calls: list[Call] = []

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A copy, since the model may write to them.
        calls.append(_copied((args, kwargs)))

    with source.model.register_forward_pre_hook(record, with_kwargs=True), torch.no_grad():
        task.validation_step(source.model, batch)
    if not calls:
        raise ConfigError(
            f"{type(task).__name__}.validation_step doesn't call model(...), so the model can't be traced.\n"
            "Use export.format=state_dict or safetensors."
        )
    args, kwargs = calls[0]
    bound = inspect.signature(source.model.forward).bind(*args, **kwargs)
    return bound.args, bound.kwargs


def _first_batch(source: Source, *, num_samples: int) -> Batch:
    """Return the first samples of the last part; those of a small dataset are repeated."""
    datasets = build_data(source.config, source.context)
    part, dataset = list(datasets.parts.items())[-1]
    collate_fn = datasets.collate_fn_of(part)
    if isinstance(dataset, IterableDataset):
        return first_batch(dataset, number=num_samples, split=part, collate_fn=collate_fn)
    size = dataset_size(dataset, split=part)
    indices = [number % size for number in range(num_samples)]
    batches = BatchDataset(dataset, split=part, seed=0, collate_fn=collate_fn)
    return batches[BatchKey(indices, positions=range(len(indices)), epoch=0, dataset_epoch=0)]


def outputs(function: Callable[..., Any], call: Call) -> list[Tensor]:
    """Return the tensors that `function` returns for copies of the arguments, in order."""
    args, kwargs = _copied(call)
    with torch.no_grad():
        return tensors_of(function(*args, **kwargs))


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in nested containers, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _copied(call: Call) -> Call:
    copy: Call = tree_map_only(Tensor, torch.clone, call)
    return copy

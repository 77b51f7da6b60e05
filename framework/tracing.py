"""What the user's task gives the model, and the model as a graph of that: `torch.export.export` on the CPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import IterableDataset

from framework import build
from framework.causes import place, said
from framework.config.schema import Config
from framework.data.fetch import Request, fetch_for
from framework.data.loader import dataset_size
from framework.data.stream import first_batch
from framework.errors import ConfigError, TargetError
from framework.precision import PrecisionPlugin
from framework.types import Datasets, Task

BATCH = "batch"
"""The name of a dimension of any size."""

_SMALL_BATCH = 8
_LINES = 2  # of what torch says; the rest is advice on debugging torch
_FIXED = "With export.dynamic_batch=false the file takes batches of data.eval_batch_size samples only."
_PARTS = ("test", "val", "train")


@dataclass(frozen=True)
class Call:
    """How a model is called with a batch of `num_samples`: in the order of its signature."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    num_samples: int

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Tensor)]

    def of(self, function: Callable[..., Any]) -> list[Tensor]:
        """The tensors in what `function` gives when it is called so, in order; it may write to what it gets."""
        args, kwargs = _copied(self.args, self.kwargs)
        with torch.no_grad():
            return [leaf for leaf in tree_leaves(function(*args, **kwargs)) if isinstance(leaf, Tensor)]


def _copied(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    copy: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(Tensor, torch.clone, (args, dict(kwargs)))
    return copy


class Examples(NamedTuple):
    """The first to trace, every one to compare; and what has to be said about them."""

    calls: tuple[Call, ...]
    notes: tuple[str, ...]


def examples(config: Config, model: nn.Module) -> Examples:
    """What `validation_step` gives the model, for samples of the test part, else the validation, else the train part.

    One batch of `data.eval_batch_size` samples; with `export.dynamic_batch` two small ones, of different sizes. Raises
    ConfigError where the step doesn't call the model, and what data, task and model raise. `model` is in eval mode.
    """
    datasets, task = build.build_datasets(config.data.datasets), build.build_task(config.task)
    size = config.data.eval_batch_size or config.data.batch_size
    sizes = [size]
    if config.export.dynamic_batch:
        small = max(2, min(size, _SMALL_BATCH))  # 1 stands for "broadcast" in torch, so it says nothing of other sizes
        sizes = [small, small + 1]
    found = [_first_call(config, model, task=task, datasets=datasets, num_samples=each) for each in sizes]
    times = found[0][1]
    notes = (f"validation_step calls the model {times} times; the first call is the example",) if times > 1 else ()
    return Examples(tuple(call for call, _ in found), notes)


def _first_call(
    config: Config, model: nn.Module, *, task: Task, datasets: Datasets, num_samples: int
) -> tuple[Call, int]:
    """How the model is called first with `num_samples` samples, and how often it is."""
    part = next(name for name in _PARTS if getattr(datasets, name) is not None)
    dataset = getattr(datasets, part)
    if isinstance(dataset, IterableDataset):
        loaded = first_batch(dataset, number=num_samples, part=part)
    else:
        indices = torch.arange(num_samples) % dataset_size(dataset, part=part)
        loaded = fetch_for(dataset, part=part, seed=0)(Request(indices, epoch=0))
    precision = PrecisionPlugin(config.trainer.precision, device=torch.device("cpu"))
    precision.convert_task(task)
    batch = precision.convert_batch(loaded)
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(_copied(args, kwargs))  # before the model writes to them

    with model.register_forward_pre_hook(note, with_kwargs=True), torch.no_grad():
        try:
            task.validation_step(model, batch)
        except Exception as error:  # whatever the user's code does with a batch of this size
            if not config.export.dynamic_batch:
                raise
            raise TargetError(
                f"{type(task).__name__}.validation_step failed with a batch of {num_samples} samples.\n"
                f"{said(error)}\n{place(error)}\n{_FIXED}"
            ) from error
    if not seen:
        raise ConfigError(
            f"{type(task).__name__}.validation_step doesn't call the model itself, model(...), so there is no example "
            "of what it is given.\nUse export.format=state_dict or safetensors, which need none."
        )
    bound = inspect.signature(model.forward).bind(*seen[0][0], **seen[0][1])
    return Call(bound.args, bound.kwargs, num_samples), len(seen)


def traced(model: nn.Module, calls: Sequence[Call]) -> ExportedProgram:
    """The model's graph for the first call; with a second one, of another size, for batches of any size.

    Any size have the tensors whose first dimension is the batch in both. Raises TargetError where torch can't export
    the model, ConfigError where it can for that one size only.
    """
    if len(calls) == 1:
        return _static(model, calls[0])
    shapes = _shapes(calls[0], calls[1])
    try:
        return _exported(model, calls[0], shapes)
    except Exception as error:  # torch's own, of many classes, or of the model's code under tracing
        refusal = error
    _static(model, calls[0])
    raise ConfigError(
        f"{type(model).__name__} can't be exported for batches of any size: {said(refusal, lines=_LINES)}\n"
        f"{_FIXED}\nOr change the model: len(x) is a fixed number in what is exported, x.shape[0] isn't."
    ) from refusal


def _static(model: nn.Module, call: Call) -> ExportedProgram:
    try:
        return _exported(model, call, None)
    except Exception as error:  # as above
        raise TargetError(
            f"torch.export can't export {type(model).__name__}: {said(error, lines=_LINES)}\n{place(error)}\n"
            "Change the model there, or use export.format=state_dict or safetensors."
        ) from error


def _exported(model: nn.Module, call: Call, shapes: ShapesCollection | None) -> ExportedProgram:
    with torch.no_grad():
        return torch.export.export(model, call.args, dict(call.kwargs), dynamic_shapes=shapes)


def _shapes(first: Call, second: Call) -> ShapesCollection:
    """Which tensors of the first call have the batch as their first dimension. Raises ConfigError where none has."""
    shapes, batch, count = ShapesCollection(), Dim(BATCH), 0
    for one, other in zip(first.tensors(), second.tensors(), strict=False):
        if one.ndim and other.ndim and (len(one), len(other)) == (first.num_samples, second.num_samples):
            shapes[one] = {0: batch}
            count += 1
    if not count:
        raise ConfigError(
            "No tensor that the model is given has the batch as its first dimension, so batches of any size can't be "
            f"exported.\n{_FIXED}"
        )
    return shapes


def inputs(program: ExportedProgram) -> dict[str, str]:
    """The graph's tensor inputs in order: name → type and shape, as a person reads it."""
    given = set(program.graph_signature.user_inputs)
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    return {
        name: f"{str(value.dtype).removeprefix('torch.')} [{', '.join(map(_dimension, value.shape))}]"
        for name, value in values.items()
        if name in given and isinstance(value, Tensor)
    }


def symbol(program: ExportedProgram) -> str | None:
    """torch's own name of the dimension of any size; None where all sizes are fixed."""
    sizes = (size for node in program.graph.nodes if node.op == "placeholder" for size in _shape(node.meta.get("val")))
    return next((str(size) for size in sizes if not isinstance(size, int)), None)


def _shape(value: Any) -> Sequence[Any]:
    return value.shape if isinstance(value, Tensor) else ()


def _dimension(size: Any) -> str:
    return str(size) if isinstance(size, int) else BATCH

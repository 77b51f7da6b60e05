"""A checkpoint's model as one plain file. For `job=export`, on the CPU, in one process.

Every file is read back: weights must be there bit for bit, a graph must compute what the model does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from framework import build
from framework.agreement import Agreement, agreement, worst
from framework.causes import said
from framework.checkpoint import find, load, load_weights, read_manifest
from framework.config.parse import parse
from framework.config.schema import Config, ExportFormat, Precision
from framework.distributed.context import Context
from framework.errors import CheckpointError, ConfigError, RunError
from framework.footprint import tensor_bytes
from framework.onnx_file import onnx_model, runtime
from framework.precision import PrecisionPlugin
from framework.targets import takes
from framework.topology import Topology
from framework.tracing import Call, examples, inputs, traced
from framework.versions import installed_versions

Lines = list[tuple[str, str]]
"""What is to be said of a file: a word and what it is about."""

_CPU = torch.device("cpu")
_ONNX_LIMIT_BYTES = 2000 << 20  # protobuf's is 2 GiB, for weights and graph
_READ_BACK = ("read back", "every tensor is the same, bit for bit")
_MIXED = (Precision.BF16_MIXED, Precision.FP16_MIXED)


@dataclass(frozen=True)
class Source:
    """What is exported: the model in eval mode, with its weights. `metadata` goes into files that take any."""

    config: Config
    model: nn.Module
    step: int
    metadata: Mapping[str, str]

    @property
    def name(self) -> str:
        return type(self.model).__name__


def answer(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`export` with the plain arguments `config` (as in config.yaml), `span` and `path`."""
    return export(parse(arguments["config"]), span=arguments["span"], path=Path(arguments["path"]))


def export(config: Config, *, span: int, path: Path) -> dict[str, Any]:
    """Write the model with the weights of `checkpoint.path` to `path` in `export.format`, and read it back.

    span: how many devices the model is made for; each is the CPU. Gives `step`, `model` (its name) and `lines`. Raises
    FrameworkError where the checkpoint doesn't fit, the model can't be exported so, or the file isn't as it should be;
    what is left at `path` then is the caller's to remove.
    """
    if config.trainer.num_threads is not None:
        torch.set_num_threads(config.trainer.num_threads)
    build.check_targets(config)
    source = _source(config, span=span)
    lines = _FORMATS[config.export.format](source, path)
    if config.trainer.precision in _MIXED:
        kept = "weights and computation are float32, as autocast is no part of a file"
        lines.append(("precision", f"{config.trainer.precision.value}: {kept}"))
    return {"step": source.step, "model": source.name, "lines": lines}


def _source(config: Config, *, span: int) -> Source:
    directory = find(Path(str(config.checkpoint.path)))
    step = read_manifest(directory).step
    topology = Topology(nnodes=1, procs_per_node=1, gpus_per_node=0, span=span)
    context = Context(topology, 0, 0, 0, devices=(_CPU,) * span, backend="gloo")
    model = PrecisionPlugin(config.trainer.precision, device=_CPU).convert_model(
        build.build_model(config.model, context=context)
    )
    weights = load(directory, map_location=_CPU, parts=["model"])["model"]
    try:
        load_weights(model, weights, source=directory)
    except CheckpointError as error:
        if not takes(config.model, "devices"):
            raise
        raise CheckpointError(
            f"{error}\nIt was made for {span} device(s) here: topology.gpus_per_process=NUMBER says for how many."
        ) from error
    metadata = {
        "recipe": config.recipe,
        "step": str(step),
        "framework_version": installed_versions(["framework"])["framework"],
        "torch_version": str(torch.__version__),
    }
    return Source(config, model.eval(), step, metadata)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Around writing alone: libraries turn the disk's errors into those of their own, of any class."""
    try:
        yield
    except Exception as error:
        raise RunError(f"{path.name} can't be written to {path.parent.parent}: {said(error)}") from error


# Weights


def _state_dict(source: Source, path: Path) -> Lines:
    state = source.model.state_dict()
    with _writing(path):
        torch.save(state, path)
    _check_same(state, torch.load(path, weights_only=True))
    return [("tensors", _counted(state)), _READ_BACK]


def _safetensors(source: Source, path: Path) -> Lines:
    from safetensors.torch import load_file, save_file

    state = source.model.state_dict()
    others = [name for name, value in state.items() if not _is_dense(value)]
    if others:
        raise ConfigError(
            f"safetensors holds dense tensors of the usual types only, and {', '.join(others)} of {source.name} isn't "
            "one.\nUse export.format=state_dict."
        )
    tied = _tied(state)
    metadata = {**source.metadata, "format": "pt", **({"tied": json.dumps(tied)} if tied else {})}
    with _writing(path):
        path.touch()
        mode = path.stat().st_mode  # as every new file gets it; safetensors makes one for its owner alone
        save_file(_apart(state), path, metadata)
        path.chmod(mode)
    _check_same(state, load_file(path))
    again = [
        ("tied", f"{name} shares its values with {first}; written again, {tensor_bytes([state[name]]):,} bytes")
        for name, first in tied.items()
    ]
    return [("tensors", _counted(state)), *again, _READ_BACK]


def _is_dense(value: Any) -> bool:
    """Whether it is a tensor as safetensors knows them: of complex ones it has the type of single precision alone."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized or value.is_conj():
        return False
    return not value.is_complex() or value.dtype is torch.complex64


def _apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every name with memory of its own, which safetensors wants; those that shared none are not copied."""
    seen: set[int] = set()
    apart = {}
    for name, value in state.items():
        memory = value.untyped_storage().data_ptr()
        apart[name] = value.contiguous() if memory not in seen else value.clone(memory_format=torch.contiguous_format)
        seen.add(memory)
    return apart


def _tied(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Name → the first name of the same values in memory, for the names after it."""
    first: dict[Any, str] = {}
    tied = {}
    for name, value in state.items():
        key = (value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() and first.setdefault(key, name) != name:
            tied[name] = first[key]
    return tied


def _check_same(state: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise RunError where the file's names differ, or a tensor's type, shape or bits."""
    different = state.keys() ^ found.keys()
    different |= {name for name in state.keys() & found.keys() if not _is_same(state[name], found[name])}
    if different:
        raise RunError(f"The file isn't what was written to it: {', '.join(sorted(different))}. Is the disk damaged?")


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):  # a module's extra state: plain values, as the checkpoint has them
        return type(one) is type(other)
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    """As bytes, so that NaN equals NaN and -0 isn't 0."""
    dense = tensor.resolve_conj() if tensor.layout == torch.strided else tensor.to_dense()
    dense = dense.int_repr() if dense.is_quantized else dense
    return dense.contiguous().reshape(-1).view(torch.uint8)


def _counted(state: Mapping[str, Any]) -> str:
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    kinds = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
    return f"{len(tensors)}, of {sum(tensor.numel() for tensor in tensors):,} numbers ({', '.join(kinds)})"


# Graphs


def _torch_export(source: Source, path: Path) -> Lines:
    found = examples(source.config, source.model)
    program = traced(source.model, found.calls)
    with _writing(path):
        torch.export.save(program, path, extra_files=dict(source.metadata))
    again = torch.export.load(path).module()
    lines = [*_inputs(program), *_notes(found.notes)]
    return [*lines, _comparison(source, found.calls, lambda call: call.of(again), by="torch.export")]


def _onnx(source: Source, path: Path) -> Lines:
    size = tensor_bytes(source.model.parameters()) + tensor_bytes(source.model.buffers())
    if size > _ONNX_LIMIT_BYTES:
        raise ConfigError(
            f"The weights of {source.name} are {size:,} bytes, and one ONNX file holds less than 2 GiB.\n"
            "Use export.format=torch_export or safetensors."
        )
    found = examples(source.config, source.model)
    program = traced(source.model, found.calls)
    model = onnx_model(program, name=source.name, metadata=source.metadata)
    with _writing(path):
        path.write_bytes(model.SerializeToString())
    runs = runtime(path, found.calls)
    lines = [*_inputs(program), ("opset", str(model.opset_import[0].version)), *_notes([*found.notes, *runs.notes])]
    return [*lines, _comparison(source, found.calls, runs.run, by=runs.name)]


def _inputs(program: ExportedProgram) -> Lines:
    return [("input", f"{name}: {value}") for name, value in inputs(program).items()]


def _notes(notes: Sequence[str]) -> Lines:
    return [("note", note) for note in notes]


def _comparison(
    source: Source, calls: Sequence[Call], again: Callable[[Call], list[Tensor]], *, by: str
) -> tuple[str, str]:
    """What the file computes against what the model does, for every call. Raises RunError where that isn't the same."""
    sizes = [call.num_samples for call in calls]
    found: list[Agreement] = []
    for call in calls:
        try:
            found.append(agreement(call.of(source.model), again(call)))
        except RunError as error:
            reason = str(error)
        except Exception as error:  # of what runs the file
            reason = said(error)
        else:
            continue
        raise RunError(
            f"The {source.config.export.format.value} file of {source.name}, run by {by} with a batch of "
            f"{call.num_samples} samples, is not the same as the model; it was removed.\n{reason}\n"
            "A model that draws random numbers in eval mode can't be the same."
        )
    batches = f"{'batches' if len(sizes) > 1 else 'a batch'} of {' and '.join(map(str, sizes))}"
    return "compared", f"with the model, by {by}, for {batches}: {worst(found)}"


_FORMATS: Mapping[ExportFormat, Callable[[Source, Path], Lines]] = {
    ExportFormat.STATE_DICT: _state_dict,
    ExportFormat.SAFETENSORS: _safetensors,
    ExportFormat.ONNX: _onnx,
    ExportFormat.TORCH_EXPORT: _torch_export,
}

"""Write a checkpoint's model as one plain file, or a folder of transformers, on the CPU, in one process.

A file with a graph is read back and must compute what the model does.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import AdditionalInputs, ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import IterableDataset

from framework.checkpoint import find, read_manifest
from framework.config.parse import parse
from framework.config.schema import Config
from framework.config.targets import check_targets
from framework.config.topology import Topology
from framework.data.batch_dataset import BatchDataset, BatchKey
from framework.data.loader import dataset_size
from framework.data.stream_reader import first_batch
from framework.distributed.context import Context
from framework.engine import build
from framework.engine.assemble import assemble
from framework.errors import ConfigError, FrameworkError, RunError, TargetError, describe_error, raised_at
from framework.optim.precision import PrecisionPlugin
from framework.system.versions import installed_versions
from framework.types import Task

Facts = list[tuple[str, str]]
"""What is printed about a file: names and texts."""

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""The largest difference allowed between a graph's output and the model's, as a share of the output's largest value.
Outputs of other types must be equal."""

_CPU = torch.device("cpu")
_BATCH = "batch"  # the name of the dynamic dimension
_SMALL_BATCHES = [8, 9]
_LINES = 2  # of torch's message; the rest is advice on debugging torch
_OPSET_WITH_BFLOAT16 = 22  # of convolutions, for instance; torch's default is older


@dataclass(frozen=True)
class Source:
    """What is exported."""

    config: Config
    context: Context
    model: nn.Module  # in eval mode, with the checkpoint's weights
    task: Task
    precision: PrecisionPlugin
    step: int
    metadata: Mapping[str, str]  # written into files that can hold it

    @property
    def name(self) -> str:
        return type(self.model).__name__


def export(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Write the model with the weights of `checkpoint.path` in `export.format`.

    Args:
        arguments: `config` (as in config.yaml), `span` (how many devices the model is built for; each is the CPU) and
            `path` (of the file). If this raises, the caller removes what is left at `path`.

    Returns:
        `step`, `model` (its class) and `facts` to print.

    Raises:
        FrameworkError: the checkpoint doesn't fit, the model can't be exported, or the file differs from the model.
    """
    config = parse(arguments["config"])
    path = Path(arguments["path"])
    source = load_source(config, span=arguments["span"])
    write = _graph if config.export.format in ("onnx", "torch_export") else _weights
    return {"step": source.step, "model": source.name, "facts": write(source, path)}


def load_source(config: Config, *, span: int) -> Source:
    """Return the model of `checkpoint.path` on the CPU. Raises FrameworkError if it can't be built or loaded."""
    check_targets(config)
    directory = find(Path(str(config.checkpoint.path)))
    step = read_manifest(directory).step
    topology = Topology(nnodes=1, procs_per_node=1, gpus_per_node=0, span=span)
    context = Context(topology, 0, 0, 0, devices=(_CPU,) * span, backend="gloo")
    # A file has weights as their shapes say, whatever layout was the fastest to train in.
    config = replace(config, trainer=replace(config.trainer, channels_last=False))
    assembled = assemble(config, context, weights=directory)
    model = assembled.model
    model.eval()
    metadata = {
        "recipe": config.recipe,
        "step": str(step),
        "framework_version": installed_versions(["framework"])["framework"],
        "torch_version": str(torch.__version__),
    }
    return Source(config, context, model, assembled.task, assembled.precision, step=step, metadata=metadata)


# Weights


def _weights(source: Source, path: Path) -> Facts:
    state = source.model.state_dict()
    if source.config.export.format == "safetensors":
        _save_safetensors(state, source, path)
    elif source.config.export.format == "pretrained":
        _save_pretrained(source, path)
    else:
        torch.save(state, path)
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    kinds = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
    numbers = sum(tensor.numel() for tensor in tensors)
    return [("tensors", f"{len(tensors)}, of {numbers:,} numbers ({', '.join(kinds)})")]


def _save_safetensors(state: Mapping[str, Any], source: Source, path: Path) -> None:
    from safetensors.torch import save

    others = [name for name, value in state.items() if not isinstance(value, Tensor) or value.layout != torch.strided]
    if others:
        raise ConfigError(
            f"safetensors holds dense tensors only, and {', '.join(others)} of {source.name} isn't one.\n"
            "Use export.format=state_dict."
        )
    # Every name needs memory of its own.
    unshared = {name: value.clone(memory_format=torch.contiguous_format) for name, value in state.items()}
    path.write_bytes(save(unshared, {**source.metadata, "format": "pt"}))  # `save_file` gives it to its owner only


def _save_pretrained(source: Source, folder: Path) -> None:
    if not callable(getattr(source.model, "save_pretrained", None)):
        raise ConfigError(
            f"export.format=pretrained is for models with a method save_pretrained, as those of transformers; "
            f"{source.name} has none.\nUse export.format=state_dict or safetensors."
        )
    source.model.save_pretrained(folder)  # type: ignore[operator]
    for file in folder.glob("*.safetensors"):  # they are their owner's only
        file.chmod(folder.stat().st_mode & 0o666)


# Graphs


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a model's call, in the order of its signature."""


def _outputs(function: Callable[..., Any], call: Call) -> list[Tensor]:
    """Return the tensors that `function` returns for copies of the arguments, in order."""
    args, kwargs = _copied(call)
    with torch.no_grad():
        return _tensors(function(*args, **kwargs))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _copied(call: Call) -> Call:
    copy: Call = tree_map_only(Tensor, torch.clone, call)
    return copy


def _graph(source: Source, path: Path) -> Facts:
    """Write the model's graph, and compare what the file computes with the model.

    It is traced with the model's call in `validation_step`, with `data.eval_batch_size` samples. With
    `export.dynamic_batch` there are two small batches instead: dimensions that differ between them are dynamic.
    """
    config = source.config
    one_size = config.data.evaluated_batch_size
    sizes = _SMALL_BATCHES if config.export.dynamic_batch else [one_size]
    write = _torch_export if config.export.format == "torch_export" else _onnx
    try:
        calls = [_first_call(source, num_samples=size) for size in sizes]
        program = _traced(source.model, calls)
        inputs, names = _inputs(program, num_samples=sizes[0])
        by, run = write(source, program, path, names)
    except FrameworkError:
        raise
    except Exception as error:  # torch's own, of many classes, or of the user's code
        raise TargetError(
            f"{source.name} can't be exported with batches of {' and '.join(map(str, sizes))} samples: "
            f"{describe_error(error.__cause__ or error, lines=_LINES)}\n{raised_at(error)}\n"
            "Change the model there: for batches of any size, use x.shape[0]; len(x) is a fixed number in a graph.\n"
            "Or use export.dynamic_batch=false, for batches of data.eval_batch_size samples only; or "
            "export.format=state_dict or safetensors."
        ) from error
    for call, size in zip(calls, sizes, strict=True):
        try:
            check_close(_outputs(source.model, call), run(call))
        except Exception as error:  # also whatever runs the file may raise
            raise RunError(
                f"The {config.export.format} file of {source.name}, run by {by} with a batch of "
                f"{size} samples, is not the same as the model; it was removed.\n"
                f"{describe_error(error, lines=4)}\nA model that draws random numbers in eval mode can't be the same."
            ) from error
    compared = f"with the model, by {by}, for batches of {' and '.join(map(str, sizes))}"
    return [*inputs, ("compared", compared)]


def _first_call(source: Source, *, num_samples: int) -> Call:
    """Return how `validation_step` first calls the model with samples of the test, validation or train part.

    Raises ConfigError if it doesn't call the model.
    """
    config = source.config
    datasets = build.build_data(config, source.context)
    task = source.task
    part, dataset = list(datasets.parts.items())[-1]
    collate_fn = datasets.collate_fn_of(part)
    if isinstance(dataset, IterableDataset):
        batch = first_batch(dataset, number=num_samples, split=part, collate_fn=collate_fn)
    else:
        size = dataset_size(dataset, split=part)
        indices = [number % size for number in range(num_samples)]
        batches = BatchDataset(dataset, split=part, seed=0, collate_fn=collate_fn)
        batch = batches[BatchKey(indices, position=0, epoch=0, dataset_epoch=0)]
    seen: list[Call] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(_copied((args, kwargs)))  # before the model writes to them

    with source.model.register_forward_pre_hook(note, with_kwargs=True), torch.no_grad():
        task.validation_step(source.model, source.precision.convert_batch(batch))
    if not seen:
        raise ConfigError(
            f"{type(task).__name__}.validation_step doesn't call model(...), so the model can't be traced.\n"
            "Use export.format=state_dict or safetensors."
        )
    args, kwargs = seen[0]
    bound = inspect.signature(source.model.forward).bind(*args, **kwargs)
    return bound.args, bound.kwargs


def _traced(model: nn.Module, calls: list[Call]) -> ExportedProgram:
    """Return the model's graph for the first call; what has another size in the other calls is dynamic."""
    first, *others = calls
    sizes = AdditionalInputs()
    for call in others:
        sizes.add(*call)
    with torch.no_grad():
        return torch.export.export(model, *first, dynamic_shapes=sizes if others else None)


def _inputs(program: ExportedProgram, *, num_samples: int) -> tuple[Facts, dict[str, str]]:
    """Return a fact for each tensor input in order, `NAME: float32 [batch, 10]`, and names of dynamic dimensions.

    These are torch's own, such as `s77`, → `batch` if the dimension is as large.
    """
    facts = []
    names = dict[str, str]()
    given = program.graph_signature.user_inputs
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.name in given and isinstance(value, Tensor):
            sizes: list[Any] = list(value.shape)
            names |= {
                str(size): _BATCH for size in sizes if not isinstance(size, int) and size.node.hint == num_samples
            }
            shape = ", ".join(names.get(str(size), str(size)) for size in sizes)
            facts.append(("input", f"{node.name}: {str(value.dtype).removeprefix('torch.')} [{shape}]"))
    return facts, names


def check_close(expected: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    """Raise AssertionError if number, types, shapes or values of the outputs differ. See TOLERANCES."""
    if not expected:
        raise AssertionError("The model returns no tensor, so there is nothing to export.")
    if len(expected) != len(found):
        raise AssertionError(f"The model returns {len(expected)} tensors, the file {len(found)}.")
    for position, (wanted, given) in enumerate(zip(expected, found, strict=True)):
        share = TOLERANCES.get(wanted.dtype, 0.0)
        largest = float(wanted[wanted.isfinite()].abs().amax()) if share and wanted.isfinite().any() else 0.0
        torch.testing.assert_close(
            given,
            wanted,
            rtol=0.0,
            atol=share * largest,
            equal_nan=True,
            check_device=False,
            msg=partial("Output {}: {}".format, position),
        )


# The files


Ran = tuple[str, Callable[[Call], list[Tensor]]]
"""The name of what runs a file that was written, and a function that calls the file."""


def _torch_export(source: Source, program: ExportedProgram, path: Path, _: Mapping[str, str]) -> Ran:
    torch.export.save(program, path, extra_files=dict(source.metadata))
    again = torch.export.load(path).module()
    return "torch.export", partial(_outputs, again)


def _onnx(source: Source, program: ExportedProgram, path: Path, names: Mapping[str, str]) -> Ran:
    """Write an ONNX file. names: of dynamic dimensions."""
    dtypes = {tensor.dtype for tensor in program.state_dict.values()}
    opset = _OPSET_WITH_BFLOAT16 if torch.bfloat16 in dtypes else None
    exported = torch.onnx.export(program, dynamo=True, verbose=False, opset_version=opset)
    assert exported is not None
    model = exported.model_proto
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param:  # such as s77 or 2*s77
                dimension.dim_param = re.sub(r"\w+", lambda found: names.get(found[0], found[0]), dimension.dim_param)
    for key, text in source.metadata.items():
        model.metadata_props.add(key=key, value=text)
    path.write_bytes(model.SerializeToString())
    return _load_onnx(path)


def _load_onnx(path: Path) -> Ran:
    """Return onnxruntime, or onnx.reference if onnxruntime is missing or has no kernel for an operation on the CPU."""
    import onnx_ir

    program = torch.onnx.ONNXProgram(onnx_ir.load(path), None)
    if find_spec("onnxruntime") is not None:
        import onnxruntime
        from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

        onnxruntime.set_default_logger_severity(3)  # errors
        with suppress(NoKernel):
            program.initialize_inference_session(
                partial(onnxruntime.InferenceSession, providers=["CPUExecutionProvider"])
            )
            return f"onnxruntime {onnxruntime.__version__}", lambda call: list(program(*_tensors(call)))
    return "onnx.reference", lambda call: list(program.call_reference(*_tensors(call)))

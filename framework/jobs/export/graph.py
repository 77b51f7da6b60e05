"""Write a model's graph for torch.export or ONNX. The file is read back and must compute what the model does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import AdditionalInputs, ExportedProgram

from framework.errors import FrameworkError, RunError, TargetError, describe_error, raised_at
from framework.jobs.export.calls import Call, first_call, outputs
from framework.jobs.export.graph_files import write_onnx, write_torch_export
from framework.jobs.export.source import Source

# The largest difference allowed between a graph's output and the model's, as a share of the output's largest value.
# Outputs of other types must be equal.
TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}

# The name of the dynamic dimension.
_BATCH = "batch"
_SMALL_BATCHES = [8, 9]
# Of torch's message; the rest is advice on debugging torch.
_LINES = 2


def write_graph(source: Source, path: Path) -> list[tuple[str, str]]:
    """Write the model's graph, and compare what the file computes with the model.

    It is traced with the model's call in `validation_step`, with `data.eval_batch_size` samples. With
    `export.dynamic_batch` there are two small batches instead: dimensions that differ between them are dynamic.
    Return what to print about the file, names and texts.
    """
    config = source.config
    sizes = [config.data.evaluated_batch_size]
    if config.export.dynamic_batch:
        sizes = _SMALL_BATCHES
    sizes_text = " and ".join(map(str, sizes))
    try:
        calls = [first_call(source, num_samples=size) for size in sizes]
        program = _traced(source.model, calls)
        inputs = _tensor_inputs(program)
        names = _names_of_batch_size(inputs, num_samples=sizes[0])
        if config.export.format == "torch_export":
            written = write_torch_export(program, path, metadata=source.metadata)
        else:
            written = write_onnx(program, path, dimension_names=names, metadata=source.metadata)
    except FrameworkError:
        raise
    except Exception as error:
        # It may be torch's own, which has many classes, or that of the user's code.
        raise TargetError(
            f"{source.name} can't be exported with batches of {sizes_text} samples: "
            f"{describe_error(error.__cause__ or error, lines=_LINES)}\n{raised_at(error)}\n"
            "Change the model there: for batches of any size, use x.shape[0]; len(x) is a fixed number in a graph.\n"
            "Or use export.dynamic_batch=false, for batches of data.eval_batch_size samples only; or "
            "export.format=state_dict or safetensors."
        ) from error

    for call, size in zip(calls, sizes, strict=True):
        try:
            check_close(outputs(source.model, call), written.run(call))
        except Exception as error:
            # Values that differ, or whatever the file's runtime raises.
            raise RunError(
                f"The {config.export.format} file of {source.name}, run by {written.runtime} with a batch of "
                f"{size} samples, is not the same as the model; it was removed.\n"
                f"{describe_error(error, lines=4)}\nA model that draws random numbers in eval mode can't be the same."
            ) from error

    facts = [("input", _input_text(name, value, names)) for name, value in inputs.items()]
    return [*facts, ("compared", f"with the model, by {written.runtime}, for batches of {sizes_text}")]


def _traced(model: nn.Module, calls: list[Call]) -> ExportedProgram:
    """Return the model's graph for the first call; what has another size in the other calls is dynamic."""
    first, *others = calls
    sizes = AdditionalInputs()
    for call in others:
        sizes.add(*call)
    with torch.no_grad():
        return torch.export.export(model, *first, dynamic_shapes=sizes if others else None)


def _tensor_inputs(program: ExportedProgram) -> dict[str, Tensor]:
    """Return the tensors of the model's call by name, in order, with the sizes that the graph has for them."""
    user_inputs = program.graph_signature.user_inputs
    inputs = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.name in user_inputs and isinstance(value, Tensor):
            inputs[node.name] = value
    return inputs


def _names_of_batch_size(inputs: Mapping[str, Tensor], *, num_samples: int) -> dict[str, str]:
    """Return torch's names of dynamic dimensions, such as `s77`, → `batch` if the dimension has `num_samples`."""
    names = {}
    for value in inputs.values():
        dimensions: list[Any] = list(value.shape)
        for dimension in dimensions:
            is_dynamic = not isinstance(dimension, int)
            if is_dynamic and dimension.node.hint == num_samples:
                names[str(dimension)] = _BATCH
    return names


def _input_text(name: str, value: Tensor, names: Mapping[str, str]) -> str:
    """Return `NAME: float32 [batch, 10]`."""
    shape = ", ".join(names.get(str(size), str(size)) for size in value.shape)
    return f"{name}: {str(value.dtype).removeprefix('torch.')} [{shape}]"


def check_close(expected: Sequence[Tensor], computed: Sequence[Tensor]) -> None:
    """Raise AssertionError if number, types, shapes or values of the outputs differ. See TOLERANCES."""
    if not expected:
        raise AssertionError("The model returns no tensor, so there is nothing to export.")
    if len(expected) != len(computed):
        raise AssertionError(f"The model returns {len(expected)} tensors, the file {len(computed)}.")
    for position, (of_model, of_file) in enumerate(zip(expected, computed, strict=True)):
        torch.testing.assert_close(
            of_file,
            of_model,
            rtol=0.0,
            atol=_tolerance(of_model),
            equal_nan=True,
            check_device=False,
            msg=partial("Output {}: {}".format, position),
        )


def _tolerance(output: Tensor) -> float:
    """Return by how much values may differ from this output of the model."""
    share = TOLERANCES.get(output.dtype, 0.0)
    if share == 0.0 or not output.isfinite().any():
        return 0.0
    largest = output[output.isfinite()].abs().amax()
    return share * float(largest)

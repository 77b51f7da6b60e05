"""A traced model as ONNX, and running such a file. Imports `onnx` and `onnxruntime`, where they are used."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from framework.causes import said
from framework.errors import RunError, TargetError
from framework.tracing import BATCH, Call, symbol
from framework.versions import installed_versions

_OPSET_WITH_BFLOAT16 = 22  # of convolutions, for instance; torch's default is older


def onnx_model(program: ExportedProgram, *, name: str, metadata: Mapping[str, str]) -> Any:
    """The program as an `onnx.ModelProto` with its weights inside. name: the model's, for messages.

    Raises TargetError for what ONNX, or torch's way to it, doesn't have.
    """
    dtypes = {tensor.dtype for tensor in program.state_dict.values()}
    opset = _OPSET_WITH_BFLOAT16 if torch.bfloat16 in dtypes else None
    try:
        exported = torch.onnx.export(program, dynamo=True, verbose=False, opset_version=opset)
    except Exception as error:  # torch's own, of many classes
        raise TargetError(
            f"torch.onnx can't turn {name} into ONNX: {said(error.__cause__ or error)}\n"
            "Change the model there, or use another export.format: torch_export, safetensors or state_dict."
        ) from error
    assert exported is not None
    model = exported.model_proto
    _name_batch(model, symbol(program))
    for key, value in metadata.items():
        model.metadata_props.add(key=key, value=value)
    return model


def _name_batch(model: Any, found: str | None) -> None:
    """Say `batch` where torch's own name of that dimension stands, such as s77."""
    if found is None:
        return
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param:
                dimension.dim_param = re.sub(rf"\b{re.escape(found)}\b", BATCH, dimension.dim_param)


@dataclass(frozen=True)
class Runtime:
    """What runs a file. `notes`: why it isn't another one."""

    name: str
    run: Callable[[Call], list[Tensor]]
    notes: tuple[str, ...] = ()


def runtime(path: Path, calls: Sequence[Call]) -> Runtime:
    """onnxruntime with the file, if it is installed and has all that is in it on the CPU; else onnx.reference.

    Raises RunError where the file isn't valid.
    """
    import onnx

    try:
        onnx.checker.check_model(str(path))
    except Exception as error:  # of onnx's own, by what it looks at
        raise RunError(f"The ONNX file isn't valid: {said(error)}") from error
    if find_spec("onnxruntime") is None:
        return _reference(path)
    if any(tensor.dtype is torch.bfloat16 for tensor in calls[0].tensors()):
        return _reference(path, why=f"{_versioned('onnxruntime')} takes no bfloat16 on the CPU")
    return _onnxruntime(path)


def _onnxruntime(path: Path) -> Runtime:
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

    name = _versioned("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except NoKernel as error:
        return _reference(path, why=f"{name} has not all of it on the CPU ({str(error).rpartition(' : ')[2]})")
    except Exception as error:  # its own, by what it doesn't like
        raise RunError(f"{name} refuses the ONNX file: {said(error)}") from error
    names = [each.name for each in session.get_inputs()]
    return Runtime(name, lambda call: _run(lambda feeds: session.run(None, feeds), names, call))


def _reference(path: Path, *, why: str | None = None) -> Runtime:
    from onnx.reference import ReferenceEvaluator

    session: Any = ReferenceEvaluator(str(path))
    notes = () if why is None else (f"{why}, so onnx.reference ran it",)
    name = f"onnx.reference {installed_versions(['onnx'])['onnx']}"
    return Runtime(name, lambda call: _run(lambda feeds: session.run(None, feeds), session.input_names, call), notes)


def _run(function: Callable[[dict[str, Any]], Iterable[Any]], names: Sequence[str], call: Call) -> list[Tensor]:
    tensors = call.tensors()
    if len(names) != len(tensors):
        raise RunError(f"The ONNX file takes {len(names)} tensors ({', '.join(names)}), the model {len(tensors)}.")
    return [_tensor(value) for value in function(dict(zip(names, map(_array, tensors), strict=True)))]


def _array(tensor: Tensor) -> Any:
    import ml_dtypes  # onnx needs it, too

    tensor = tensor.detach().contiguous()
    if tensor.dtype is torch.bfloat16:  # NumPy has none of its own
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _tensor(array: Any) -> Tensor:
    import numpy

    array = numpy.ascontiguousarray(array).reshape(numpy.shape(array))  # which makes one dimension of none
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(numpy.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _versioned(package: str) -> str:
    return f"{package} {installed_versions([package])[package]}"

"""The files of a graph, torch.export's and ONNX: how each is written, and run again from what was written."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram

from framework.jobs.export.calls import Call, outputs, tensors_of

# Of convolutions, for instance; torch's default is older.
_OPSET_WITH_BFLOAT16 = 22
# onnxruntime's level for errors.
_ERRORS = 3


class Written(NamedTuple):
    """A file that was written and read again."""

    # The name of what runs it.
    runtime: str
    # Returns the outputs for a call of the model.
    run: Callable[[Call], list[Tensor]]


def write_torch_export(program: ExportedProgram, path: Path, *, metadata: Mapping[str, str]) -> Written:
    """Write the file of torch.export, in which dimensions keep torch's names."""
    torch.export.save(program, path, extra_files=dict(metadata))
    loaded = torch.export.load(path).module()
    return Written("torch.export", partial(outputs, loaded))


def write_onnx(
    program: ExportedProgram, path: Path, *, dimension_names: Mapping[str, str], metadata: Mapping[str, str]
) -> Written:
    """Write an ONNX file. dimension_names: torch's names of dynamic dimensions → names in the file."""
    dtypes = {tensor.dtype for tensor in program.state_dict.values()}
    opset = _OPSET_WITH_BFLOAT16 if torch.bfloat16 in dtypes else None
    exported = torch.onnx.export(program, dynamo=True, verbose=False, opset_version=opset)
    assert exported is not None
    model = exported.model_proto

    def renamed(match: re.Match[str]) -> str:
        return dimension_names.get(match[0], match[0])

    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            # It is a name, such as s77, or an expression, such as 2*s77.
            if dimension.dim_param:
                dimension.dim_param = re.sub(r"\w+", renamed, dimension.dim_param)
    for key, text in metadata.items():
        model.metadata_props.add(key=key, value=text)
    path.write_bytes(model.SerializeToString())
    return _load_onnx(path)


def _load_onnx(path: Path) -> Written:
    """Return onnxruntime, or onnx.reference if onnxruntime is missing or has no kernel for an operation on the CPU."""
    import onnx_ir

    program = torch.onnx.ONNXProgram(onnx_ir.load(path), None)
    if find_spec("onnxruntime") is not None:
        import onnxruntime
        from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

        onnxruntime.set_default_logger_severity(_ERRORS)
        make_session = partial(onnxruntime.InferenceSession, providers=["CPUExecutionProvider"])
        with suppress(NoKernel):
            program.initialize_inference_session(make_session)
            return Written(f"onnxruntime {onnxruntime.__version__}", lambda call: list(program(*tensors_of(call))))
    return Written("onnx.reference", lambda call: list(program.call_reference(*tensors_of(call))))

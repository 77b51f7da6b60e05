"""Where a step on a CUDA device takes other memory than on the CPU, on which it is traced: a table of functions.

`RULES` says for each what is computed in its place while the step is traced; `ASSUMED` says it in words, for the page.
The rest is added to the traced peak: blocks of 512 bytes, and the workspaces of cuBLAS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from framework.jobs.plan.trace import Trace

BLOCK_BYTES: Final = 512
"""The CUDA allocator rounds up to this."""

_MIB = 1 << 20
# https://docs.nvidia.com/cuda/cublas/index.html#cublassetworkspace: 32 MiB from Hopper on. torch keeps one for each
# thread that computes: that of the forward, and autograd's.
_CUBLAS_BYTES = {True: 2 * 32 * _MIB, False: 2 * (8 * _MIB + 128 * 1024)}
_LARGE_WORKSPACES = ("H100", "H200", "B200")

CONTEXT_BYTES: Final = 600 * _MIB
"""Outside of torch's allocator: the CUDA context and the loaded kernels; about, since it depends on the driver."""

SPARE_SHARE: Final = 0.05
"""Of the device's memory, left for fragments and what the communication library takes."""

ASSUMED: Final = (
    "scaled_dot_product_attention keeps no scores, with dropout neither (flash or memory-efficient kernels)",
    "a dropout keeps a mask of one byte for each element",
    "autocast computes layer_norm, group_norm, softmax, log_softmax, cross_entropy and mse_loss in float32; casts of "
    "weights are kept until the forward ends",
    "blocks are multiples of 512 bytes",
    "two cuBLAS workspaces, 32 MiB each from Hopper on, 8 MiB before; convolutions take no workspace of their own",
    f"{CONTEXT_BYTES // _MIB} MiB for the CUDA context, and {SPARE_SHARE:.0%} of the memory left for fragments",
)


def _in_float32(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute as autocast does on CUDA for what is on its list of float32."""
    if not torch.is_autocast_enabled("cpu"):
        return func(*args, **kwargs)
    args, kwargs = tree_map_only(Tensor, _widened, (args, kwargs))
    with torch.autocast("cpu", enabled=False):
        return func(*args, **kwargs)


def _widened(tensor: Tensor) -> Tensor:
    if tensor.dtype in (torch.bfloat16, torch.float16):
        return tensor.float()
    return tensor


def _attention(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute without dropout, with which the CPU has only a kernel that keeps all scores."""
    names = ("query", "key", "value", "attn_mask", "dropout_p")
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs, "dropout_p": 0.0}
    rest = args[len(names) :]
    if rest:
        kwargs["is_causal"] = rest[0]
    return func(**kwargs)


def _dropout(
    func: Callable[..., Any], input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    if inplace or not training or p == 0:
        return func(input, p, training, inplace)
    return torch.native_dropout(input, p, training)[0]


RULES: Final[Mapping[Any, Callable[..., Any]]] = {
    F.scaled_dot_product_attention: _attention,
    F.dropout: _dropout,
    F.layer_norm: _in_float32,
    F.group_norm: _in_float32,
    F.softmax: _in_float32,
    F.log_softmax: _in_float32,
    F.cross_entropy: _in_float32,
    F.mse_loss: _in_float32,
    torch.softmax: _in_float32,
    torch.log_softmax: _in_float32,
    Tensor.softmax: _in_float32,
    Tensor.log_softmax: _in_float32,
}


@final
class CudaFunctions(TorchFunctionMode):
    """While entered, functions compute as `RULES` has it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        call = func
        if func in RULES:
            call = partial(RULES[func], func)
        return call(*args, **(kwargs or {}))


def on_cuda(trace: Trace) -> Trace:
    """Return the trace with blocks as the CUDA allocator makes them."""
    blocks = []
    for block in trace.blocks:
        size_bytes = -(-block.size_bytes // BLOCK_BYTES) * BLOCK_BYTES
        blocks.append(replace(block, size_bytes=size_bytes))
    return replace(trace, blocks=tuple(blocks))


def workspace_bytes(device_name: str) -> int:
    """Return what cuBLAS's workspaces take on a device."""
    is_large = any(name in device_name for name in _LARGE_WORKSPACES)
    return _CUBLAS_BYTES[is_large]

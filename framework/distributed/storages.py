"""The storages of tensors, whatever their layout: what takes memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_COMPRESSED_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_COMPRESSED_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of a tensor: of a DTensor those of this rank's shard, of a sparse one its indices and values.

    A layout that torch hides, such as that of MKL-DNN, has none.
    """
    for part in _dense_parts(tensor):
        yield part.untyped_storage()


def _dense_parts(tensor: Tensor) -> Iterator[Tensor]:
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        names, _ = wrapper.__tensor_flatten__()
        for name in names:
            value = getattr(wrapper, name)
            # A DTensor has its mesh there, too.
            if isinstance(value, Tensor):
                yield from _dense_parts(value)
        return
    if tensor.layout == torch.strided:
        yield tensor
        return
    # A trainable sparse tensor doesn't give out its values.
    tensor = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        yield tensor._indices()
        yield tensor._values()
    elif tensor.layout in _COMPRESSED_ROWS:
        yield tensor.crow_indices()
        yield tensor.col_indices()
        yield tensor.values()
    elif tensor.layout in _COMPRESSED_COLUMNS:
        yield tensor.ccol_indices()
        yield tensor.row_indices()
        yield tensor.values()

"""Any map-style dataset as tensors: each sample is loaded once, through the dataset's own `__getitem__`.

That is right only if a sample is the same whenever it is loaded, so a dataset that draws random numbers is refused.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.data import default_collate

from framework.data.fetch import load_sample
from framework.data.tensor_samples import TensorRows, row_bytes
from framework.distributed.seed import fingerprint, preserved_generators
from framework.errors import DataError
from framework.system.formatting import format_bytes
from framework.types import MapDataset

_BLOCK = 256  # samples between two comparisons of the generators


def decode(dataset: MapDataset, *, part: str, limit_bytes: int | None) -> TensorRows:
    """Return all samples of a dataset as tensors, in its order; the generators are restored.

    limit_bytes: What they may take; None: anything. Raises DataError if they take more, or if a sample draws from a
    generator, holds anything but numbers, or differs from the others in shape; RunError if the dataset raises.
    """
    tensors: list[Tensor] = []
    spec: TreeSpec | None = None
    with preserved_generators():
        for begin in range(0, len(dataset), _BLOCK):
            indices = range(begin, min(begin + _BLOCK, len(dataset)))
            before = fingerprint(())
            leaves, found = _load_block(dataset, indices, part=part)
            if fingerprint(()) != before:
                raise _refused(f"one of samples {begin} to {indices.stop - 1} draws random numbers", part=part)
            if spec is None:
                spec = found
                size_bytes = len(dataset) * sum(map(row_bytes, leaves))
                if limit_bytes is not None and size_bytes > limit_bytes:
                    sizes = f"{format_bytes(size_bytes)} in each process, and {format_bytes(limit_bytes)} are available"
                    raise _refused(f"decoded it takes {sizes}", part=part)
                tensors = [leaf.new_empty((len(dataset), *leaf.shape[1:])) for leaf in leaves]
            shapes = [(leaf.dtype, leaf.shape[1:]) for leaf in leaves]
            if found != spec or shapes != [(tensor.dtype, tensor.shape[1:]) for tensor in tensors]:
                raise _refused(f"samples from {begin} on differ in shape or type from those before", part=part)
            for tensor, leaf in zip(tensors, leaves, strict=True):
                tensor[begin : indices.stop] = leaf
        # Some again, to find a generator of the dataset's own.
        for index in {0, len(dataset) // 2, len(dataset) - 1}:
            again, _ = _load_block(dataset, range(index, index + 1), part=part)
            kept = [tensor[index : index + 1] for tensor in tensors]
            if not all(map(_are_equal, again, kept)):
                raise _refused(f"sample {index} isn't the same whenever it is loaded", part=part)
    assert spec is not None  # an empty dataset was refused before
    return TensorRows(tuple(tensors), pack=partial(tree_unflatten, treespec=spec))


def _load_block(dataset: MapDataset, indices: range, *, part: str) -> tuple[list[Tensor], TreeSpec]:
    """Return some samples as `default_collate` makes a batch of them, flattened."""
    samples = [load_sample(dataset, index, part=part) for index in indices]
    try:
        leaves, spec = tree_flatten(default_collate(samples))
    except Exception as error:
        batch = f"samples {indices.start} to {indices.stop - 1}"
        raise _refused(f"{batch} don't make a batch: {type(error).__name__}: {error}", part=part) from error
    others = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)]
    if others or not leaves:
        raise _refused(
            f"sample {indices.start} holds {others[0] if others else 'nothing'}, not only numbers", part=part
        )
    return [leaf.detach() for leaf in leaves], spec


def _are_equal(first: Tensor, second: Tensor) -> bool:
    same_kind = first.dtype == second.dtype and first.shape == second.shape
    return same_kind and torch.allclose(first, second, rtol=0.0, atol=0.0, equal_nan=True)


def _refused(why: str, *, part: str) -> DataError:
    return DataError(
        f"The {part} dataset can't be resident: {why}.\ndata.loader=resident keeps samples as they come once. Use "
        "data.loader=dataloader, or give framework.TensorSamples and a transform of batches, such as those of "
        "framework.transforms."
    )

"""Any map-style dataset as tensors: each sample is asked for once, through the dataset's own `__getitem__`.

That is right only where a sample is the same whenever it is asked for. What draws from a generator is refused; data of
torchvision are known to be the same where all their transforms are.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.data import ConcatDataset, Subset, default_collate

from framework.data.draws import Draws
from framework.data.fetch import load_sample, preserved_generators
from framework.data.rows import Rows, row_bytes
from framework.errors import DataError
from framework.types import MapDataset

_SAME_EVERY_TIME = {"ToTensor", "PILToTensor", "ToImage", "ToDtype", "ConvertImageDtype", "ToPureTensor"} | {
    *("Normalize", "Resize", "CenterCrop", "Grayscale", "Pad"),
}
"""Transforms of torchvision, of either version, that draw nothing; and Compose of them."""

_OF_BATCHES = {"ToDtype", "Normalize"}
"""Those that do to a batch of images exactly what they do to each, on every device."""

_BLOCK = 256  # samples between two looks at the generators
_TORCHVISION = "torchvision."


class UndecodableError(DataError):
    """A dataset whose samples can't be kept as tensors; the text says why, and begins with what the sample is."""


def is_known_to_repeat(dataset: Any) -> bool:
    """Whether it is torchvision's, with transforms that draw nothing; or a subset or concatenation of such."""
    if type(dataset) is Subset:
        return is_known_to_repeat(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(is_known_to_repeat, dataset.datasets))
    if not type(dataset).__module__.startswith(_TORCHVISION):
        return False
    given = [getattr(dataset, name, None) for name in ("transform", "target_transform", "transforms")]
    return all(_steps(transform) is not None for transform in given)


def sample_bytes(dataset: MapDataset, *, part: str) -> int:
    """What one sample takes as it is kept: the first stands for all. Raises as `decoded` does."""
    kept, _ = _compact(dataset)
    with preserved_generators():
        leaves, _ = _flat(_block(kept, range(1), part=part), range(1), part=part)
    return sum(row_bytes(tensor) for tensor in leaves)


def decoded(dataset: MapDataset, *, part: str) -> Rows:
    """All samples of a dataset as tensors, in its order. The generators of the caller are left as they were.

    Images that a dataset of torchvision turns into bytes first are kept so, and the rest is done to batches, where
    that gives the same numbers. Raises UndecodableError for samples that draw from a generator, hold something else
    than numbers or differ in shape; RunError where the dataset raises.
    """
    kept, transform = _compact(dataset)
    tensors: list[Tensor] = []
    spec: TreeSpec | None = None
    with preserved_generators():
        for begin in range(0, len(kept), _BLOCK):
            positions = range(begin, min(begin + _BLOCK, len(kept)))
            before = _generators()
            leaves, found = _flat(_block(kept, positions, part=part), positions, part=part)
            if _generators() != before:
                raise _drawing(kept, positions, part=part)
            if spec is None:
                spec = found
                tensors = [leaf.new_empty((len(kept), *leaf.shape[1:])) for leaf in leaves]
            shapes = [(leaf.dtype, leaf.shape[1:]) for leaf in leaves]
            if found != spec or shapes != [(tensor.dtype, tensor.shape[1:]) for tensor in tensors]:
                raise _unlike(positions, part=part)
            for tensor, leaf in zip(tensors, leaves, strict=True):
                tensor[begin : positions.stop] = leaf
        _check_again(kept, tensors, part=part)
    assert spec is not None  # an empty dataset was refused before
    return Rows(tuple(tensors), transform=transform, pack=partial(tree_unflatten, treespec=spec))


# Samples


def _block(dataset: MapDataset, positions: range, *, part: str) -> Any:
    """Some samples as `default_collate` makes a batch of them."""
    samples = [load_sample(dataset, index, part=part) for index in positions]
    try:
        return default_collate(samples)
    except Exception as error:
        raise UndecodableError(
            f"Samples {positions.start} to {positions.stop - 1} of the {part} dataset don't make a batch: "
            f"{type(error).__name__}: {error}"
        ) from error


def _flat(batch: Any, positions: range, *, part: str) -> tuple[list[Tensor], TreeSpec]:
    leaves, spec = tree_flatten(batch)
    other = next((leaf for leaf in leaves if not isinstance(leaf, Tensor)), None)
    if other is not None or not leaves:
        raise UndecodableError(
            f"Sample {positions.start} of the {part} dataset holds {type(other).__name__}, and only numbers and "
            "tensors can be kept."
        )
    return [leaf.detach() for leaf in leaves], spec


def _unlike(positions: range, *, part: str) -> UndecodableError:
    return UndecodableError(
        f"Samples from {positions.start} on of the {part} dataset differ in shape or type from those before."
    )


def _drawing(dataset: MapDataset, positions: range, *, part: str) -> UndecodableError:
    """Finds the sample by asking for each of them again."""
    drawing: int | None = None
    for index in positions:
        before = _generators()
        load_sample(dataset, index, part=part)
        if _generators() != before:
            drawing = index
            break
    name = f"Sample {drawing}" if drawing is not None else f"A sample from {positions.start} to {positions.stop - 1}"
    return UndecodableError(
        f"{name} of the {part} dataset draws random numbers, so it isn't the same whenever it is asked for."
    )


def _check_again(dataset: MapDataset, tensors: Sequence[Tensor], *, part: str) -> None:
    """Raise UndecodableError where a few samples aren't what they were: they draw from a generator of their own."""
    for index in _probes(dataset):
        again = tree_leaves(_block(dataset, range(index, index + 1), part=part))
        if not all(_equal(one[0], tensor[index]) for one, tensor in zip(again, tensors, strict=True)):
            raise UndecodableError(f"Sample {index} of the {part} dataset isn't the same whenever it is asked for.")


def _probes(dataset: MapDataset) -> Iterator[int]:
    yield from sorted({0, len(dataset) // 2, len(dataset) - 1})


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return (
        torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True) if one.is_floating_point() else one.equal(other)
    )


def _generators() -> tuple[Any, ...]:
    """The states of what a dataset may draw from, to compare."""
    numpy = sys.modules.get("numpy")
    state = () if numpy is None else numpy.random.get_state()
    return (
        random.getstate(),
        bytes(torch.default_generator.get_state().tolist()),
        *(each.tobytes() if hasattr(each, "tobytes") else each for each in state),
    )


# Transforms of torchvision


def _steps(transform: Any) -> list[Any] | None:
    """The known steps that a transform is made of, none for None; None for one that isn't known to repeat itself."""
    if transform is None:
        return []
    kind = type(transform)
    if not kind.__module__.startswith(_TORCHVISION):
        return None
    if kind.__name__ == "StandardTransform":
        first, second = _steps(transform.transform), _steps(transform.target_transform)
        return None if first is None or second is None else [*first, *second]
    if kind.__name__ == "Compose":
        inner = [_steps(step) for step in transform.transforms]
        return None if None in inner else [step for steps in inner if steps is not None for step in steps]
    return [transform] if kind.__name__ in _SAME_EVERY_TIME else None


class _ImageRest:
    """The transforms that are left for batches: of the first tensor, the images."""

    def __init__(self, steps: Sequence[Callable[[Tensor], Tensor]]) -> None:
        self._steps = steps

    def __call__(self, batch: Sequence[Tensor], draws: Draws) -> list[Tensor]:
        images, *others = batch
        for step in self._steps:
            images = step(images)
        return [images, *others]


def _compact(dataset: MapDataset) -> tuple[MapDataset, _ImageRest | None]:
    """The dataset with fewer transforms, so that images are bytes, and those left for batches; or as it is, and None.

    Tried on a few samples: where that doesn't give bytes or not the same numbers, nothing is left out.
    """
    leaf: Any = dataset
    while type(leaf) is Subset:
        leaf = leaf.dataset
    steps = _steps(getattr(leaf, "transform", None)) if is_known_to_repeat(leaf) else None
    parted = None if not steps else _parted(steps)
    if parted is None:
        return dataset, None
    shorter, rest = _with_transform(dataset, parted[0]), _ImageRest(parted[1])
    try:
        for index in _probes(dataset):
            whole, kept = (tree_flatten(default_collate([each[index]])) for each in (dataset, shorter))
            if kept[0][0].dtype != torch.uint8 or kept[0][0].ndim != 4 or whole[1] != kept[1]:
                return dataset, None
            done = rest(kept[0], Draws(0, torch.tensor([index])))
            if not all(_equal(one, other) for one, other in zip(whole[0], done, strict=True)):
                return dataset, None
    except Exception:  # whatever it is, the dataset as it is says it better
        return dataset, None
    return shorter, rest


def _parted(steps: list[Any]) -> tuple[list[Any], list[Any]] | None:
    """The steps up to bytes, and those from bytes to floats and on, all of which may be done to batches."""
    names = [type(step).__name__ for step in steps]
    cut = next((i for i, name in enumerate(names) if name in ("ToTensor", "ToDtype", "ConvertImageDtype")), None)
    if cut is None:
        return None
    first = steps[:cut]
    if names[cut] == "ToTensor":  # from an image of bytes: the bytes, divided
        from torchvision.transforms import PILToTensor  # loaded long ago, by whoever made the transforms

        first = [*first, PILToTensor()]
    # The version 2 multiplies by a number, which is the same on every device; whether the others divide is tried.
    rest = steps[cut:] if names[cut] == "ToDtype" else [_divided, *steps[cut + 1 :]]
    if any(step is not _divided and type(step).__name__ not in _OF_BATCHES for step in rest):
        return None
    return first, rest


def _divided(images: Tensor) -> Tensor:
    """As `ToTensor` and its like do. By a tensor: for a plain number a GPU multiplies by its reciprocal."""
    floats = images.to(torch.get_default_dtype())
    return floats.div_(torch.tensor(255.0, dtype=floats.dtype, device=floats.device))


def _with_transform(dataset: Any, steps: list[Any]) -> Any:
    """A copy of the dataset, which shares its data, with these steps for its images."""
    changed = copy.copy(dataset)
    if type(dataset) is Subset:
        changed.dataset = _with_transform(dataset.dataset, steps)
        return changed
    changed.transform = partial(_one_after_another, steps=tuple(steps))
    if getattr(dataset, "transforms", None) is not None:
        changed.transforms = copy.copy(dataset.transforms)
        changed.transforms.transform = changed.transform
    return changed


def _one_after_another(image: Any, *, steps: tuple[Any, ...]) -> Any:
    for step in steps:
        image = step(image)
    return image

"""K-fold cross-validation: `data.folds` and `data.fold` hold one fold of the train part out as the val part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from framework.config.schema import DataConfig
from framework.data.loader import dataset_size
from framework.data.samplers import RandomSampler, SequentialSampler
from framework.data.tensor_samples import TensorSamples, as_tensor_samples
from framework.distributed.seed import mix
from framework.errors import ConfigError
from framework.system.rank_log import logger
from framework.types import Collate, Datasets, MapDataset, Sampler, Source

# Where datasets have the class of each sample: an attribute of torchvision's, or a column of Hugging Face's.
_LABELS = ("targets", "labels", "label", "y")
# The kinds of NumPy's types that can be classes: truth values, whole numbers and texts.
_CLASS_KINDS = "biuUS"


def apply_folds(datasets: Datasets, config: DataConfig, *, logs: bool = False) -> Datasets:
    """With `data.folds`, return fold number `data.fold` of the train part as the val part, and the others as train.

    The val part of `datasets` is left out; the test part stays. Every rank gets the same folds, in every run: they
    depend on the number of samples, their classes and `data.folds`, not on the seed.

    logs: log the split, which one rank does for all. Raises ConfigError for a stream, for fewer samples than folds, and
    for a sampler that is made for all samples.
    """
    if config.folds is None:
        return datasets
    assert config.fold is not None, "the rules between keys require both"
    train = datasets.train
    if isinstance(train, IterableDataset):
        raise ConfigError(
            f"data.folds={config.folds} can't go with a stream to train on, whose samples have no numbers. "
            "Leave it out, or give a map-style dataset, with __len__ and __getitem__."
        )
    if isinstance(train, Source):
        raise ConfigError(f"data.folds={config.folds} can't go with a framework.Source. Leave it out.")
    size = dataset_size(train, split="train")
    if config.folds > size:
        raise ConfigError(f"data.folds={config.folds}: the train part has {size} samples. Use {size} folds or fewer.")

    classes = class_numbers(train)
    fold_of_sample = fold_numbers(size, folds=config.folds, classes=classes)
    held_out = (fold_of_sample == config.fold).nonzero().flatten().tolist()
    others = (fold_of_sample != config.fold).nonzero().flatten().tolist()
    if logs:
        how = "unknown classes" if classes is None else "the same share of each class"
        logger.info(
            "data: val is fold %d of %d: %d of %d samples, %s", config.fold, config.folds, len(held_out), size, how
        )

    # The part that samples to evaluate are like; of several validation sets, the first.
    evaluated = next(iter(datasets.sets("val")), "train")
    trained: Any = Subset(train, others)
    return replace(
        datasets,
        train=trained,
        val=_as_evaluated(train, held_out, like=datasets.parts[evaluated]),
        collate_fn=_collate_fns(datasets, val_as=evaluated),
        sampler=_sampler_for(trained, datasets.sampler),
    )


def fold_numbers(size: int, *, folds: int, classes: Tensor | None) -> Tensor:
    """Return the fold of each sample: shape (size,), int64. Folds differ by one sample at most, also within a class."""
    generator = torch.Generator().manual_seed(mix(folds, "folds", size))
    order = torch.randperm(size, generator=generator)
    if classes is not None:
        # One class after another, each in random order.
        order = order[classes[order].argsort(stable=True)]
    numbers = torch.empty(size, dtype=torch.int64)
    # Dealt out in turn, so consecutive samples of this order go to different folds.
    numbers[order] = torch.arange(size) % folds
    return numbers


# Classes


def class_numbers(dataset: Any) -> Tensor | None:
    """Return a number for the class of each sample: shape (N,), int64; None if the dataset doesn't tell.

    It tells by an attribute or column `targets`, `labels`, `label` or `y`, or by the last of several tensors: with one
    whole number, truth value or text for each sample.
    """
    labels = _labels(dataset)
    if labels is None:
        return None
    _, numbers = numpy.unique(labels, return_inverse=True)
    return torch.from_numpy(numbers.astype("int64"))


def _labels(dataset: Any) -> numpy.ndarray[Any, Any] | None:
    samples = as_tensor_samples(dataset)
    if samples is not None:
        if len(samples.tensors) < 2:
            return None
        last = samples.tensors[-1]
        if samples.rows is not None:
            last = last[samples.rows]
        return _as_labels(last, size=len(samples))

    if isinstance(dataset, Subset):
        labels = _labels(dataset.dataset)
        if labels is None:
            return None
        chosen = numpy.asarray(dataset.indices, dtype="int64")
        return labels.take(chosen)
    if isinstance(dataset, ConcatDataset):
        parts = [_labels(part) for part in dataset.datasets]
        known = [labels for labels in parts if labels is not None]
        return numpy.concatenate(known) if len(known) == len(parts) else None

    columns = getattr(dataset, "column_names", None) or ()
    for name in _LABELS:
        values = getattr(dataset, name, None)
        if values is None and name in columns:
            values = dataset[name][:]
        labels = _as_labels(values, size=len(dataset))
        if labels is not None:
            return labels
    return None


def _as_labels(values: Any, *, size: int) -> numpy.ndarray[Any, Any] | None:
    """Return the values as an array; None unless they can be the classes of `size` samples."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    if not isinstance(values, (numpy.ndarray, list, tuple)) or len(values) != size:
        return None
    try:
        array = numpy.asarray(values)
    except ValueError:
        # Lists of different lengths, as the boxes in images.
        return None
    if array.ndim != 1 or array.dtype.kind not in _CLASS_KINDS:
        return None
    return array


# The samples that are held out


def _as_evaluated(train: MapDataset, indices: list[int], *, like: Any) -> MapDataset:
    """Return these samples of the train part, transformed as the val part `like` is, if that is of the same data.

    It is if both are rows of the same tensors; or if they are Subsets of two datasets of the same class, with the same
    labels, which then differ in their transforms. Otherwise the samples are as in training.
    """
    held_out: Any = Subset(train, indices)  # type: ignore[arg-type]
    rows = as_tensor_samples(held_out)
    rows_like = as_tensor_samples(like)
    if rows is not None and rows_like is not None:
        if _has_tensors_of(rows, rows_like):
            rows.transform = rows_like.transform
        return rows
    if type(train) is Subset and type(like) is Subset and _is_twin(train.dataset, like.dataset):
        return Subset(like.dataset, [int(train.indices[index]) for index in indices])
    return held_out  # type: ignore[no-any-return]


def _has_tensors_of(one: TensorSamples, other: TensorSamples) -> bool:
    """Return True if both are rows of the same memory."""
    if len(one.tensors) != len(other.tensors):
        return False
    return all(tensor.is_set_to(same) for tensor, same in zip(one.tensors, other.tensors, strict=True))


def _is_twin(one: Any, other: Any) -> bool:
    """Return True if two datasets hold the same samples, as far as their classes and labels tell."""
    if type(one) is not type(other):
        return False
    labels = _labels(one)
    other_labels = _labels(other)
    return labels is not None and other_labels is not None and numpy.array_equal(labels, other_labels)


def _collate_fns(datasets: Datasets, *, val_as: str) -> Collate | Mapping[str, Collate] | None:
    """Return the collate functions, that of the val part being the one of the part `val_as`."""
    if not isinstance(datasets.collate_fn, Mapping):
        return datasets.collate_fn
    collate_fns = dict(datasets.collate_fn)
    collate_fn = datasets.collate_fn_of(val_as)
    collate_fns.pop("val", None)
    if collate_fn is not None:
        collate_fns["val"] = collate_fn
    return collate_fns


def _sampler_for(train: MapDataset, sampler: Sampler | None) -> Sampler | None:
    """Return the order of the samples that are trained on, in place of that of the whole train part."""
    if sampler is None:
        return None
    if isinstance(sampler, (RandomSampler, SequentialSampler)):
        return type(sampler)(train)
    raise ConfigError(
        f"data.folds can't go with the {type(sampler).__name__} that data.datasets brings along: it orders the whole "
        "train part.\nName it as data.sampler, which is made for the folds to train on."
    )

"""Parts that are given as a torch DataLoader: what is taken of it, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from framework.data import samplers
from framework.errors import DataError
from framework.types import Datasets, Sampler


def unpack_dataloaders(datasets: Datasets) -> Datasets:
    """Return the datasets with each DataLoader replaced by its dataset, and with its collate function.

    The train part's sampler, batch size and `drop_last` are taken too, of an evaluation part the batch size. Order and
    seed are the framework's, and so are workers and pinned memory (`data.num_workers`). Raises DataError for what can't
    be taken.
    """
    if not any(isinstance(part, DataLoader) for part in datasets.parts.values()):
        return datasets
    collate: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for name, part in datasets.parts.items():
        if isinstance(part, DataLoader):
            _check(part, name)
            if part.collate_fn is not default_collate:
                collate[name] = part.collate_fn
        elif datasets.collate_fn is not None:
            collate[name] = datasets.collate_fn_of(name)
    sampler = datasets.sampler
    sizes: dict[str, int | None] = {}
    for field in ("train", "val", "test"):
        given = getattr(datasets, field)
        if isinstance(given, Mapping):
            found[field] = {key: each.dataset if isinstance(each, DataLoader) else each for key, each in given.items()}
            loaders = [each for each in given.values() if isinstance(each, DataLoader)]
            sizes[field] = max((each.batch_size or 0 for each in loaders), default=None)
        elif isinstance(given, DataLoader):
            found[field], sizes[field] = given.dataset, given.batch_size
            if field == "train" and not isinstance(given.dataset, IterableDataset):
                found[field], sampler = _order(given)
        else:
            found[field] = given
    evaluated = [size for field in ("val", "test") if (size := sizes.get(field))]
    return Datasets(
        **found,
        collate_fn=collate or None,
        sampler=sampler,
        batch_size=sizes.get("train") or datasets.batch_size,
        eval_batch_size=max(evaluated) if evaluated else datasets.eval_batch_size,
        drop_last=datasets.train.drop_last if isinstance(datasets.train, DataLoader) else datasets.drop_last,
    )


def _check(loader: DataLoader[Any], part: str) -> None:
    """Raise DataError for a setting of the loader that has no counterpart."""
    refused: list[tuple[str, str]] = []
    if loader.batch_size is None:
        own = loader.batch_sampler
        what = "batch_size=None" if own is None else f"batch_sampler={type(own).__name__}"
        refused.append((what, "Give batch_size, and a sampler that orders samples (framework.samplers)"))
    elif type(loader.batch_sampler) not in (BatchSampler, type(None)):
        refused.append((f"batch_sampler={type(loader.batch_sampler).__name__}", "Use one of framework.samplers"))
    if loader.worker_init_fn is not None:
        why = "Leave it out: samples are drawn from generators that are seeded for each of them"
        refused.append((f"worker_init_fn={getattr(loader.worker_init_fn, '__name__', 'a function')}", why))
    is_random = isinstance(loader.sampler, (WeightedRandomSampler, SubsetRandomSampler))
    if part != "train" and (is_random or _is_unknown(loader)):
        why = "Every sample is evaluated once: give the samples to evaluate as a Subset"
        refused.append((f"sampler={type(loader.sampler).__name__}", why))
    elif _is_unknown(loader):
        why = "Each process gets its part anyway, so leave a DistributedSampler out; for others use framework.samplers"
        refused.append((f"sampler={type(loader.sampler).__name__}", why))
    if refused:
        shown = "\n".join(f"  {what}: {why}." for what, why in refused)
        raise DataError(f"The {part} part is a DataLoader with what can't be taken from it:\n{shown}")


def _is_unknown(loader: DataLoader[Any]) -> bool:
    if isinstance(loader.dataset, IterableDataset):
        return False
    known = (RandomSampler, SequentialSampler, WeightedRandomSampler, SubsetRandomSampler)
    return type(loader.sampler) not in known


def _order(loader: DataLoader[Any]) -> tuple[Any, Sampler]:
    """Return the dataset and the order of its samples."""
    dataset, own = loader.dataset, loader.sampler
    sized: Any = dataset
    if isinstance(own, WeightedRandomSampler):
        return dataset, samplers.WeightedRandomSampler(sized, own.weights, own.num_samples, own.replacement)
    if isinstance(own, SubsetRandomSampler):
        some: Any = Subset(dataset, list(own.indices))
        return some, samplers.RandomSampler(some)
    if isinstance(own, RandomSampler):
        if own.replacement or own.num_samples != len(sized):
            uniform = [1.0] * len(sized)
            return dataset, samplers.WeightedRandomSampler(sized, uniform, own.num_samples, own.replacement)
        return dataset, samplers.RandomSampler(sized)
    return dataset, samplers.SequentialSampler(sized)

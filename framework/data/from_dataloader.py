"""Parts that are given as a torch DataLoader: what is taken of it, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast, get_args

import torch.utils.data
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
from framework.data.batch_lists import UserBatches
from framework.data.combined import CombinedBatches, CombinedCollate, CombinedPart, CombinedSamples, Mode
from framework.errors import DataError
from framework.types import Datasets, Sampler


def unpack_dataloaders(datasets: Datasets) -> Datasets:
    """Return the datasets with each DataLoader replaced by its dataset, and with its collate function.

    The train part's sampler, batch size and `drop_last` are taken too, of an evaluation part the last two. Order and
    seed are the framework's, and so are workers and pinned memory (`data.num_workers`). Raises DataError for what can't
    be taken.
    """
    if not any(isinstance(part, DataLoader) for part in datasets.parts.values()):
        return datasets
    for name, part in datasets.parts.items():
        if isinstance(part, DataLoader):
            _check(part, name, owner=f"{name} part")

    train = datasets.train
    sampler = datasets.sampler
    batch_size = datasets.batch_size
    drop_last = datasets.drop_last
    train_dataset: Any = _dataset_of(train)
    if isinstance(train, DataLoader):
        batch_size = _batch_size(train) or batch_size
        drop_last = _drops_last(train)
        if not isinstance(train.dataset, IterableDataset):
            train_dataset, sampler = _order(train)
    return Datasets(
        train=train_dataset,
        val=_evaluated_parts(datasets.val, "val"),
        test=_evaluated_parts(datasets.test, "test"),
        collate_fn=_collate_fns(datasets) or None,
        sampler=sampler,
        batch_size=batch_size,
        eval_batch_size=_eval_batch_size(datasets),
        drop_last=drop_last,
    )


def combine(loaders: Mapping[str, Any], *, mode: str, arrange: Callable[[list[Any]], Any]) -> Datasets:
    """Return the train part, whose batches have one batch of each loader.

    Args:
        loaders: By their names, for messages.
        mode: `min_size`, `max_size` or `max_size_cycle`, which says when an epoch ends.
        arrange: Puts the batches, in a list, into the structure of a whole batch.

    Raises DataError for what can't be taken from them.
    """
    parts = [_combined_part(loader, name) for name, loader in loaders.items()]
    if mode not in get_args(Mode):
        raise DataError(f"Several train loaders with mode={mode}: use one of {', '.join(get_args(Mode))}.")
    return Datasets(
        train=CombinedSamples(parts),
        sampler=CombinedBatches(parts, names=list(loaders), mode=cast("Mode", mode)),
        collate_fn={"train": CombinedCollate(parts, arrange=arrange)},
    )


def _combined_part(loader: Any, name: str) -> CombinedPart:
    owner = f"train loader {name}"
    if not isinstance(loader, DataLoader):
        raise DataError(f"The {owner} is a {type(loader).__name__}. Give a torch.utils.data.DataLoader.")
    _check(loader, "train", owner=owner)
    batch_size = _batch_size(loader)
    if isinstance(loader.dataset, IterableDataset) or batch_size is None:
        raise DataError(
            f"The {owner} is one of several, and has a stream or a batch sampler of its own. Give it a map-style "
            "dataset and a batch_size."
        )
    dataset, sampler = _order(loader)
    return CombinedPart(dataset, sampler, batch_size, _drops_last(loader), loader.collate_fn)


def _dataset_of(part: Any) -> Any:
    return part.dataset if isinstance(part, DataLoader) else part


def _evaluated_parts(parts: Any, part: str) -> Any:
    """Return the dataset of an evaluation part, or of each of several ones."""
    if isinstance(parts, Mapping):
        return {name: _evaluated(loader, f"{part}/{name}") for name, loader in parts.items()}
    return _evaluated(parts, part)


def _evaluated(loader: Any, part: str) -> Any:
    """Return the samples to evaluate: with `drop_last`, those of whole batches."""
    if not isinstance(loader, DataLoader) or not _drops_last(loader) or isinstance(loader.dataset, IterableDataset):
        return _dataset_of(loader)
    dataset: Any = loader.dataset
    batch_size = _batch_size(loader) or 1
    whole = len(dataset) // batch_size * batch_size
    if whole == 0:
        raise DataError(
            f"drop_last=True leaves nothing of the {part} part: it has {len(dataset)} samples, and a batch "
            f"{batch_size}.\nUse a smaller batch_size, or drop_last=False."
        )
    if whole == len(dataset):
        return dataset
    return Subset(dataset, range(whole))


def _collate_fns(datasets: Datasets) -> dict[str, Any]:
    """Return the collate function of each part that has one other than torch's."""
    collate_fns: dict[str, Any] = {}
    for name, part in datasets.parts.items():
        if isinstance(part, DataLoader):
            if part.collate_fn is not default_collate:
                collate_fns[name] = part.collate_fn
        elif datasets.collate_fn is not None:
            collate_fns[name] = datasets.collate_fn_of(name)
    return collate_fns


def _eval_batch_size(datasets: Datasets) -> int | None:
    """Return the largest batch size of the evaluation loaders."""
    sizes = []
    for name, part in datasets.parts.items():
        if name != "train" and isinstance(part, DataLoader):
            sizes.append(_batch_size(part) or 1)
    return max(sizes) if sizes else datasets.eval_batch_size


def _check(loader: DataLoader[Any], part: str, *, owner: str) -> None:
    """Raise DataError, which names the `owner` of the loader, for a setting that has no counterpart."""
    # What can't be taken, and why.
    refused: list[tuple[str, str]] = []
    batch_sampler: Any = loader.batch_sampler
    if batch_sampler is None and not isinstance(loader.dataset, IterableDataset):
        refused.append(("batch_size=None", "Give batch_size, or a batch_sampler"))
    elif _lists_batches(loader):
        what = f"batch_sampler={type(batch_sampler).__name__}"
        if part != "train":
            refused.append((what, "Every sample is evaluated once: give batch_size"))
        elif not hasattr(batch_sampler, "__len__"):
            refused.append((what, "Give it __len__, the number of batches of an epoch"))
        elif _is_for_one_process(batch_sampler):
            why = "Each of its batches is split over the processes: make it for a single one, with num_replicas=1"
            refused.append((what, why))

    if loader.worker_init_fn is not None:
        what = f"worker_init_fn={getattr(loader.worker_init_fn, '__name__', 'a function')}"
        refused.append((what, "Leave it out: samples are drawn from generators that are seeded for each of them"))

    if part != "train" and _drops_last(loader) and isinstance(loader.dataset, IterableDataset):
        why = "What is dropped of a stream would depend on the number of processes: leave it out"
        refused.append(("drop_last=True", why))

    sampler = _sampler(loader)
    what = f"sampler={type(sampler).__name__}"
    is_random = isinstance(sampler, (WeightedRandomSampler, SubsetRandomSampler))
    if part != "train" and (is_random or _is_unknown(loader)):
        refused.append((what, "Every sample is evaluated once: give the samples to evaluate as a Subset"))
    elif _is_unknown(loader):
        why = "Each process gets its part anyway, so leave a DistributedSampler out; for others use framework.samplers"
        refused.append((what, why))

    if refused:
        lines = "\n".join(f"  {what}: {why}." for what, why in refused)
        raise DataError(f"The {owner} is a DataLoader with what can't be taken from it:\n{lines}")


def _is_unknown(loader: DataLoader[Any]) -> bool:
    if isinstance(loader.dataset, IterableDataset) or _lists_batches(loader):
        return False
    known = (RandomSampler, SequentialSampler, WeightedRandomSampler, SubsetRandomSampler)
    return _kind(_sampler(loader)) not in known


def _lists_batches(loader: DataLoader[Any]) -> bool:
    """Return True if a batch sampler other than torch's makes the batches."""
    return loader.batch_sampler is not None and _kind(loader.batch_sampler) is not BatchSampler


def _is_for_one_process(batch_sampler: Any) -> bool:
    """Return True if it, or the sampler that it takes its samples from, lists the part of one process."""
    for sampler in (batch_sampler, getattr(batch_sampler, "sampler", None)):
        if getattr(sampler, "num_replicas", 1) != 1:
            return True
    return False


# If a DataLoader is given torch's BatchSampler, that has the sampler, the batch size and `drop_last`.


def _settings(loader: DataLoader[Any]) -> Any:
    """Return what has the loader's sampler, batch size and `drop_last`."""
    if loader.batch_size is None and loader.batch_sampler is not None and not _lists_batches(loader):
        return loader.batch_sampler
    return loader


def _sampler(loader: DataLoader[Any]) -> Any:
    return _settings(loader).sampler


def _batch_size(loader: DataLoader[Any]) -> int | None:
    """Return the samples of a batch; None if a batch sampler of the user's lists them."""
    size: int | None = _settings(loader).batch_size
    return size


def _drops_last(loader: DataLoader[Any]) -> bool:
    return bool(_settings(loader).drop_last)


def _kind(sampler: Any) -> type:
    """Return the sampler's class; for one of torchdata's StatefulDataLoader, the class of torch that it stands for.

    Such a sampler only adds a state, and the framework's own order resumes exactly.
    """
    kind = type(sampler)
    if kind.__module__ == "torchdata.stateful_dataloader.sampler":
        return getattr(torch.utils.data, kind.__name__, kind)
    return kind


def _order(loader: DataLoader[Any]) -> tuple[Any, Sampler]:
    """Return the dataset and the order of its samples."""
    dataset: Any = loader.dataset
    if _lists_batches(loader):
        return dataset, UserBatches(loader.batch_sampler)
    torch_sampler = _sampler(loader)
    if isinstance(torch_sampler, WeightedRandomSampler):
        return dataset, samplers.WeightedRandomSampler(
            dataset, torch_sampler.weights, torch_sampler.num_samples, torch_sampler.replacement
        )
    if isinstance(torch_sampler, SubsetRandomSampler):
        subset: Any = Subset(dataset, list(torch_sampler.indices))
        return subset, samplers.RandomSampler(subset)
    if _kind(torch_sampler) is RandomSampler:
        if torch_sampler.replacement or torch_sampler.num_samples != len(dataset):
            uniform = torch.ones(len(dataset))
            return dataset, samplers.WeightedRandomSampler(
                dataset, uniform, torch_sampler.num_samples, torch_sampler.replacement
            )
        return dataset, samplers.RandomSampler(dataset)
    return dataset, samplers.SequentialSampler(dataset)

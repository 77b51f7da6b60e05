"""Build the datasets, with the collate function and the sampler of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from framework.config.instantiate import bind
from framework.config.schema import Config, Node
from framework.config.targets import import_target
from framework.data.folds import apply_folds
from framework.data.from_dataloader import unpack_dataloaders
from framework.distributed.context import Context
from framework.engine.builders.objects import build_object, wrong_result
from framework.errors import ConfigError
from framework.types import Collate, Datasets, Source


def build_data(run_config: Config, context: Context) -> Datasets:
    """Return the datasets, with the collate function, the fold and the sampler of the configuration, if it has some."""
    config = run_config.data
    datasets = build_datasets(config.datasets, run_config=run_config, run_context=context)
    if config.collate_fn is not None:
        datasets = replace(datasets, collate_fn=_build_collate_fn(config.collate_fn))
    if config.sampler is not None:
        datasets = replace(datasets, sampler=None)
    datasets = apply_folds(datasets, config, logs=context.is_main)
    if config.sampler is not None:
        if isinstance(datasets.train, IterableDataset):
            raise ConfigError("data.sampler can't go with a stream to train on, which has its own order. Leave it out.")
        sampler = build_object("data.sampler", config.sampler, datasets.train)
        datasets = replace(datasets, sampler=sampler)
    if datasets.sampler is not None and not hasattr(datasets.sampler, "order"):
        source = config.sampler or config.datasets
        expected = "a framework.Sampler, with __len__ and order"
        raise wrong_result("data.sampler", source, datasets.sampler, expected=expected)
    return datasets


def build_datasets(node: Node, **offered: Any) -> Datasets:
    """Return the Datasets, also from one dataset or a tuple of up to three (train, val, test); takes DataLoaders apart.

    offered: `run_config` and `run_context`, passed to a function that takes them. Other names are the user's.
    """
    key = "data.datasets"
    result = build_object(key, node, **offered)
    if isinstance(result, tuple) and 1 <= len(result) <= 3:
        result = Datasets(*result)
    if isinstance(result, (Dataset, DataLoader, Source)):
        result = Datasets(result)
    if not isinstance(result, Datasets):
        raise wrong_result(key, node, result, expected="framework.Datasets(train, val, test)")
    datasets = result
    if isinstance(datasets.train, Mapping):
        expected = "one dataset to train on; mix several by MixtureSampler"
        raise wrong_result(key, node, datasets.train, expected=expected)

    datasets = unpack_dataloaders(datasets)
    for part, dataset in datasets.parts.items():
        if not _is_dataset(dataset) and not isinstance(dataset, Source):
            kinds = "a map-style dataset, with __len__ and __getitem__, or a torch.utils.data.IterableDataset"
            raise wrong_result(key, node, dataset, expected=f"{kinds} as its {part} part")
    return datasets


def _is_dataset(value: Any) -> bool:
    """Return True for a stream or a map-style dataset, which needn't inherit from torch's class."""
    if isinstance(value, IterableDataset):
        return True
    return hasattr(value, "__getitem__") and hasattr(value, "__len__")


def _build_collate_fn(node: Node) -> Collate:
    """Return the function that the node names, with the node's keywords bound; of a class, an object."""
    key = "data.collate_fn"
    # The loader calls a function with samples.
    if not isinstance(import_target(node["_target_"]), type):
        return bind(node, key=key)
    built = build_object(key, node)
    if not callable(built):
        raise wrong_result(key, node, built, expected="an object that can be called with a list of samples")
    return built  # type: ignore[no-any-return]

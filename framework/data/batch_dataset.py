"""Whole batches of a dataset, on the CPU: what torch's DataLoader loads, in this process or in a worker.

Random transforms draw from generators seeded per sample, by (seed, epoch, position in the epoch's order). So their
numbers depend on neither ranks nor workers, and a sample that comes twice in an epoch is augmented twice. A collate
function draws by (seed, epoch, position of its first sample).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.utils.data import Dataset

from framework.data.draws import Draws
from framework.data.fetch import collate, load_sample
from framework.data.keyed_random import KeyedRandom
from framework.data.sample_check import CheckedSamples, CheckKey, check_rows, check_samples
from framework.data.set_epoch import EpochListeners
from framework.data.tensor_samples import TensorSamples, as_tensor_samples
from framework.distributed.seed import mix
from framework.types import Batch, Collate, MapDataset


class BatchRequest(NamedTuple):
    """A batch to load."""

    # Indices into the dataset, int64.
    indices: Tensor
    # Positions of the samples in the epoch's order.
    positions: Sequence[int]
    # The epoch that seeds the random numbers of samples.
    epoch: int
    # The epoch that `set_epoch` of the dataset gets.
    dataset_epoch: int


class BatchKey(NamedTuple):
    """A BatchRequest in plain numbers: sending a tensor to a worker would take shared memory and a thread."""

    indices: list[int]
    positions: Sequence[int]
    epoch: int
    dataset_epoch: int

    @staticmethod
    def of(request: BatchRequest) -> BatchKey:
        return BatchKey(request.indices.tolist(), request.positions, request.epoch, request.dataset_epoch)


@final
class BatchDataset(Dataset[Batch]):
    """The batches of a dataset: by one indexing operation per tensor if its samples are rows of tensors.

    split: `train`, `val` or `test`, for messages. collate_fn: None for torch's.
    """

    def __init__(self, dataset: MapDataset, *, split: str, seed: int, collate_fn: Collate | None = None) -> None:
        self._dataset = dataset
        self._split = split
        self._seed = seed
        self._collate_fn = collate_fn
        self._rows = as_tensor_samples(dataset) if collate_fn is None else None
        self._random = KeyedRandom(dataset, collate_fn)
        self._listeners = EpochListeners(dataset, collate_fn, split=split, seed=seed)
        # No batch was loaded since `set_epoch`.
        self._is_first_batch = True

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the dataset and what it holds, and of the collate function, if the epoch is a new one.

        Each process has its own copies of them. Raises RunError if one of them raises.
        """
        if self._listeners.set_epoch(epoch):
            self._random.find()
            self._is_first_batch = True

    def __getitem__(self, key: BatchKey | CheckKey) -> Batch | CheckedSamples:
        """Return the batch for a key. Raises RunError, which names the sample that failed."""
        if isinstance(key, CheckKey):
            return self._check(key.indices)
        self.set_epoch(key.dataset_epoch)
        if self._rows is not None:
            return self._load_rows(self._rows, key)
        batch = self._random.load_seeded(partial(self._load, key), searches_all=self._is_first_batch)
        self._is_first_batch = False
        return batch

    def _load_rows(self, rows: TensorSamples, key: BatchKey) -> Batch:
        index_B = torch.tensor(key.indices, device=rows.device)
        position_B = torch.tensor(key.positions, device=rows.device)
        draws = batch_draws(position_B, seed=self._seed, epoch=key.epoch)
        return rows.pack(rows.transformed(rows.gather(index_B), draws))

    def _load(self, key: BatchKey) -> Batch:
        with self._random.preserved():
            samples = []
            for position, index in zip(key.positions, key.indices, strict=True):
                load = partial(load_sample, self._dataset, index, split=self._split)
                samples.append(self._random.load_seeded(load, key=mix(self._seed, "sample", key.epoch, position)))

            if self._collate_fn is not None:
                self._random.seed(mix(self._seed, "collate", key.epoch, key.positions[0]))
            name = f"Samples {key.indices} of the {self._split} dataset"
            return collate(samples, name=name, collate_fn=self._collate_fn)

    def _check(self, indices: list[int]) -> CheckedSamples:
        """Load samples twice, and make a batch of them twice. Changes neither the dataset nor generators."""
        if self._rows is not None:
            return check_rows(self._rows, indices, seed=self._seed, device=self._rows.device)
        checked = check_samples(
            self._dataset,
            indices,
            split=self._split,
            collate_fn=self._collate_fn,
            random=self._random,
            seed=self._seed,
        )
        if self._listeners:
            # Samples change from epoch to epoch, so a sketch of them can't tell if the data has changed.
            checked = replace(checked, sketch=None)
        return checked


def batch_draws(position_B: Tensor, *, seed: int, epoch: int) -> Draws:
    """Return the random numbers of samples at these positions of the epoch's order."""
    return Draws(partial(mix, seed, "batch", epoch), position_B)

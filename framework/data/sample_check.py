"""Load samples twice with the same random numbers: what differs would not be reproduced by a resumed run either."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from framework.data.draws import Draws
from framework.data.fetch import collate, load_sample
from framework.data.keyed_random import KeyedRandom
from framework.data.object_graph import unchanged
from framework.data.sketch import Leaf, Sketch, differing_path, leaves_of, sketch_samples
from framework.data.tensor_samples import TensorSamples
from framework.distributed.seed import generator_states, mix, restore_generator_states
from framework.errors import RunError
from framework.types import Collate, MapDataset

NUM_SAMPLES = 4


class CheckKey(NamedTuple):
    """The samples to load twice, in place of a batch."""

    indices: list[int]


@dataclass(frozen=True)
class CheckedSamples:
    """The result of loading samples twice."""

    # What differs, for a message; None: nothing.
    difference: str | None = None
    # None if the samples draw random numbers.
    sketch: Sketch | None = None
    # The error of a collate function that made no batch of them; None: it made one.
    collate_error: str | None = None


def check_samples(
    dataset: MapDataset,
    indices: Sequence[int],
    *,
    split: str,
    collate_fn: Collate | None,
    random: KeyedRandom,
    seed: int,
) -> CheckedSamples:
    """Load samples twice under one key each, and make a batch of them twice.

    Changes neither the dataset nor generators. Raises RunError, as training does, if a sample can't be loaded. An error
    of the collate function is returned: it may refuse so few samples, and training will give it others.

    Args:
        random: the generators of dataset and collate function.
    """
    load = partial(_load, dataset, indices, split=split, collate_fn=collate_fn, random=random, seed=seed)
    try:
        with unchanged(dataset, collate_fn):
            first = random.load_seeded(load, searches_all=True)
            second = load()
    finally:
        random.find()

    for index, one, other in zip(indices, first.samples, second.samples, strict=True):
        path = differing_path(one, other)
        if path is not None:
            return CheckedSamples(_at(f"sample {index}", path))
    sketch = None
    if not first.draws:
        sketch = sketch_samples(first.samples)

    collate_error = first.collate_error or second.collate_error
    if collate_error is not None:
        return CheckedSamples(sketch=sketch, collate_error=collate_error)
    path = differing_path(first.batch, second.batch)
    if path is not None:
        return CheckedSamples(_at("the batch that its collate function makes", path))
    return CheckedSamples(sketch=sketch)


def _at(what: str, path: str) -> str:
    """Return what differs, with the path inside it if it has one."""
    if not path:
        return what
    return f"{what}, at {path},"


class _Loaded(NamedTuple):
    """Samples that were loaded once."""

    # The leaves of each sample.
    samples: list[list[Leaf]]
    # The samples draw random numbers.
    draws: bool
    # The leaves of the batch that the user's collate function has made; empty without one.
    batch: list[Leaf]
    collate_error: str | None = None


def _load(
    dataset: MapDataset,
    indices: Sequence[int],
    *,
    split: str,
    collate_fn: Collate | None,
    random: KeyedRandom,
    seed: int,
) -> _Loaded:
    samples: list[Any] = []
    leaves: list[list[Leaf]] = []
    draws = False
    with random.preserved():
        for index in indices:
            key = mix(seed, "check", index)
            random.seed(key)
            before = random.fingerprint()
            sample = random.load_seeded(partial(load_sample, dataset, index, split=split), key=key)
            draws = draws or random.fingerprint() != before
            samples.append(sample)
            # Before collating: a collate function may change samples in place.
            leaves.append(leaves_of(sample))

        if collate_fn is None:
            return _Loaded(leaves, draws, [])
        random.seed(mix(seed, "check", "collate"))
        try:
            batch = collate(samples, name=f"Samples {list(indices)} of the {split} dataset", collate_fn=collate_fn)
        except RunError as error:
            return _Loaded(leaves, draws, [], collate_error=str(error))
        return _Loaded(leaves, draws, leaves_of(batch))


def check_rows(samples: TensorSamples, indices: Sequence[int], *, seed: int, device: torch.device) -> CheckedSamples:
    """Transform samples twice with the same draws on `device`. The rows themselves are compared by `sketch_rows`."""
    if samples.transform is None:
        return CheckedSamples()
    states = generator_states([device])
    random = KeyedRandom(samples.transform)
    try:
        with unchanged(samples.transform), random.preserved():
            first = _transformed(samples, indices, seed=seed, device=device)
            second = _transformed(samples, indices, seed=seed, device=device)
    finally:
        restore_generator_states(states, devices=[device])
    if differing_path(first, second) is None:
        return CheckedSamples()
    return CheckedSamples(f"what its transform returns for samples {list(indices)}")


def _transformed(samples: TensorSamples, indices: Sequence[int], *, seed: int, device: torch.device) -> list[Leaf]:
    rows = samples.gather(torch.tensor(indices, device=samples.device))
    draws = Draws(partial(mix, seed, "check"), torch.arange(len(indices), device=device))
    return leaves_of(samples.transformed([tensor.to(device) for tensor in rows], draws))

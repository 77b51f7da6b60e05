"""Orders of the training samples, for `data.sampler` and `Datasets.sampler`; public as `framework.samplers`.

A sampler gives the global order of an epoch, of which every process takes its part: so what is drawn doesn't depend on
the number of processes, and a run that was killed resumes in the middle of an epoch. Its first argument is the train
dataset, which is filled in if YAML names the sampler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from framework.data.permutation import in_order, shuffled
from framework.data.tensor_samples import as_tensor_samples
from framework.errors import ConfigError
from framework.types import MapDataset, Order

_POOL = 50
"""Batches that LengthSampler sorts together."""
_MULTINOMIAL_MOST = 2**24
"""Categories that `torch.multinomial` takes."""
_DRAWN_AT_ONCE = 2**22


@final
class RandomSampler:
    """Every sample once, shuffled."""

    def __init__(self, dataset: MapDataset) -> None:
        self._size = len(dataset)

    def __len__(self) -> int:
        return self._size

    def order(self, generator: torch.Generator, *, batch_size: int) -> Order:
        return shuffled(self._size, generator)


@final
class SequentialSampler:
    """Every sample once, in the order of the dataset."""

    def __init__(self, dataset: MapDataset) -> None:
        self._size = len(dataset)

    def __len__(self) -> int:
        return self._size

    def order(self, generator: torch.Generator, *, batch_size: int) -> Order:
        return in_order(self._size)


@final
class WeightedRandomSampler:
    """Draw each sample with a probability proportional to its weight, as torch's sampler of that name.

    Args:
        weights: One for each sample; or the name of an attribute or column of the dataset that holds them.
        num_samples: Drawn in an epoch; null: the size of the dataset.
        replacement: False: no sample twice in an epoch.

    Raises ConfigError for another number of weights than samples, and for weights that can't be drawn from.
    """

    def __init__(
        self,
        dataset: MapDataset,
        weights: Sequence[float] | Tensor | str,
        num_samples: int | None = None,
        replacement: bool = True,
    ) -> None:
        size = len(dataset)
        if isinstance(weights, str):
            weights = column(dataset, weights, key="weights")
        self._weights = torch.as_tensor(weights, dtype=torch.float64)
        if self._weights.shape != (size,):
            given = str(len(self._weights))
            if self._weights.ndim != 1:
                given = f"of shape {tuple(self._weights.shape)}"
            raise ConfigError(f"WeightedRandomSampler: {given} weights for {size} samples. Give one for each sample.")
        is_valid = bool(torch.isfinite(self._weights).all()) and bool((self._weights >= 0).all())
        drawable = int((self._weights > 0).sum())
        if not is_valid or drawable == 0:
            raise ConfigError("WeightedRandomSampler: weights must be finite and not negative, and some above 0.")

        if num_samples is None:
            num_samples = size
        self._num_samples = num_samples
        self._replacement = replacement
        if self._num_samples < 1 or (not replacement and self._num_samples > drawable):
            most = ""
            if not replacement:
                most = f" and, without replacement, at most {drawable}, the weights above 0"
            raise ConfigError(f"WeightedRandomSampler: num_samples={self._num_samples} must be at least 1{most}.")

    def __len__(self) -> int:
        return self._num_samples

    def order(self, generator: torch.Generator, *, batch_size: int) -> Tensor:
        if len(self._weights) <= _MULTINOMIAL_MOST:
            return torch.multinomial(self._weights, self._num_samples, self._replacement, generator=generator)
        if self._replacement:
            return _drawn_with_replacement(self._weights, self._num_samples, generator)
        return _drawn_without_replacement(self._weights, self._num_samples, generator)


@final
class BalancedSampler:
    """Draw every class equally often, with replacement.

    Args:
        labels: The class of each sample, a number or a text; or the name of an attribute or column of the dataset that
            holds them, or the number of the tensor in a TensorDataset or TensorSamples.
        num_samples: Drawn in an epoch; null: the size of the dataset.
    """

    def __init__(
        self,
        dataset: MapDataset,
        labels: Sequence[int] | Sequence[str] | Tensor | str | int = "targets",
        num_samples: int | None = None,
    ) -> None:
        values: Any = labels
        if isinstance(labels, (str, int)):
            values = column(dataset, labels, key="labels")
        if not isinstance(values, Tensor) and any(isinstance(label, str) for label in values):
            distinct = dict.fromkeys(values)
            numbers = {label: number for number, label in enumerate(distinct)}
            values = [numbers[label] for label in values]
        classes = torch.as_tensor(values)
        if classes.shape != (len(dataset),):
            raise ConfigError(
                f"BalancedSampler: labels of shape {tuple(classes.shape)} for {len(dataset)} samples. Give each one."
            )
        _, inverse, counts = classes.unique(return_inverse=True, return_counts=True)
        self._drawn = WeightedRandomSampler(dataset, 1.0 / counts.double()[inverse], num_samples)

    def __len__(self) -> int:
        return len(self._drawn)

    def order(self, generator: torch.Generator, *, batch_size: int) -> Tensor:
        return self._drawn.order(generator, batch_size=batch_size)


@final
class LengthSampler:
    """Every sample once, in global batches of samples of similar length, so that little of a batch is padding.

    Samples are shuffled, sorted by length within pools of 50 global batches, and the batches are shuffled. The last,
    short one stays last.

    Args:
        lengths: Of each sample; or the name of an attribute or column of the dataset that holds them.
    """

    def __init__(self, dataset: MapDataset, lengths: Sequence[int] | Tensor | str = "lengths") -> None:
        if isinstance(lengths, str):
            lengths = column(dataset, lengths, key="lengths")
        self._lengths = torch.as_tensor(lengths)
        if self._lengths.shape != (len(dataset),):
            given = tuple(self._lengths.shape)
            raise ConfigError(f"LengthSampler: lengths of shape {given} for {len(dataset)} samples. Give one for each.")

    def __len__(self) -> int:
        return len(self._lengths)

    def order(self, generator: torch.Generator, *, batch_size: int) -> Tensor:
        shuffled = torch.randperm(len(self), generator=generator)
        in_whole_batches = len(self) // batch_size * batch_size
        batches: list[Tensor] = []
        for pool in shuffled[:in_whole_batches].split(_POOL * batch_size):
            by_length = pool[self._lengths[pool].argsort(stable=True)]
            batches += by_length.split(batch_size)

        batch_order = torch.randperm(len(batches), generator=generator).tolist()
        return torch.cat([*[batches[number] for number in batch_order], shuffled[in_whole_batches:]])


@final
class MixtureSampler:
    """Mix several datasets, given as a `torch.utils.data.ConcatDataset`, by weights.

    Each sample comes from one of them with a probability proportional to its weight. Within a dataset every sample is
    taken once, in random order, before any is taken again.

    Args:
        weights: One for each dataset.
        num_samples: Drawn in an epoch; null: the size of all datasets together.
    """

    def __init__(self, dataset: Any, weights: Sequence[float], num_samples: int | None = None) -> None:
        if not isinstance(dataset, ConcatDataset):
            kind = type(dataset).__name__
            raise ConfigError(f"MixtureSampler mixes the parts of a torch.utils.data.ConcatDataset, and got a {kind}.")
        self._sizes = [len(part) for part in dataset.datasets]  # type: ignore[arg-type]
        if len(weights) != len(self._sizes):
            raise ConfigError(
                f"MixtureSampler: {len(weights)} weights for {len(self._sizes)} datasets. Give one for each."
            )
        for number, (size, weight) in enumerate(zip(self._sizes, weights, strict=True)):
            if size == 0 and weight > 0:
                raise ConfigError(
                    f"MixtureSampler: dataset {number} has no samples to draw. Leave it out, or weight it 0."
                )
        if num_samples is None:
            num_samples = len(dataset)
        # Draws the number of a dataset for each sample.
        self._drawn = WeightedRandomSampler(self._sizes, weights, num_samples)

    def __len__(self) -> int:
        return len(self._drawn)

    def order(self, generator: torch.Generator, *, batch_size: int) -> Tensor:
        which = self._drawn.order(generator, batch_size=batch_size)
        order = torch.empty_like(which)
        begin = 0
        for number, size in enumerate(self._sizes):
            places = (which == number).nonzero().flatten()
            if len(places):
                num_rounds = math.ceil(len(places) / size)
                rounds = [torch.randperm(size, generator=generator) for _ in range(num_rounds)]
                order[places] = begin + torch.cat(rounds)[: len(places)]
            begin += size
        return order


def _drawn_with_replacement(weights: Tensor, num_samples: int, generator: torch.Generator) -> Tensor:
    """Return indices drawn by where uniform numbers fall among the cumulative weights: inverse transform sampling."""
    ends = weights.cumsum(0)
    total = ends[-1]
    # The last one with a weight: rounding may lead past it.
    last = int(weights.nonzero()[-1])
    order = torch.empty(num_samples, dtype=torch.int64)
    for drawn in order.split(_DRAWN_AT_ONCE):
        uniform = torch.rand(len(drawn), dtype=torch.float64, generator=generator)
        # With right=True, a sample of weight 0, whose end is that of the one before, is never found.
        torch.searchsorted(ends, uniform * total, right=True, out=drawn)
        drawn.clamp_(max=last)
    return order


def _drawn_without_replacement(weights: Tensor, num_samples: int, generator: torch.Generator) -> Tensor:
    """Return the samples whose exponential clocks ring first, at rates that are the weights.

    That is how `torch.multinomial` draws, too (Efraimidis and Spirakis, 2006).
    """
    times = torch.empty_like(weights).exponential_(generator=generator).div_(weights)
    return times.topk(num_samples, largest=False).indices


def column(dataset: Any, name: str | int, *, key: str) -> Any:
    """Return what a dataset holds of each sample under `name`: an attribute, a column, or a tensor by its number.

    Looks into Subsets. Raises ConfigError if there is no such thing.
    """
    if isinstance(dataset, Subset):
        values = column(dataset.dataset, name, key=key)
        indices = [int(index) for index in dataset.indices]
        if isinstance(values, Tensor):
            return values[torch.tensor(indices)]
        return [values[index] for index in indices]
    if isinstance(name, int):
        samples = as_tensor_samples(dataset)
        if samples is not None and -len(samples.tensors) <= name < len(samples.tensors):
            tensor = samples.tensors[name]
            if samples.rows is None:
                return tensor
            return tensor[samples.rows]
    if isinstance(name, str) and hasattr(dataset, name):
        return getattr(dataset, name)

    # A dataset of Hugging Face has columns.
    columns = list(getattr(dataset, "column_names", ()))
    if name in columns:
        return dataset[name][:]
    names = [text for text in getattr(dataset, "__dict__", {}) if not text.startswith("_")]
    names += columns
    has = ""
    if names:
        has = f"; it has {','.join(names)}"
    raise ConfigError(
        f"data.sampler.{key}={name}: {type(dataset).__name__} has no such attribute or column{has}. Give the values "
        "themselves, or another name."
    )

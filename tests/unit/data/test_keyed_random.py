"""What a dataset, its transforms and its collate function draw depends on seed, epoch and position alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from framework import TensorSamples
from tests.helpers.internals import KeyedRandom, LoaderOptions, MapLoader, plan_batches, reachable
from tests.helpers.loaders import micro_batches

CPU = torch.device("cpu")
SIZE = 12
# torch's DataLoader sets a handler for SIGCHLD when it first starts workers.
pytestmark = pytest.mark.usefixtures("own_state")
IN_PROCESS = LoaderOptions(num_workers=0)
ONE_WORKER = LoaderOptions(num_workers=1)
TWO_WORKERS = LoaderOptions(num_workers=2)


class Repeating:
    """A sampler that draws two samples again and again."""

    def __len__(self) -> int:
        return SIZE

    def order(self, generator: torch.Generator, *, batch_size: int) -> Tensor:
        return torch.arange(SIZE) % 2


def loader(
    dataset: Any,
    options: LoaderOptions,
    *,
    rank: int = 0,
    world_size: int = 1,
    batch_size: int = 4,
    seed: int = 5,
    **how: Any,
) -> MapLoader:
    plan = plan_batches(batch_size=batch_size, global_batch_size=None, world_size=world_size, accumulate=1)
    return MapLoader(dataset, split="train", plan=plan, rank=rank, device=CPU, options=options, seed=seed, **how)


def first_draws(batches: list[Any]) -> list[Any]:
    return [batch[0][0] for batch in batches]


def batches(loading: MapLoader, epoch: int = 1, start: int = 0) -> list[Any]:
    try:
        return [micro.batch for micro in micro_batches(loading, epoch, start)]
    finally:
        loading.close()


def numbers(dataset: Any, options: LoaderOptions, **how: Any) -> list[float]:
    """Return what each sample of the epoch drew, in the order of the epoch."""
    epoch = {name: how.pop(name) for name in ("epoch", "start") if name in how}
    return torch.cat([batch.flatten() for batch in batches(loader(dataset, options, **how), **epoch)]).tolist()


class Draws(Dataset[Tensor]):
    """Each sample is one number that `draw` returns."""

    def __init__(self, draw: Callable[[], float], size: int = SIZE) -> None:
        self.draw = draw
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(self.draw()), dtype=torch.float64)


# Repeated samples


def draw_once(_: list[Tensor], draws: Any) -> list[Tensor]:
    return [draws.uniform(1)]


BY_BATCH = TensorSamples(torch.zeros(SIZE, 1), transform=draw_once)


@pytest.mark.parametrize("batch_size", [4, 5, 400])
@pytest.mark.parametrize("options", [LoaderOptions(), ONE_WORKER], ids=["resident", "worker"])
def test_repeated_samples_are_transformed_differently(options: LoaderOptions, batch_size: int) -> None:
    def drawn(**how: Any) -> list[float]:
        start = how.pop("start", 0)
        own = loader(BY_BATCH, options, sampler=Repeating(), batch_size=batch_size, **how)
        return torch.cat([tensor.flatten() for (tensor,) in batches(own, start=start)]).tolist()

    wanted = drawn()
    assert len(set(wanted)) == SIZE
    if batch_size == 4:
        assert drawn(start=8) == wanted[8:]
        assert sorted(drawn(rank=0, world_size=2) + drawn(rank=1, world_size=2)) == sorted(wanted)


@pytest.mark.parametrize("options", [IN_PROCESS, TWO_WORKERS], ids=["in process", "workers"])
def test_each_repeat_of_a_sample_is_augmented_differently(options: LoaderOptions) -> None:
    dataset = Draws(random.random)
    wanted = numbers(dataset, options, sampler=Repeating())
    assert len(set(wanted)) == SIZE
    assert numbers(dataset, IN_PROCESS, sampler=Repeating()) == wanted


# Generators of the dataset's own

MODULE_WIDE = np.random.default_rng(0)


def of_the_module() -> float:
    return MODULE_WIDE.random()


def through_a_function() -> float:
    return of_the_module()


class OfTheClass:
    generator = random.Random(0)

    def draw(self) -> float:
        return self.generator.random()


class InSlots:
    __slots__ = ("generator",)

    def __init__(self) -> None:
        self.generator = np.random.RandomState(0)

    def draw(self) -> float:
        return self.generator.rand()


class Nested:
    """A transform that holds others, as torchvision's Compose does."""

    def __init__(self, *transforms: Callable[[], float]) -> None:
        self.transforms = list(transforms)

    def __call__(self) -> float:
        return sum(transform() for transform in self.transforms)


class MakesItLater:
    """Makes its generator when it is first called, as datasets do for workers."""

    generator: Any = None

    def __call__(self) -> float:
        if self.generator is None:
            self.generator = np.random.default_rng()
        return self.generator.random()


def of_torch(generator: torch.Generator) -> float:
    return torch.rand((), generator=generator, dtype=torch.float64).item()


def closure() -> Callable[[], float]:
    generator = random.Random(0)
    return lambda: generator.random()


KINDS: dict[str, Callable[[], Callable[[], float]]] = {
    "random.Random": lambda: random.Random(0).random,
    "numpy Generator": lambda: np.random.default_rng(0).random,
    "numpy Philox": lambda: np.random.Generator(np.random.Philox(0)).random,
    "numpy RandomState": lambda: np.random.RandomState(0).rand,
    "torch.Generator": lambda: partial(of_torch, torch.Generator()),
    "keyword": lambda: partial(of_torch, generator=torch.Generator()),
    "nested": lambda: Nested(partial(of_torch, torch.Generator()), random.Random(0).random),
    "closure": closure,
    "class": lambda: OfTheClass().draw,
    "slots": lambda: InSlots().draw,
    "module": lambda: through_a_function,
    "made later": MakesItLater,
    "NumPy's own": lambda: np.random.rand,
}


def wrapped(dataset: Any) -> Any:
    return ConcatDataset([Subset(dataset, range(6)), Subset(dataset, range(6, SIZE))])


@pytest.mark.parametrize("kind", KINDS)
def test_a_datasets_own_generators_are_seeded(kind: str) -> None:
    def drawn(options: LoaderOptions = IN_PROCESS, **how: Any) -> list[float]:
        return numbers(wrapped(Draws(KINDS[kind]())), options, **how)

    wanted = drawn()
    assert len(set(wanted)) == SIZE
    assert drawn(start=4) == wanted[4:]
    assert drawn(batch_size=6) == wanted
    assert not set(wanted) & set(drawn(epoch=2))
    assert not set(wanted) & set(drawn(seed=6))
    if kind in ("torch.Generator", "made later", "module"):
        assert drawn(TWO_WORKERS) == wanted


def test_two_generators_draw_different_numbers() -> None:
    class Both(Dataset[Tensor]):
        def __init__(self) -> None:
            self.generators = [random.Random(0), random.Random(0)]

        def __len__(self) -> int:
            return SIZE

        def __getitem__(self, index: int) -> Tensor:
            drawn = [own.random() for own in (*self.generators, random)]  # type: ignore[attr-defined]
            return torch.tensor(drawn)

    for batch in batches(loader(Both(), IN_PROCESS)):
        assert batch.unique().numel() == batch.numel()


def test_loading_leaves_generators_as_they_were() -> None:
    """The generators may be used elsewhere, for example by the task."""
    own = np.random.default_rng(3)
    wanted = np.random.default_rng(3).random(4).tolist()
    drawn = []
    for _ in loader(Draws(own.random), IN_PROCESS).epoch(0):
        drawn.append(own.random())
    assert drawn == wanted[: len(drawn)]


def test_a_generator_of_the_system_is_left_alone() -> None:
    found = KeyedRandom(Draws(random.SystemRandom().random))
    with found.preserved():
        found.seed(1)


def test_seeding_calls_no_property_and_skips_large_containers() -> None:
    class Odd:
        def __init__(self) -> None:
            self.many = [object() for _ in range(100_000)]
            self.itself = self

        @property
        def broken(self) -> Any:
            raise AssertionError("called")

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

    assert len(reachable(Odd())) < 5000


# Collate functions


def mixed(samples: Sequence[Tensor]) -> Tensor:
    """Draw once for the whole batch, from several generators."""
    drawn = torch.rand((), dtype=torch.float64) + random.random() + np.random.rand() + MODULE_WIDE.random()
    return torch.stack([drawn.expand(len(samples)), torch.stack(list(samples))])


class WithGenerator:
    """A collate function that keeps a generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __call__(self, samples: Sequence[Tensor]) -> Tensor:
        drawn = torch.rand((), generator=self.generator, dtype=torch.float64)
        return torch.stack([drawn.expand(len(samples)), torch.stack(list(samples))])


@pytest.mark.parametrize("make", [lambda: mixed, WithGenerator, lambda: WithGenerator().__call__])
def test_collate_draws_by_its_first_sample(make: Callable[[], Any]) -> None:
    before = torch.get_rng_state()

    def drawn(options: LoaderOptions = IN_PROCESS, *, epoch: int = 1, start: int = 0, **how: Any) -> list[Any]:
        own = LoaderOptions(options.kind, options.num_workers, collate_fn=make())
        return [batch.tolist() for batch in batches(loader(Draws(random.random), own, **how), epoch, start)]

    wanted = drawn()
    assert len({batch[0][0] for batch in wanted}) == 3
    assert drawn(ONE_WORKER) == wanted
    assert drawn(TWO_WORKERS) == wanted
    assert drawn(start=4) == wanted[1:]
    # Micro-batches of two ranks that begin where those of one rank do draw the same.
    ranks = [drawn(rank=rank, world_size=2, batch_size=2) for rank in range(2)]
    first, second = (first_draws(batches) for batches in ranks)
    assert first == first_draws(wanted)
    assert not set(first) & set(second)
    for other in (drawn(epoch=2), drawn(seed=6)):
        assert not set(first_draws(wanted)) & set(first_draws(other))
    assert torch.equal(torch.get_rng_state(), before)

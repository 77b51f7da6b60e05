"""Random transforms of batches: what is done to an image depends on (seed, epoch, index) alone, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, pad

from framework import transforms
from tests.helpers.internals import Draws

MASK = (1 << 64) - 1
KEYS = st.integers(0, 2**63 - 1)
SHAPES = st.tuples(st.integers(1, 3), st.integers(2, 9), st.integers(2, 9))
INDICES = st.lists(st.integers(0, 1000), min_size=1, max_size=6, unique=True)


def splitmix(state: int) -> tuple[int, int]:
    """The C code of https://prng.di.unimi.it/splitmix64.c in Python's integers."""
    state = (state + 0x9E3779B97F4A7C15) & MASK
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return state, z ^ (z >> 31)


assert splitmix(1234567)[1] == 6457827717110365317, "the first of the published numbers"


def reference(key: int, index: int, n: int) -> list[int]:
    """Number `index` of the generator seeded with `key` seeds the generator of the sample."""
    _, state = splitmix((key + index * 0x9E3779B97F4A7C15) & MASK)
    numbers = []
    for _ in range(n):
        state, number = splitmix(state)
        numbers.append(number)
    return numbers


def draws(indices: list[int], key: int = 17) -> Draws:
    return Draws(lambda: key, torch.tensor(indices))


@given(key=KEYS, indices=st.lists(st.integers(0, 2**40), min_size=1, max_size=5), low=st.integers(-(2**40), 2**40))
@pytest.mark.parametrize("size", [1, 5, 2**31])
def test_numbers_are_those_of_splitmix64(key, indices, low, size):
    drawn = draws(indices, key)
    uniform = torch.cat([drawn.uniform(1), drawn.uniform(2)], dim=1)
    assert uniform.dtype == torch.float32
    integers = draws(indices, key).integers(low, low + size, 4)
    for place, index in enumerate(indices):
        assert uniform[place].tolist() == [(number >> 40) / 2**24 for number in reference(key, index, 3)]
        expected = [low + (((number >> 32) * size) >> 32) for number in reference(key, index, 4)]
        assert integers[place].tolist() == expected


def test_normal_numbers_are_normal():
    numbers = draws(list(range(2000))).normal(100).double()
    wanted = torch.distributions.Normal(0.0, 1.0)
    for threshold in (-3.0, -1.0, 0.0, 0.5, 2.0, 4.0):
        share = wanted.cdf(torch.tensor(threshold, dtype=torch.float64))
        # Five standard deviations of a share of 200,000 independent numbers.
        allowed = 5 * (share * (1 - share) / numbers.numel()).sqrt()
        assert ((numbers <= threshold).double().mean() - share).abs() <= allowed
    # Neither a sample's numbers nor those of neighbours go together.
    assert numbers.T.corrcoef().fill_diagonal_(0).abs().max() < 5 / 2000**0.5
    assert numbers[:200].corrcoef().fill_diagonal_(0).abs().max() < 0.6
    # The largest radius.
    assert numbers.abs().max() <= (2 * 24 * math.log(2)) ** 0.5


@given(key=KEYS, indices=INDICES, n=st.integers(1, 20))
def test_normal_numbers_do_not_depend_on_the_batch(key, indices, n):
    alone = torch.cat([draws([index], key).normal(n) for index in indices])
    assert torch.equal(draws(indices, key).normal(n), alone)


@pytest.mark.parametrize(("low", "high"), [(3, 3), (3, 2), (0, 2**31 + 1)])
def test_an_impossible_range_is_refused(low, high):
    with pytest.raises(ValueError, match="high must be above low"):
        draws([1]).integers(low, high, 1)


def images(indices: list[int], shape: tuple[int, ...], *, is_bytes: bool) -> Tensor:
    """The image of an index is the same in every batch."""
    made = [torch.randint(256, shape, generator=torch.Generator().manual_seed(i), dtype=torch.uint8) for i in indices]
    batch = torch.stack(made)
    return batch if is_bytes else batch.float() / 3


def shifted(image_CHW: Tensor, own: Draws) -> Tensor:
    down, right = own.integers(0, 5, 2)[0].tolist()
    _, height, width = image_CHW.shape
    return pad(image_CHW, (2, 2, 2, 2))[:, down : down + height, right : right + width]


def flipped(image_CHW: Tensor, own: Draws) -> Tensor:
    return image_CHW.flip(-1) if own.uniform(1).item() < 0.4 else image_CHW


@pytest.mark.parametrize(
    ("transform", "of_one"),
    [(transforms.RandomShift(2), shifted), (transforms.RandomHorizontalFlip(0.4), flipped)],
    ids=["shift", "flip"],
)
@given(shape=SHAPES, indices=INDICES, is_bytes=st.booleans())
def test_batched_transforms_equal_a_loop(transform, of_one, shape, indices, is_bytes):
    batch = images(indices, shape, is_bytes=is_bytes)
    before = batch.clone()
    wanted = torch.stack([of_one(image, draws([i])) for i, image in zip(indices, batch, strict=True)])
    given = transform(batch, draws(indices))
    assert given.dtype == wanted.dtype
    assert torch.equal(given, wanted)
    assert torch.equal(batch, before)


@given(shape=SHAPES, indices=INDICES)
def test_an_affine_transform_is_that_of_affine_grid(shape, indices):
    """The two may differ by rounding in the last bits."""
    batch = images(indices, shape, is_bytes=False) / 85
    given = transforms.RandomAffine(30, translate=(0.2, 0.1), scale=(0.8, 1.3))(batch, draws(indices))
    _, height, width = shape
    for index, image, found in zip(indices, batch, given, strict=True):
        turn, right, down, growth = (2 * draws([index]).uniform(4)[0].double() - 1).tolist()
        angle = math.radians(30) * turn
        factor = 0.8 + 0.5 * (growth + 1) / 2
        cos = math.cos(angle) / factor
        sin = math.sin(angle) / factor
        x = 0.2 * right * width
        y = 0.1 * down * height
        # In pixels around the centre; `affine_grid` counts in halves of the image.
        matrix = [
            [cos, sin * height / width, (-cos * x - sin * y) * 2 / width],
            [-sin * width / height, cos, (sin * x - cos * y) * 2 / height],
        ]
        grid = affine_grid(torch.tensor([matrix]), [1, *shape], align_corners=False)
        torch.testing.assert_close(found, grid_sample(image[None], grid, align_corners=False)[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("is_bytes", [True, False])
def test_the_batch_size_changes_no_image(is_bytes):
    every: Any = transforms.Compose(
        [
            transforms.RandomAffine(15, translate=(0.1, 0.1), scale=(0.9, 1.1)),
            transforms.RandomShift(3),
            transforms.RandomHorizontalFlip(),
            transforms.Normalize(0.13, 0.3),
        ]
    )
    indices = list(range(33))
    batch = images(indices, (3, 28, 28), is_bytes=is_bytes)
    together = every(batch, draws(indices))
    for size in (1, 2, 7):
        parts = [every(batch[i : i + size], draws(indices[i : i + size])) for i in range(0, 33, size)]
        assert torch.equal(torch.cat(parts), together)
    assert not torch.equal(every(batch, draws(indices, key=18)), together)


def test_scaled_bytes_equal_single_images_exactly():
    batch = images([1, 2], (3, 28, 28), is_bytes=True)
    own = draws([1, 2])
    assert torch.equal(transforms.Scale()(batch, own), batch.float().div_(255))
    plain = batch.float().div_(255).sub_(0.1307).div_(0.3081)
    assert torch.equal(transforms.Normalize(0.1307, 0.3081)(batch, own), plain)
    floats = images([1, 2], (3, 5, 4), is_bytes=False)
    before = floats.clone()
    given = transforms.Normalize([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])(floats, own)
    for channel in range(3):
        assert torch.equal(given[:, channel], (before[:, channel] - (channel + 1)) / (channel + 4))
    assert torch.equal(floats, before)
    assert transforms.Scale()(floats, own) is floats
    for idle in (transforms.RandomAffine(), transforms.RandomShift(0), transforms.RandomHorizontalFlip(0.0)):
        assert torch.equal(idle(batch, own), batch)


def test_each_tensor_has_its_own_transform():
    batch = images([1, 2], (1, 4, 4), is_bytes=True)
    label = torch.tensor([3, 4])
    scaled, same = transforms.Each(transforms.Scale())([batch, label], draws([1, 2]))
    assert scaled.dtype == torch.float32
    assert same is label

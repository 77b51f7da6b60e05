from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, pad

from framework import transforms
from framework.data.draws import Draws
from framework.errors import ConfigError

SHAPES = st.tuples(st.integers(1, 3), st.integers(2, 9), st.integers(2, 9))
INDICES = st.lists(st.integers(0, 1000), min_size=1, max_size=6, unique=True)


def images(indices: list[int], shape: tuple[int, ...], *, is_bytes: bool) -> Tensor:
    """The image of an index is the same in every batch."""
    made = [torch.randint(256, shape, generator=torch.Generator().manual_seed(i), dtype=torch.uint8) for i in indices]
    batch = torch.stack(made)
    return batch if is_bytes else batch.float() / 3


def draws(indices: list[int]) -> Draws:
    return Draws(17, torch.tensor(indices))


def shifted(image_CHW: Tensor, own: Draws) -> Tensor:
    down, right = own.integers(0, 5, 2)[0].tolist()
    _, height, width = image_CHW.shape
    return pad(image_CHW, (2, 2, 2, 2))[:, down : down + height, right : right + width]


def flipped(image_CHW: Tensor, own: Draws) -> Tensor:
    return image_CHW.flip(-1) if own.uniform(1).item() < 0.4 else image_CHW


CASES = [(transforms.RandomShift(2), shifted), (transforms.RandomHorizontalFlip(0.4), flipped)]


@pytest.mark.parametrize("is_bytes", [True, False])
@pytest.mark.parametrize(("transform", "of_one"), CASES, ids=["shift", "flip"])
@settings(deadline=None)  # the first call may load much of torch
@given(shape=SHAPES, indices=INDICES)
def test_each_image_is_changed_as_a_loop_over_them_would(transform, of_one, is_bytes, shape, indices):
    batch = images(indices, shape, is_bytes=is_bytes)
    before = batch.clone()
    wanted = torch.stack([of_one(image, draws([i])) for i, image in zip(indices, batch, strict=True)])
    given = transform(batch, draws(indices))
    assert given.dtype == wanted.dtype
    assert torch.equal(given, wanted)
    assert torch.equal(batch, before)


@settings(deadline=None)  # the first call may load much of torch
@given(shape=SHAPES, indices=INDICES)
def test_an_affine_map_is_that_of_a_matrix(shape, indices):
    """Against torch's own `affine_grid`, whose rounding differs in the last bits."""
    batch = images(indices, shape, is_bytes=False) / 85
    given = transforms.RandomAffine(30, translate=(0.2, 0.1), scale=(0.8, 1.3))(batch, draws(indices))
    _, height, width = shape
    for index, image, found in zip(indices, batch, given, strict=True):
        turn, right, down, growth = (2 * draws([index]).uniform(4)[0].double() - 1).tolist()
        angle, factor = math.radians(30) * turn, 0.8 + 0.5 * (growth + 1) / 2
        cos, sin = math.cos(angle) / factor, math.sin(angle) / factor
        x, y = 0.2 * right * width, 0.1 * down * height
        # In pixels around the centre; `affine_grid` counts in halves of the image.
        matrix = [
            [cos, sin * height / width, (-cos * x - sin * y) * 2 / width],
            [-sin * width / height, cos, (sin * x - cos * y) * 2 / height],
        ]
        grid = affine_grid(torch.tensor([matrix]), [1, *shape], align_corners=False)
        wanted = grid_sample(image[None], grid, align_corners=False)[0]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("is_bytes", [True, False])
def test_what_is_drawn_for_an_image_does_not_depend_on_its_batch(is_bytes):
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
    assert together.dtype == torch.float32
    for size in (1, 2, 7):
        parts = [every(batch[i : i + size], draws(indices[i : i + size])) for i in range(0, 33, size)]
        assert torch.equal(torch.cat(parts), together)


def test_nothing_drawn_is_nothing_moved():
    batch = images([1, 2], (1, 6, 4), is_bytes=True)
    assert torch.equal(transforms.RandomAffine()(batch, draws([1, 2])), batch)
    assert torch.equal(transforms.RandomShift(0)(batch, draws([1, 2])), batch)
    assert torch.equal(transforms.RandomHorizontalFlip(0.0)(batch, draws([1, 2])), batch)


def test_bytes_are_scaled_and_normalised_in_the_order_of_a_plain_loop():
    batch = images([1, 2, 3], (1, 28, 28), is_bytes=True)
    assert torch.equal(transforms.Scale()(batch, draws([1, 2, 3])), batch.float().div_(255))
    plain = batch.float().div_(255).sub_(0.1307).div_(0.3081)
    assert torch.equal(transforms.Normalize(0.1307, 0.3081)(batch, draws([1, 2, 3])), plain)


def test_channels_have_their_own_mean_and_floats_are_not_scaled():
    batch = images([1, 2], (3, 5, 4), is_bytes=False)
    before = batch.clone()
    given = transforms.Normalize([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])(batch, draws([1, 2]))
    for channel in range(3):
        assert torch.equal(given[:, channel], (before[:, channel] - (channel + 1)) / (channel + 4))
    assert torch.equal(batch, before)
    assert transforms.Scale()(batch, draws([1, 2])) is batch


def test_each_tensor_has_its_own_transform():
    batch, label = images([1, 2], (1, 4, 4), is_bytes=True), torch.tensor([3, 4])
    scaled, same = transforms.Each(transforms.Scale())([batch, label], draws([1, 2]))
    assert scaled.dtype == torch.float32
    assert same is label
    with pytest.raises(ConfigError, match="2 transforms for samples of 1 tensors"):
        transforms.Each(None, None)([batch], draws([1, 2]))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: transforms.RandomShift(-1), "pixels=-1 must be 0 or more"),
        (lambda: transforms.RandomHorizontalFlip(1.5), "p=1.5 must be from 0 to 1"),
        (lambda: transforms.RandomAffine(scale=(1.2, 0.8)), "two numbers above 0, in order"),
        (lambda: transforms.Normalize(0.0, [1.0, 0.0]), "would divide by 0"),
    ],
)
def test_what_cannot_be_is_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()

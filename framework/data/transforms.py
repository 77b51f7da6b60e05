"""Transforms of batches of images on their device, each image by itself: `framework.transforms`.

Each takes images of shape (B, C, H, W), bytes or floats, and the batch's `draws`, and returns as many images. What a
random one does to an image depends on (seed, epoch, position of the sample in the epoch's order) alone:
`torchvision.transforms.v2` called with a batch draws once for all of it. Only `Scale` and `Normalize` turn bytes into
floats, so put these last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import zip_longest
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import grid_sample, pad

from framework.data.draws import Draws

ImageTransform = Callable[[Tensor, Draws], Tensor]

LARGEST_BYTE = 255.0


@final
class Each:
    """One transform for each tensor of a sample, in order; null leaves a tensor as it is."""

    def __init__(self, *transforms: ImageTransform | None) -> None:
        self._transforms = transforms

    def changes(self, position: int) -> bool:
        """Return True if the tensor at this position of a sample has a transform."""
        return position < len(self._transforms) and self._transforms[position] is not None

    def __call__(self, batch: Sequence[Tensor], draws: Draws) -> list[Tensor]:
        transformed = []
        for tensor, transform in zip_longest(batch, self._transforms):
            if transform is not None:
                tensor = transform(tensor, draws)
            transformed.append(tensor)
        return transformed


@final
class Compose:
    """Applies transforms one after another."""

    def __init__(self, transforms: Sequence[ImageTransform]) -> None:
        self._transforms = list(transforms)

    def __call__(self, image_BCHW: Tensor, draws: Draws) -> Tensor:
        for transform in self._transforms:
            image_BCHW = transform(image_BCHW, draws)
        return image_BCHW


@final
class Scale:
    """Scales bytes to float32 from 0 to 1; floats stay as they are."""

    def __call__(self, image_BCHW: Tensor, draws: Draws) -> Tensor:
        return _scaled(image_BCHW)


@final
class Normalize:
    """(image − mean) / std in float32, of bytes scaled to 0 to 1; mean, std: one number, or one for each channel."""

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        self._mean = _numbers(mean)
        self._std = _numbers(std)

    def __call__(self, image_BCHW: Tensor, draws: Draws) -> Tensor:
        scaled = _scaled(image_BCHW)
        mean = _constant(self._mean, scaled.device)
        std = _constant(self._std, scaled.device)
        # Floats are the dataset's own, and may not be changed in place.
        if scaled is image_BCHW:
            return scaled.sub(mean).div_(std)
        return scaled.sub_(mean).div_(std)


@final
class RandomShift:
    """Moves each image by up to `pixels` each way and fills with 0: a random crop after padding."""

    def __init__(self, pixels: int) -> None:
        self._pixels = pixels

    def __call__(self, image_BCHW: Tensor, draws: Draws) -> Tensor:
        first_B2 = draws.integers(0, 2 * self._pixels + 1, 2)
        _, channels, height, width = image_BCHW.shape
        padded = pad(image_BCHW, (self._pixels,) * 4)
        row_BH = first_B2[:, :1] + torch.arange(height, device=image_BCHW.device)
        column_BW = first_B2[:, 1:] + torch.arange(width, device=image_BCHW.device)
        rows = padded.gather(2, row_BH[:, None, :, None].expand(-1, channels, -1, padded.shape[3]))
        return rows.gather(3, column_BW[:, None, None, :].expand(-1, channels, height, -1))


@final
class RandomHorizontalFlip:
    """Mirrors each image with probability `p`."""

    def __init__(self, p: float = 0.5) -> None:
        self._p = p

    def __call__(self, image_BCHW: Tensor, draws: Draws) -> Tensor:
        is_flipped_B1 = draws.uniform(1) < self._p
        return torch.where(is_flipped_B1[:, :, None, None], image_BCHW.flip(-1), image_BCHW)


@final
class RandomAffine:
    """Rotates, moves and scales each image around its centre, bilinear, and fills with 0. Bytes stay bytes, rounded.

    Args:
        degrees: Largest rotation each way.
        translate: Largest shift each way, as shares of width and height.
        scale: Smallest and largest factor; null: no scaling.
    """

    def __init__(
        self,
        degrees: float = 0.0,
        translate: tuple[float, float] = (0.0, 0.0),
        scale: tuple[float, float] | None = None,
    ) -> None:
        self._radians = math.radians(degrees)
        self._translate = (float(translate[0]), float(translate[1]))
        self._scale = (1.0, 1.0)
        if scale is not None:
            self._scale = (float(scale[0]), float(scale[1]))

    def __call__(self, image_BCHW: Tensor, draws: Draws) -> Tensor:
        drawn_B4 = draws.uniform(4)
        is_float = image_BCHW.is_floating_point()
        images = image_BCHW if is_float else image_BCHW.to(torch.float32)
        grid = self._grid(drawn_B4, height=images.shape[2], width=images.shape[3]).to(images.dtype)
        moved = grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        return moved if is_float else moved.round_().to(image_BCHW.dtype)

    def _grid(self, drawn_B4: Tensor, *, height: int, width: int) -> Tensor:
        """Return where each pixel comes from, as `grid_sample` wants it: (B, H, W, 2), x first, edges at −1 and 1.

        One operation after another instead of `affine_grid`, whose matrix product may round differently in a batch of
        another size. Angles in double precision for the same reason: sines of single floats differ in the last bit.
        """
        # MPS has no double precision.
        precision = torch.float32 if drawn_B4.device.type == "mps" else torch.float64
        signed_B4 = drawn_B4.to(precision) * 2 - 1
        angle_B = signed_B4[:, 0] * self._radians
        low, high = self._scale
        factor_B = low + (high - low) * (signed_B4[:, 3] + 1) / 2
        cos = _per_pixel(angle_B.cos() / factor_B)
        sin = _per_pixel(angle_B.sin() / factor_B)
        right = _per_pixel(signed_B4[:, 1] * self._translate[0] * width)
        down = _per_pixel(signed_B4[:, 2] * self._translate[1] * height)

        y = torch.arange(height, device=drawn_B4.device, dtype=torch.float32)[:, None] - (height - 1) / 2 - down
        x = torch.arange(width, device=drawn_B4.device, dtype=torch.float32) - (width - 1) / 2 - right
        return torch.stack(((cos * x + sin * y) * (2 / width), (cos * y - sin * x) * (2 / height)), dim=-1)


def _per_pixel(value_B: Tensor) -> Tensor:
    """Return the value of each image in float32, to compute with (B, H, W)."""
    return value_B.to(torch.float32)[:, None, None]


def _scaled(image_BCHW: Tensor) -> Tensor:
    if image_BCHW.is_floating_point():
        return image_BCHW
    # By a tensor: a GPU multiplies with the reciprocal of a plain number, which rounds differently from the CPU.
    return image_BCHW.to(torch.float32).div_(_constant((LARGEST_BYTE,), image_BCHW.device))


def _numbers(value: float | Sequence[float]) -> tuple[float, ...]:
    values = (value,) if isinstance(value, (int, float)) else value
    return tuple(map(float, values))


@cache
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return shape (C, 1, 1), or () for one value; cached, as a copy to the device costs more than the operation."""
    constant = torch.tensor(values, dtype=torch.float32, device=device)
    return constant[:, None, None] if len(values) > 1 else constant[0]

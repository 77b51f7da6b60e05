"""A picture of the samples of a micro-batch, if they are images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from framework.loggers.encoding import with_png

# A larger micro-batch shows its first samples.
_MOST = 256
_COLUMNS = 16


def save_picture(batch: Any, file: Path, *, captions: Sequence[str]) -> bool:
    """Write a picture of the images that a batch begins with; return False if it begins with something else.

    Each is shown from its smallest to its largest value, since images are normalized in ways that differ.
    """
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    if not tensors:
        return False
    images = tensors[0][:_MOST]
    is_image = images.ndim == 4 and images.shape[1] in (1, 3) and min(images.shape[2:]) > 1
    if not is_image or images.is_complex():
        return False

    # It takes Pillow, which takes a tenth of a second to import.
    from framework.tasks.pictures import grid_picture

    tiles = [_pixels(image).numpy() for image in images.detach().cpu().float()]
    picture = grid_picture(tiles, list(captions[: len(tiles)]), columns=_COLUMNS)
    file.parent.mkdir(parents=True, exist_ok=True)
    with_png(picture, file.write_bytes)
    return True


def _pixels(image: Tensor) -> Tensor:
    """Return uint8 pixels; NaN is black and infinite values are the darkest and the brightest."""
    finite = image[image.isfinite()]
    low = float(finite.min()) if len(finite) else 0.0
    high = float(finite.max()) if len(finite) else 1.0
    shown = image.nan_to_num(nan=low, posinf=high, neginf=low)
    return ((shown - low) / max(high - low, 1e-12) * 255).to(torch.uint8)

"""Images of an evaluation, drawn with Pillow, a dependency of torchvision. They need no matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image as Pillow
from PIL import ImageDraw

from framework.media import Image

_MARGIN = 36  # pixels at the left and the top or bottom, for labels
_SIDE = 400  # pixels of a chart
_LARGEST_NUMBERED = 20  # classes; with more, cells have no room for numbers
_TILE = 96  # pixels of the shorter side of a tile, at least
_LINE = 12  # pixels of a line of text


def confusion_picture(counts: Sequence[Sequence[int]]) -> Image:
    """Draw a confusion matrix, target classes by predicted classes. Cells are shaded by their share of the row."""
    number = len(counts)
    cell = 32 if number <= _LARGEST_NUMBERED else max(640 // number, 4)
    picture = Pillow.new("RGB", (_MARGIN + number * cell + 1,) * 2, "white")
    draw = ImageDraw.Draw(picture)
    every = math.ceil(_LINE / cell)
    for row, of_target in enumerate(counts):
        top, total = _MARGIN + row * cell, max(sum(of_target), 1)
        if row % every == 0:
            draw.text((_MARGIN - 6, top + cell / 2), str(row), fill="black", anchor="rm")
            draw.text((top + cell / 2, _MARGIN - 6), str(row), fill="black", anchor="mb")
        for column, count in enumerate(of_target):
            left, share = _MARGIN + column * cell, count / total
            shade = tuple(round(255 - share * (255 - dark)) for dark in (8, 48, 107))
            draw.rectangle((left, top, left + cell, top + cell), fill=shade, outline=(224, 224, 224))
            if number <= _LARGEST_NUMBERED and count:
                ink = "white" if share > 0.5 else "black"
                draw.text((left + cell / 2, top + cell / 2), str(count), fill=ink, anchor="mm")
    draw.text((2, 2), "target \\ predicted", fill="black")
    return _image(picture)


def scatter_picture(true: Sequence[float], predicted: Sequence[float]) -> Image:
    """Draw predicted (y) against true (x) values on one scale, with the line where they are equal."""
    pairs = [pair for pair in zip(true, predicted, strict=True) if all(map(math.isfinite, pair))]
    low = min((min(pair) for pair in pairs), default=0.0)
    high = max((max(pair) for pair in pairs), default=1.0)
    scale = (_SIDE - 1) / ((high - low) or 1.0)
    picture = Pillow.new("RGB", (_SIDE + 2 * _MARGIN,) * 2, "white")
    draw = ImageDraw.Draw(picture)
    end = _MARGIN + _SIDE
    draw.rectangle((_MARGIN, _MARGIN, end, end), outline="black")
    draw.line((_MARGIN, end, end, _MARGIN), fill=(160, 160, 160))
    for x, y in pairs:
        at_x, at_y = _MARGIN + (x - low) * scale, end - (y - low) * scale
        draw.ellipse((at_x - 2, at_y - 2, at_x + 2, at_y + 2), fill=(31, 119, 180))
    draw.text((_MARGIN, end + 6), f"{low:.4g}", fill="black")
    draw.text((end, end + 6), f"{high:.4g}", fill="black", anchor="ra")
    draw.text((_MARGIN + _SIDE / 2, end + 6), "true", fill="black", anchor="ma")
    draw.text((_MARGIN, _MARGIN - 6), "predicted", fill="black", anchor="lb")
    return _image(picture)


def grid_picture(images: Sequence[Any], captions: Sequence[str], *, columns: int = 4) -> Image:
    """Draw images of one size as tiles, each above its caption.

    images: arrays of shape (C, H, W), C 1 or 3, uint8; small ones are enlarged.
    """
    _, height, width = images[0].shape
    factor = max(math.ceil(_TILE / min(height, width)), 1)
    height, width = height * factor, width * factor
    lines = max(caption.count("\n") + 1 for caption in captions)
    below = lines * _LINE + 8
    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    picture = Pillow.new("RGB", (columns * (width + 8), rows * (height + below)), "white")
    draw = ImageDraw.Draw(picture)
    for number, (pixels, caption) in enumerate(zip(images, captions, strict=True)):
        left, top = number % columns * (width + 8) + 4, number // columns * (height + below) + 2
        tile = Pillow.fromarray(
            np.ascontiguousarray(np.broadcast_to(pixels, (3, *pixels.shape[1:])).transpose(1, 2, 0))
        )
        picture.paste(tile.resize((width, height), Pillow.Resampling.NEAREST), (left, top))
        draw.multiline_text((left, top + height + 2), caption, fill="black", spacing=0)
    return _image(picture)


def _image(picture: Pillow.Image) -> Image:
    return Image(np.asarray(picture).transpose(2, 0, 1))

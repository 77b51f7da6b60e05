"""Images of an evaluation, drawn with Pillow, a dependency of torchvision. They need no matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image as Pillow
from PIL import ImageDraw

from framework.media import Image

# Pixels at the left and the top or bottom, for labels.
_MARGIN = 36
# Pixels of a chart's side.
_SIDE = 400
# Of a confusion matrix: with more classes, cells have no room for numbers.
_LARGEST_NUMBERED = 20
_NUMBERED_CELL = 32
# Pixels of the side of a larger matrix, about.
_MATRIX_SIDE = 640
# Pixels of the shorter side of a tile, at least.
_TILE = 96
# Pixels between tiles.
_GAP = 8
# Pixels of a line of text.
_LINE = 12

_WHITE = (255, 255, 255)
_DARK_BLUE = (8, 48, 107)
_BLUE = (31, 119, 180)
_GREY = (160, 160, 160)
_LIGHT_GREY = (224, 224, 224)


def confusion_picture(counts: Sequence[Sequence[int]]) -> Image:
    """Draw a confusion matrix, target classes by predicted classes. Cells are shaded by their share of the row."""
    classes = len(counts)
    has_numbers = classes <= _LARGEST_NUMBERED
    cell = _NUMBERED_CELL if has_numbers else max(_MATRIX_SIDE // classes, 4)
    side = _MARGIN + classes * cell + 1
    picture = Pillow.new("RGB", (side, side), "white")
    draw = ImageDraw.Draw(picture)

    # Of small cells, only some have room for a label.
    labeled_every = math.ceil(_LINE / cell)
    for row, row_counts in enumerate(counts):
        top = _MARGIN + row * cell
        if row % labeled_every == 0:
            draw.text((_MARGIN - 6, top + cell / 2), str(row), fill="black", anchor="rm")
            draw.text((top + cell / 2, _MARGIN - 6), str(row), fill="black", anchor="mb")

        total = max(sum(row_counts), 1)
        for column, count in enumerate(row_counts):
            left = _MARGIN + column * cell
            share = count / total
            draw.rectangle((left, top, left + cell, top + cell), fill=_shade(share), outline=_LIGHT_GREY)
            if has_numbers and count:
                ink = "white" if share > 0.5 else "black"
                draw.text((left + cell / 2, top + cell / 2), str(count), fill=ink, anchor="mm")
    draw.text((2, 2), "target \\ predicted", fill="black")
    return _image(picture)


def _shade(share: float) -> tuple[int, ...]:
    """Return a color between white (0) and dark blue (1)."""
    return tuple(round(white - share * (white - dark)) for white, dark in zip(_WHITE, _DARK_BLUE, strict=True))


def scatter_picture(true: Sequence[float], predicted: Sequence[float]) -> Image:
    """Draw predicted (y) against true (x) values on one scale, with the line where they are equal."""
    points = [(x, y) for x, y in zip(true, predicted, strict=True) if math.isfinite(x) and math.isfinite(y)]
    low = min(map(min, points), default=0.0)
    high = max(map(max, points), default=1.0)
    pixels_per_unit = (_SIDE - 1) / ((high - low) or 1.0)

    side = _SIDE + 2 * _MARGIN
    end = _MARGIN + _SIDE
    picture = Pillow.new("RGB", (side, side), "white")
    draw = ImageDraw.Draw(picture)
    draw.rectangle((_MARGIN, _MARGIN, end, end), outline="black")
    draw.line((_MARGIN, end, end, _MARGIN), fill=_GREY)
    for x, y in points:
        left = _MARGIN + (x - low) * pixels_per_unit
        top = end - (y - low) * pixels_per_unit
        draw.ellipse((left - 2, top - 2, left + 2, top + 2), fill=_BLUE)

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
    tile_width = width * factor
    tile_height = height * factor
    caption_lines = max(caption.count("\n") + 1 for caption in captions)
    row_height = tile_height + caption_lines * _LINE + _GAP
    column_width = tile_width + _GAP

    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    picture = Pillow.new("RGB", (columns * column_width, rows * row_height), "white")
    draw = ImageDraw.Draw(picture)
    for number, (pixels_CHW, caption) in enumerate(zip(images, captions, strict=True)):
        row, column = divmod(number, columns)
        left = column * column_width + _GAP // 2
        top = row * row_height + 2
        # Grey images get three equal channels.
        pixels_HWC = np.broadcast_to(pixels_CHW, (3, height, width)).transpose(1, 2, 0)
        tile = Pillow.fromarray(np.ascontiguousarray(pixels_HWC))
        picture.paste(tile.resize((tile_width, tile_height), Pillow.Resampling.NEAREST), (left, top))
        draw.multiline_text((left, top + tile_height + 2), caption, fill="black", spacing=0)
    return _image(picture)


def _image(picture: Pillow.Image) -> Image:
    return Image(np.asarray(picture).transpose(2, 0, 1))

"""The one way from values to loggers, and what loggers convert media to: pixels, pictures, counts."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Collection, Mapping
from numbers import Real
from typing import Any, final

import numpy as np
import numpy.typing as npt

from framework.errors import TargetError
from framework.media import Figure, Image, Media, is_media
from framework.types import Logger

_BINS = 64
# File systems allow 255 for a file's name; the rest is for a step, a number and a suffix.
_MAX_STEM_BYTES = 180
_DIGEST_CHARS = 8
# `Real` alone would do, but checking an abstract class takes half a microsecond, and each log makes 50 such checks.
_NUMBERS = (float, int, Real)


@final
class DrawnFigure(Figure):
    """A figure of a run's log with its picture, which is drawn when a logger first asks for the pixels."""

    picture: Image

    def __init__(self, figure: Any, picture: Image) -> None:
        vars(self).update(figure=figure, picture=picture)


def log_to_loggers(loggers: Collection[Logger], values: Mapping[str, Any], *, step: int, epoch: int) -> None:
    """Give numbers and media to all loggers, and close the figures among them; without loggers, too.

    Raises TargetError for a value that is neither a number nor Media.
    """
    for name, value in values.items():
        if not isinstance(value, _NUMBERS) and not is_media(value):
            raise TargetError(
                f"{name} is logged as {value!r}. Log a number, a pair (sum, count), or a framework.Image (or a list of "
                "them), Figure, Histogram, Table, Text or Artifact."
            )
    for logger in loggers:
        logger.log(values, step=step, epoch=epoch)

    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        for value in values.values():
            if isinstance(value, Figure):
                # Otherwise pyplot keeps it in memory.
                pyplot.close(value.figure)


def split(values: Mapping[str, float | Media]) -> tuple[dict[str, float], dict[str, Media]]:
    """Return the numbers and the media among the values that `Logger.log` gets."""
    numbers: dict[str, float] = {}
    media: dict[str, Media] = {}
    named: Mapping[str, Any] = values
    for name, value in named.items():
        if isinstance(value, _NUMBERS):
            numbers[name] = value  # type: ignore[assignment]
        else:
            media[name] = value
    return numbers, media


def images_of(value: Media) -> list[Image]:
    """Return the images of an Image, a list of them or a Figure; none of other media."""
    if isinstance(value, Image):
        return [value]
    if isinstance(value, DrawnFigure):
        return [value.picture]
    if isinstance(value, Figure):
        return [image_of(value.figure)]
    if isinstance(value, (list, tuple)):
        return list(value)
    return []


def pixels_of(image: Image) -> npt.NDArray[np.uint8]:
    """Return a copy on the CPU, of shape (H, W, C). Waits for the device."""
    pixels = array_of(image.pixels)
    if pixels.ndim == 2:
        pixels = pixels[None]
    if pixels.dtype.kind == "f":
        pixels = np.clip(np.nan_to_num(pixels), 0, 1) * 255 + 0.5
    elif pixels.dtype.kind == "b":
        pixels = pixels * 255
    return np.ascontiguousarray(np.clip(pixels, 0, 255).astype(np.uint8).transpose(1, 2, 0))


def picture_from(pixels_HWC: npt.NDArray[np.uint8]) -> Any:
    """Return a PIL.Image.Image."""
    from PIL import Image as Pillow

    if pixels_HWC.shape[2] == 1:
        return Pillow.fromarray(pixels_HWC[:, :, 0])
    return Pillow.fromarray(pixels_HWC)


def image_of(figure: Any) -> Image:
    """Return a matplotlib figure as an image; needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return Image(np.asarray(canvas.buffer_rgba())[:, :, :3].transpose(2, 0, 1).copy())


def array_of(values: Any) -> npt.NDArray[Any]:
    """Return a tensor or array as an array on the CPU; half-precision floats as float32."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        if values.is_floating_point() and values.itemsize < 4:
            values = values.float()
        values = values.numpy()
    return np.asarray(values)


def finite_values(values: Any) -> npt.NDArray[np.float64]:
    """Return the finite numbers of a tensor or array, in one dimension; of complex numbers their magnitudes."""
    array = array_of(values)
    if array.dtype.kind == "c":
        array = np.abs(array)
    flat = array.astype(np.float64).reshape(-1)
    finite: npt.NDArray[np.float64] = flat[np.isfinite(flat)]
    return finite


def counts_of(values: Any) -> tuple[list[int], list[float]]:
    """Return the counts in `_BINS` bins of equal width, and their edges. Values that aren't finite are left out."""
    finite = finite_values(values)
    try:
        with np.errstate(all="ignore"):
            counts, edges = np.histogram(finite, bins=_BINS)
    except ValueError:
        # They are so large that their difference is infinite, or so close that no number lies between them.
        scale = np.abs(finite).max()
        scaled = finite / scale
        counts, edges = np.histogram(scaled, bins=_BINS, range=(scaled.min() - 0.5, scaled.max() + 0.5))
        largest = np.finfo(np.float64).max / scale
        edges = np.clip(edges, -largest, largest) * scale
    return counts.tolist(), edges.tolist()


def file_stem(name: str) -> str:
    """Return the part of a file name that stands for the name of a medium: `/` is `__`, and it is never too long."""
    stem = re.sub(r"[\x00-\x1f\ud800-\udfff]", "_", name.replace("/", "__"))
    return shortened(stem, max_bytes=_MAX_STEM_BYTES)


def shortened(name: str, *, max_bytes: int) -> str:
    """Return a name that differs from those of other long names, though it has only so many bytes."""
    encoded = name.encode()
    if len(encoded) <= max_bytes:
        return name
    digest = hashlib.sha256(encoded).hexdigest()[:_DIGEST_CHARS]
    return f"{encoded[: max_bytes - 1 - _DIGEST_CHARS].decode(errors='ignore')}~{digest}"

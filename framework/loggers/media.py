"""Media for loggers: dispatch by kind, and conversion to pixels, counts and Markdown."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from framework.errors import TargetError
from framework.media import Artifact, Figure, Histogram, Image, Media, Table, Text
from framework.types import Logger, hooks

_BINS = 64


def log_media(loggers: Iterable[Logger], media: Mapping[str, Any], *, step: int) -> None:
    """Pass each value to the loggers that have a method for it. Raises TargetError for a value that isn't Media."""
    for tag, value in media.items():
        if not is_media(value):
            raise TargetError(
                f"{tag} is reported as {value!r}. Report a number, a pair (sum, count), or a framework.Image (or a "
                "list of them), Figure, Histogram, Table, Text or Artifact."
            )
        for logger in loggers:
            _log(logger, tag, value, step=step)
        if isinstance(value, Figure) and (pyplot := sys.modules.get("matplotlib.pyplot")):
            pyplot.close(value.figure)  # else pyplot keeps it


def is_media(value: Any) -> bool:
    is_list = isinstance(value, (list, tuple)) and len(value) > 0 and all(isinstance(each, Image) for each in value)
    return is_list or isinstance(value, (Image, Figure, Histogram, Table, Text, Artifact))


def _log(logger: Logger, tag: str, value: Media, *, step: int) -> None:
    """Call the logger's method for this kind of value, if it has one."""
    if isinstance(value, Text):
        logger.text(tag, value.text, step=step)
        return
    given: Any
    if isinstance(value, Figure):
        kind, given = "figure", value.figure
        if not hooks([logger], kind) and hooks([logger], "images"):
            kind, given = "images", [image_of(value.figure)]
    elif isinstance(value, Histogram):
        kind, given = "histogram", value.values
    elif isinstance(value, Table):
        kind, given = "table", value
    elif isinstance(value, Artifact):
        kind, given = "artifact", Path(value.path).absolute()
    else:
        kind, given = "images", [value] if isinstance(value, Image) else list(value)
    for log in hooks([logger], kind):
        log(tag, given, step=step)


def pixels_of(image: Image) -> npt.NDArray[np.uint8]:
    """Return a copy on the CPU, of shape (H, W, C). Waits for the device."""
    pixels = array_of(image.pixels)
    pixels = pixels[None] if pixels.ndim == 2 else pixels
    if pixels.dtype.kind == "f":
        pixels = np.clip(np.nan_to_num(pixels), 0, 1) * 255 + 0.5
    elif pixels.dtype.kind == "b":
        pixels = pixels * 255
    return np.ascontiguousarray(np.clip(pixels, 0, 255).astype(np.uint8).transpose(1, 2, 0))


def picture_of(image: Image) -> Any:
    """Return a PIL.Image.Image."""
    from PIL import Image as Pillow

    pixels = pixels_of(image)
    return Pillow.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


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
        values = values.float() if values.is_floating_point() and values.itemsize < 4 else values
        values = values.numpy()
    return np.asarray(values)


def counts_of(values: Any) -> tuple[list[int], list[float]]:
    """Return the counts in `_BINS` bins of equal width, and their edges. Values that aren't finite are left out."""
    flat = array_of(values).astype(np.float64).reshape(-1)
    counts, edges = np.histogram(flat[np.isfinite(flat)], bins=_BINS)
    return counts.tolist(), edges.tolist()


def markdown(table: Table) -> str:
    return "\n".join(
        f"| {' | '.join(_cell(value) for value in row)} |"
        for row in (table.columns, ["---"] * len(table.columns), *table.rows)
    )


def _cell(value: str | float | None) -> str:
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")

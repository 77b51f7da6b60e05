"""What can be logged beside numbers. Imports no torch at run time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from framework.errors import DataError


@dataclass(frozen=True, eq=False)
class Image:
    """An image to log. A list of them is logged under one name. Raises DataError for pixels of another shape."""

    # A tensor or array of shape (H, W) or (C, H, W), C 1 (grey), 3 (RGB) or 4 (RGBA), on any device: integers from 0 to
    # 255, or floats from 0 to 1; other values are clipped.
    pixels: Any
    caption: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "caption", str(self.caption))

        shape = tuple(getattr(self.pixels, "shape", ()))
        has_channels = len(shape) == 3 and shape[0] in (1, 3, 4)
        if 0 not in shape and (len(shape) == 2 or has_channels):
            return

        given = f"pixels that are a {type(self.pixels).__name__}"
        if shape:
            given = f"pixels of shape {shape}"
        hint = ""
        if len(shape) == 3 and shape[2] in (1, 3, 4):
            hint = " Put the channels first: permute(2, 0, 1)."
        elif len(shape) == 4:
            hint = " For a batch give a list: [framework.Image(each) for each in batch]."
        raise DataError(
            f"framework.Image got {given}. It takes a tensor or array of shape (H, W) or (C, H, W) with C 1, 3 or 4."
            f"{hint}"
        )


class Drawing(Image):
    """A picture of an evaluation that is drawn once its pixels are read.

    Of each name, a run logs the newest every few seconds and at its end; see `training.logbook`.
    """

    def __init__(self, draw: Callable[[], Image]) -> None:
        vars(self).update(caption="", _draw=draw)

    @cached_property
    def pixels(self) -> Any:
        return vars(self)["_draw"]().pixels


@dataclass(frozen=True, eq=False)
class Figure:
    """A `matplotlib.figure.Figure` to log. It is closed once it is logged."""

    figure: Any


@dataclass(frozen=True, eq=False)
class Histogram:
    """The distribution of numbers to log."""

    # A tensor or array of any shape, on any device; values that aren't finite are left out.
    values: Any


@dataclass(frozen=True, eq=False)
class Table:
    """A table to log: rows with a value for each column. Raises DataError for a row of another length."""

    columns: Sequence[str]
    # Strings and numbers, also of NumPy and torch, are kept; None is an empty cell; others are written as `str` does.
    rows: Sequence[Sequence[Any]]

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise DataError(
                    f"framework.Table got {len(self.columns)} columns ({', '.join(self.columns)}), and row {number} "
                    f"has {len(row)} values. Give one for each column."
                )
        rows = []
        for row in self.rows:
            rows.append([_plain_cell(value) for value in row])
        object.__setattr__(self, "rows", rows)

    def markdown(self) -> str:
        """Return the table in Markdown, a line for each row."""
        ruler = ["---"] * len(self.columns)
        return "\n".join(_markdown_row(cells) for cells in (self.columns, ruler, *self.rows))


def _plain_cell(value: Any) -> str | float | None:
    if getattr(value, "shape", None) == ():
        # A scalar of torch or NumPy.
        value = value.item()
    if value is None or isinstance(value, (str, int, float)):
        return value
    return str(value)


def _markdown_row(cells: Sequence[str | float | None]) -> str:
    texts = []
    for value in cells:
        if value is None:
            text = ""
        elif isinstance(value, float):
            text = f"{value:.6g}"
        else:
            text = str(value)
        texts.append(text.replace("|", "\\|").replace("\n", " "))
    return f"| {' | '.join(texts)} |"


@dataclass(frozen=True, eq=False)
class Text:
    """Text to log, plain or Markdown."""

    text: str


@dataclass(frozen=True, eq=False)
class Artifact:
    """A file or folder to keep with the run. It must not change until the run ends."""

    path: str | Path


Media = Image | Sequence[Image] | Figure | Histogram | Table | Text | Artifact
"""What can be logged beside numbers."""


def is_media(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) > 0 and all(isinstance(item, Image) for item in value)
    return isinstance(value, (Image, Figure, Histogram, Table, Text, Artifact))


def markdown_texts(texts: Mapping[str, Table | Text]) -> dict[str, str]:
    """Return tables and texts as strings in Markdown, as `run.json` keeps them."""
    written = {}
    for name, value in texts.items():
        if isinstance(value, Table):
            written[name] = value.markdown()
        else:
            written[name] = value.text
    return written

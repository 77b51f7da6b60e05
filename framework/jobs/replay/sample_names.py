"""The names of samples, for data sets that have them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Attributes that are lists with an entry for each sample: of torchvision's folders of images, and of the user's own.
_ATTRIBUTES = ("names", "samples", "imgs", "files", "paths")


def sample_names(dataset: Any, indices: Sequence[int]) -> list[str] | None:
    """Return the name of each sample; None if the data set doesn't name its samples.

    A name is what `dataset.names`, `samples` (as in torchvision's ImageFolder), `imgs`, `files` or `paths` has at the
    index: a text or a path, or a tuple that begins with one. A Subset has those of its data set. A list of another
    length than the data set isn't of its samples: the names of classes, or the files of a stream.
    """
    while hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        indices = [int(dataset.indices[index]) for index in indices]
        dataset = dataset.dataset
    if not hasattr(dataset, "__len__"):
        return None
    for attribute in _ATTRIBUTES:
        listed = getattr(dataset, attribute, None)
        if not isinstance(listed, Sequence) or isinstance(listed, str) or len(listed) != len(dataset):
            continue
        names = [_name(listed[index]) for index in indices]
        if None not in names:
            return [str(name) for name in names]
    return None


def _name(entry: Any) -> str | None:
    if isinstance(entry, tuple) and entry:
        entry = entry[0]
    if isinstance(entry, (str, Path)):
        return str(entry)
    return None

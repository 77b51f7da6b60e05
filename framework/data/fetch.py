"""Call the user's code: load a sample, collate samples. An error becomes a RunError that names the sample and the line.

`batch_dataset` loads whole batches with them, `stream` the samples of an IterableDataset.
"""

from __future__ import annotations

import traceback
from typing import Any

from torch.utils.data import default_collate

from framework.errors import RunError
from framework.types import Batch, Collate, MapDataset


def load_sample(dataset: MapDataset, index: int, *, split: str) -> Any:
    """Return `dataset[index]`. Raises RunError that names the sample if the dataset raises."""
    try:
        return dataset[index]
    except Exception as error:
        raise user_error(f"Sample {index} of the {split} dataset", error) from error


def collate(samples: list[Any], *, name: str, collate_fn: Collate | None = None) -> Batch:
    """Make a batch of samples. Raises RunError, which calls them `name`, if that isn't possible."""
    if collate_fn is not None:
        try:
            return collate_fn(samples)
        except Exception as error:
            raise user_error(f"The collate function, given {name[0].lower()}{name[1:]},", error) from error
    try:
        return default_collate(samples)
    except Exception as error:
        raise RunError(
            f"{name} don't make a batch: {type(error).__name__}: {error}\n"
            "Every sample must have the same structure, with tensors of the same shapes. Else set data.collate_fn."
        ) from error


def user_error(name: str, error: BaseException) -> RunError:
    """Return an error, which is shown without its traceback, with the frames of the user's code that led to it.

    Args:
        name: of the user's code that has raised `error`.
        error: caught by the function that has called that code.
    """
    # The first frame is that function's.
    frames = traceback.extract_tb(error.__traceback__)[1:]
    stack = "\n".join(f"  {frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}" for frame in frames)
    return RunError(f"{name} raised {describe(error)}\n{stack}")


def describe(error: BaseException) -> str:
    """Return the class and the text of an error. Its `__str__` may raise, too."""
    try:
        text = str(error)
    except Exception:
        text = "(its text can't be shown)"
    return f"{type(error).__name__}: {text}"

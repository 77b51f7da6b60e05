"""Predictions on their way to one file: each rank writes its part, one puts the parts together in order."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from framework.errors import ConfigError, TargetError
from framework.output_file import put
from framework.tasks.supervised import describe

Columns = dict[str, Tensor]
"""Name → values of some samples: shape (n,) or (n, k) or more, on the CPU."""


def columns_of(prediction: Tensor | Mapping[str, Tensor], *, num_samples: int) -> Columns:
    """Return what a task's `predict_step` returned for a batch as columns.

    Raises TargetError if it isn't a tensor or a dict, ConfigError if it hasn't one row for each sample.
    """
    if not isinstance(prediction, (Tensor, Mapping)):
        raise TargetError(
            f"The task's predict_step returned {describe(prediction)}. It must return a tensor, or a dict of tensors, "
            "whose first dimension is the sample."
        )
    named: dict[str, Any] = {"output": prediction} if isinstance(prediction, Tensor) else dict(prediction)
    for name, values in named.items():
        if not isinstance(values, Tensor) or values.ndim == 0 or len(values) != num_samples:
            seen = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise ConfigError(
                f"The task's predict_step gave {name!r} as {seen} for a batch of {num_samples} samples.\n"
                "It must give tensors whose first dimension is the sample."
            )
    return {name: values.detach().cpu() for name, values in named.items()}


def save_part(batches: Sequence[Columns], path: Path) -> None:
    """One rank's share, in order; without samples an empty part."""
    names = batches[0].keys() if batches else ()
    torch.save({name: torch.cat([batch[name] for batch in batches]) for name in names}, path)


def join_parts(parts: Iterable[Path], output: Path, *, turns: int | None = None) -> int:
    """Write all parts to `output` in their order and remove them; gives the number of samples.

    turns: samples that each part has in turn, and of the last ones a share; None where one part follows another.
    output: `.csv` (a header, one row a sample, an index first) or `.pt` (a dict of tensors). It appears whole. Raises
    ConfigError where it is there already.
    """
    parts = list(parts)
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        loaded = map(_load, parts)
        count = FORMATS[output.suffix](loaded if turns is None else _in_turn(list(loaded), turns), temporary)
        put(temporary, output, key="predict.output")
    finally:
        temporary.unlink(missing_ok=True)
    for part in parts:
        part.unlink()
    return count


def _in_turn(parts: Sequence[Columns], turns: int) -> Iterator[Columns]:
    sizes = [len(next(iter(part.values()), ())) for part in parts]
    rounds = sum(sizes) // (turns * len(parts))
    for begin in range(0, rounds * turns, turns):
        yield from ({name: values[begin : begin + turns] for name, values in part.items()} for part in parts)
    rest = ({name: values[rounds * turns :] for name, values in part.items()} for part in parts)
    yield from (part for part, size in zip(rest, sizes, strict=True) if size > rounds * turns)


def _load(part: Path) -> Columns:
    columns: Columns = torch.load(part, weights_only=True)
    return columns


def _write_pt(parts: Iterator[Columns], path: Path) -> int:
    loaded = [part for part in parts if part]
    columns = {name: torch.cat([part[name] for part in loaded]) for name in (loaded[0] if loaded else ())}
    with path.open("wb") as file:
        torch.save(columns, file)
        _flush(file)
    return len(next(iter(columns.values()), ()))


def _write_csv(parts: Iterator[Columns], path: Path) -> int:
    index = 0
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        for part in parts:
            if not part:
                continue
            flat = dict(_flattened(part))
            if index == 0:
                writer.writerow(["index", *flat])
            # As many digits as give the same float32 back.
            texts = [[_text(value) for value in values.tolist()] for values in flat.values()]
            writer.writerows([number, *row] for number, row in enumerate(zip(*texts, strict=True), start=index))
            index += len(texts[0])
        _flush(file)
    return index


def _flattened(part: Columns) -> Iterator[tuple[str, Tensor]]:
    """A column for each number of a sample: `output` of shape (n, 3) is `output_0`, `output_1`, `output_2`."""
    for name, values in part.items():
        if values.ndim == 1:
            yield name, values
        else:
            yield from ((f"{name}_{i}", column) for i, column in enumerate(values.flatten(start_dim=1).unbind(dim=1)))


def _text(value: float | bool) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _flush(file: IO[bytes] | IO[str]) -> None:
    file.flush()
    os.fsync(file.fileno())


FORMATS: Mapping[str, Callable[[Iterator[Columns], Path], int]] = {".csv": _write_csv, ".pt": _write_pt}

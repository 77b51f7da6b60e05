"""The file of job=predict: what `predict_step` returned on all ranks, in the order of the dataset."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from framework.errors import ConfigError
from framework.system.files import atomic_output

# Name → values of some samples: shape (n,) or (n, k) or more, on the CPU.
Columns = dict[str, Tensor]


def columns_of(prediction: Tensor | Mapping[str, Tensor], *, num_samples: int) -> Columns:
    """Return what a task's `predict_step` returned as columns. Raises ConfigError for all but a row for each sample."""
    columns: dict[str, Any] = {"output": prediction}
    if isinstance(prediction, Mapping):
        columns = dict(prediction)
    for name, values in columns.items():
        kind = type(values).__name__
        if isinstance(values, Tensor):
            kind = f"shape {tuple(values.shape)}"
            if values.ndim > 0 and len(values) == num_samples:
                continue
        raise ConfigError(
            f"The task's predict_step returned {name!r} as {kind} for a batch of {num_samples} samples.\n"
            "It must return a tensor, or a dict of tensors, whose first dimension is the sample."
        )
    return {name: values.detach().cpu() for name, values in columns.items()}


def concatenated(parts: Sequence[Columns]) -> Columns:
    """Return the samples of all parts, one part after another; no columns without parts."""
    if not parts:
        return {}
    columns = {}
    for name in parts[0]:
        columns[name] = torch.cat([part[name] for part in parts])
    return columns


def write_predictions(shares: Sequence[Columns], output: Path, *, turns: int | None = None) -> int:
    """Write the shares of all ranks to `output`, and return the number of samples.

    Args:
        shares: of each rank, in the order of ranks; a rank without samples has no columns.
        output: `.csv` (a header, one row for each sample, an index first) or `.pt` (a dict of tensors).
        turns: how many samples each rank has in turn; None if one share follows another (each rank read a shard of a
            stream).

    Raises:
        RunError: the disk refuses.
    """
    sizes = [_num_samples(share) for share in shares]
    columns = concatenated([share for share in shares if share])
    if turns is not None and len(shares) > 1:
        # Samples of the same round stay in the order of ranks, since the sort is stable.
        rounds = torch.cat([torch.arange(size) // turns for size in sizes])
        order = rounds.argsort(stable=True)
        columns = {name: values[order] for name, values in columns.items()}
    with atomic_output(output, key="predict.output") as path:
        if output.suffix == ".csv":
            _write_csv(columns, path)
        else:
            torch.save(columns, path)
    return sum(sizes)


def _num_samples(columns: Columns) -> int:
    return max(map(len, columns.values()), default=0)


def _write_csv(columns: Columns, path: Path) -> None:
    """Write a column for each number of a sample: `output` of shape (n, 3) is `output_0`, `output_1`, `output_2`."""
    names = ["index"]
    cells = []
    for name, values in columns.items():
        flat = values[:, None].flatten(start_dim=1)
        if values.ndim == 1:
            names.append(name)
        else:
            names += [f"{name}_{number}" for number in range(flat.shape[1])]
        for column in flat.T.tolist():
            cells.append([_cell(value) for value in column])
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for index, row in enumerate(zip(*cells, strict=True)):
            writer.writerow([index, *row])


def _cell(value: Any) -> Any:
    """Return a float with nine digits, which give the same float32 back, and anything else as it is."""
    if isinstance(value, float):
        return f"{value:.9g}"
    return value

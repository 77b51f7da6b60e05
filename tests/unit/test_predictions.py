"""The ranks' predictions become one file, in order, whole or not at all."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.errors import ConfigError
from tests.helpers.internals import Columns, columns_of, concatenated, share, write_predictions


def read(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


NAMED = {"class": torch.tensor([3, 1]), "probability": torch.tensor([0.1, 1 / 3])}
OTHER = {"class": torch.tensor([0]), "probability": torch.tensor([1.0])}


@pytest.mark.parametrize(
    ("prediction", "said"),
    [
        (torch.tensor(1.0), "'output' as shape () for a batch of 3 samples"),
        (torch.zeros(4, 2), "'output' as shape (4, 2) for a batch of 3 samples"),
        ({"good": torch.zeros(3), "bad": torch.zeros(1, 3)}, "'bad' as shape (1, 3)"),
        ({"names": ["a", "b", "c"]}, "'names' as list"),
        (0.5, "'output' as float"),
    ],
)
def test_predictions_need_a_row_for_each_sample(prediction: Any, said: str) -> None:
    with pytest.raises(ConfigError, match="first dimension is the sample") as caught:
        columns_of(prediction, num_samples=3)
    assert said in str(caught.value)


def test_csv_has_an_indexed_row_a_sample(tmp_path: Path) -> None:
    assert write_predictions([concatenated([NAMED, OTHER]), concatenated([OTHER])], tmp_path / "all.csv") == 4
    assert read(tmp_path / "all.csv") == [
        ["index", "class", "probability"],
        ["0", "3", "0.100000001"],
        ["1", "1", "0.333333343"],
        ["2", "0", "1"],
        ["3", "0", "1"],
    ]
    assert list(tmp_path.iterdir()) == [tmp_path / "all.csv"]


@pytest.mark.parametrize("sizes", [(3, 0, 2), (0, 0, 1)])
def test_pt_keeps_tensors_and_leaves_no_gap(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    whole = {"x": torch.arange(6.0 * sum(sizes)).reshape(-1, 2, 3).bfloat16(), "new": torch.arange(sum(sizes)) > 1}
    shares: list[Columns] = []
    for end, size in zip(itertools.accumulate(sizes), sizes, strict=True):
        columns = {name: values[end - size : end] for name, values in whole.items()}
        shares.append(columns if size else {})
    for suffix in (".csv", ".pt"):
        assert write_predictions(shares, tmp_path / f"all{suffix}") == sum(sizes)
    columns = torch.load(tmp_path / "all.pt", weights_only=True)
    assert columns.keys() == whole.keys()
    assert all(torch.equal(columns[name], values) for name, values in whole.items())
    assert [int(row[0]) for row in read(tmp_path / "all.csv")[1:]] == list(range(sum(sizes)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.csv", "all.pt"]


def test_numbers_in_csv_read_back_the_same(tmp_path: Path) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (1000,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    # Random bits give numbers of all magnitudes.
    numbers = bits.view(torch.float32).nan_to_num()
    write_predictions([{"x": numbers}], tmp_path / "all.csv")
    assert torch.equal(torch.tensor([float(row[1]) for row in read(tmp_path / "all.csv")[1:]]), numbers)


@pytest.mark.parametrize("count", [0, 1, 7, 11, 12])
def test_interleaved_parts_are_put_in_order(tmp_path: Path, count: int) -> None:
    """Two samples at a time each of three, and of what is left a share."""
    whole = list(range(count))
    shares: list[list[int]] = [[], [], []]
    for begin in range(0, count - count % 6, 6):
        for rank in range(3):
            shares[rank] += whole[begin + 2 * rank : begin + 2 * rank + 2]
    for rank in range(3):
        rest = whole[count - count % 6 :]
        shares[rank] += [rest[position] for position in share(len(rest), rank=rank, world_size=3)]
    parts: list[Columns] = [{"n": torch.tensor(own)} if own else {} for own in shares]
    assert write_predictions(parts, tmp_path / "all.pt", turns=2) == count
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert found.get("n", torch.tensor([])).tolist() == whole

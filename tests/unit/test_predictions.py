"""The ranks' predictions become one file, in order, whole or not at all."""

from __future__ import annotations

import csv
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from framework.data.batching import share
from framework.errors import ConfigError
from framework.predictions import FORMATS, Columns, columns_of, join_parts, save_part


def save(folder: Path, shares: Sequence[Sequence[Columns]]) -> list[Path]:
    parts = [folder / f"{number}.part" for number in range(len(shares))]
    for part, batches in zip(parts, shares, strict=True):
        save_part(batches, part)
    return parts


def read(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


NAMED = {"class": torch.tensor([3, 1]), "probability": torch.tensor([0.1, 1 / 3])}
OTHER = {"class": torch.tensor([0]), "probability": torch.tensor([1.0])}


def test_a_tensor_is_a_column_called_output() -> None:
    values = torch.ones(4, 2, requires_grad=True)
    columns = columns_of(values, num_samples=4)
    assert columns.keys() == {"output"}
    assert not columns["output"].requires_grad
    assert columns_of({"a": values, "b": values}, num_samples=4).keys() == {"a", "b"}


@pytest.mark.parametrize(
    ("prediction", "said"),
    [
        (torch.tensor(1.0), "'output' as shape () for a batch of 3 samples"),
        (torch.zeros(4, 2), "'output' as shape (4, 2) for a batch of 3 samples"),
        ({"good": torch.zeros(3), "bad": torch.zeros(1, 3)}, "'bad' as shape (1, 3)"),
        ({"names": ["a", "b", "c"]}, "'names' as list"),
    ],
)
def test_predictions_need_a_row_for_each_sample(prediction: Any, said: str) -> None:
    with pytest.raises(ConfigError, match="first dimension is the sample") as caught:
        columns_of(prediction, num_samples=3)
    assert said in str(caught.value)


def test_csv_has_an_index_and_one_row_a_sample(tmp_path: Path) -> None:
    parts = save(tmp_path, [[NAMED, OTHER], [OTHER]])
    assert join_parts(parts, tmp_path / "all.csv") == 4
    assert read(tmp_path / "all.csv") == [
        ["index", "class", "probability"],
        ["0", "3", "0.100000001"],
        ["1", "1", "0.333333343"],
        ["2", "0", "1"],
        ["3", "0", "1"],
    ]
    assert list(tmp_path.iterdir()) == [tmp_path / "all.csv"]


@pytest.mark.parametrize("sizes", [(3, 0, 2), (0, 0, 1), (0, 4), (2, 2, 2, 1)])
def test_pt_has_the_tensors_as_they_were_and_ranks_without_samples_leave_no_gap(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    whole = {"x": torch.arange(6.0 * sum(sizes)).reshape(-1, 2, 3).bfloat16(), "new": torch.arange(sum(sizes)) > 1}
    parts: list[list[Columns]] = []
    for end, size in zip(itertools.accumulate(sizes), sizes, strict=True):
        parts.append([{name: values[end - size : end] for name, values in whole.items()}] if size else [])
    for suffix in FORMATS:
        assert join_parts(save(tmp_path, parts), tmp_path / f"all{suffix}") == sum(sizes)
    columns = torch.load(tmp_path / "all.pt", weights_only=True)
    assert columns.keys() == whole.keys()
    assert all(torch.equal(columns[name], values) for name, values in whole.items())
    assert [int(row[0]) for row in read(tmp_path / "all.csv")[1:]] == list(range(sum(sizes)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.csv", "all.pt"]


def test_several_numbers_of_a_sample_are_several_columns(tmp_path: Path) -> None:
    values = {"image": torch.arange(8).reshape(2, 2, 2), "is_new": torch.tensor([True, False])}
    join_parts(save(tmp_path, [[values]]), tmp_path / "all.csv")
    assert read(tmp_path / "all.csv") == [
        ["index", "image_0", "image_1", "image_2", "image_3", "is_new"],
        ["0", "0", "1", "2", "3", "True"],
        ["1", "4", "5", "6", "7", "False"],
    ]


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=8))
def test_numbers_in_csv_read_back_the_same(tmp_path_factory: pytest.TempPathFactory, numbers: list[float]) -> None:
    folder = tmp_path_factory.mktemp("numbers")
    given_values = torch.tensor(numbers)
    join_parts(save(folder, [[{"x": given_values}]]), folder / "all.csv")
    found = torch.tensor([float(row[1]) for row in read(folder / "all.csv")[1:]])
    assert torch.equal(found, given_values)


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_full_disk_leaves_no_half_file_and_keeps_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    parts = save(tmp_path, [[NAMED], [OTHER]])

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        join_parts(parts, tmp_path / f"all{suffix}")
    assert sorted(tmp_path.iterdir()) == parts


def test_a_file_that_another_command_wrote_meanwhile_is_kept(tmp_path: Path) -> None:
    part, output = tmp_path / "0.part", tmp_path / "all.csv"
    save_part([{"output": torch.ones(2)}], part)
    output.write_text("another's")
    with pytest.raises(ConfigError, match="written by another command meanwhile"):
        join_parts([part], output)
    assert output.read_text() == "another's"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.part", "all.csv"]


@pytest.mark.parametrize("count", [0, 1, 5, 6, 7, 11, 12])
def test_parts_of_ranks_that_took_turns_are_put_in_order(tmp_path: Path, count: int) -> None:
    """Two samples at a time each of three, and of what is left a share."""
    whole = list(range(count))
    shares: list[list[int]] = [[], [], []]
    for begin in range(0, count - count % 6, 6):
        for rank in range(3):
            shares[rank] += whole[begin + 2 * rank : begin + 2 * rank + 2]
    for rank in range(3):
        rest = whole[count - count % 6 :]
        shares[rank] += [rest[position] for position in share(len(rest), rank=rank, world_size=3)]
    parts = save(tmp_path, [[{"n": torch.tensor(own)}] if own else [] for own in shares])
    assert join_parts(parts, tmp_path / "all.pt", turns=2) == count
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert found.get("n", torch.tensor([])).tolist() == whole

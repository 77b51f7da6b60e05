"""Histograms of odd numbers and media with odd names: they never end a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from framework import Histogram, Table
from framework.loggers import JsonlLogger, TensorBoardLogger
from tests.helpers.internals import RunDir, counts_of, file_stem

ODD: dict[str, Any] = {
    "huge and constant": np.full(4, 1e300),
    "the largest": np.full(4, np.finfo(np.float64).max),
    "both ends": np.array([-1e308, 1e308, 0.0, 1.0]),
    "close": np.array([2.0**60, 2.0**60 + 256, 2.0**60, 2.0**60]),
    "unsigned": np.full(4, 2**63, dtype=np.uint64),
    "tiny": np.full(4, 5e-324),
    "bool": torch.tensor([True, False, True, True]),
    "complex": torch.tensor([3 + 4j] * 4),
    "half": torch.ones(4, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", list(ODD))
def test_histograms_take_every_number(tmp_path: Path, name: str) -> None:
    counts, edges = counts_of(ODD[name])
    assert sum(counts) == 4
    assert np.isfinite(edges).all()
    run_dir = RunDir(tmp_path)
    logger = TensorBoardLogger(run_dir=run_dir)
    logger.log({"values": Histogram(ODD[name])}, step=1, epoch=0)
    logger.close()
    assert list(run_dir.tensorboard.iterdir())


@pytest.mark.parametrize("values", [np.array([]), np.array([np.nan, np.inf])])
def test_histograms_without_finite_numbers_are_empty(values: Any) -> None:
    assert sum(counts_of(values)[0]) == 0


def test_every_name_becomes_a_file_in_media(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    logger = JsonlLogger(run_dir=run_dir)
    names = ["a/b", "..", "../../up", "/root", "nul\0", "line\n", "\udce9", "x" * 300 + "1", "x" * 300 + "2", "é" * 200]
    for name in names:
        logger.log({name: Table(["a"], [[1]])}, step=5, epoch=0)
    logger.close()
    assert len(list((tmp_path / "media").iterdir())) == len(names)
    assert [path.name for path in tmp_path.iterdir()] == ["media"]
    assert file_stem("val/table") == "val__table"

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from tests.helpers.internals import Context, RunDir, Topology, create_run_dir, rank_log, rank_logger


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = create_run_dir(tmp_path / "some")
    run_dir.logs.mkdir()
    return run_dir


def context(rank: int) -> Context:
    devices = (torch.device("cuda:2"), torch.device("cuda:3"))
    return Context(Topology(2, 2, 4, 2), rank, rank % 2, rank // 2, devices, "nccl")


def test_every_rank_writes_its_own_log(run_dir: RunDir) -> None:
    before = (rank_logger.level, list(rank_logger.handlers))
    for rank in (0, 3, 0):
        # A resumed run appends.
        with rank_log(run_dir.rank_log(rank), place=context(rank).description):
            rank_logger.warning("saved %s", "é")
            logging.getLogger("framework.some.part").info("from a part")
            rank_logger.debug("not that")
            logging.getLogger("elsewhere").error("nor that")
    with pytest.raises(ValueError, match="oops"), rank_log(run_dir.rank_log(3), place="rank 3"):
        raise ValueError("oops")
    assert (rank_logger.level, rank_logger.handlers) == before
    rank_logger.warning("too late")
    first, *records = run_dir.rank_log(3).read_text(encoding="utf-8").splitlines()
    assert f"pid {os.getpid()}, rank 3, local rank 1, world size 4, backend nccl, node 1 (" in first
    assert first.endswith("devices cuda:2, cuda:3")
    assert [line.split(" ", 2)[2] for line in records[:2]] == ["WARNING saved é", "INFO from a part"]
    # The first line is repeated.
    assert len(records) == 3
    assert run_dir.rank_log(0).read_text(encoding="utf-8").count("saved é") == 2


def test_the_terminal_has_no_log_if_a_library_configures_logging(
    run_dir: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    try:
        with rank_log(run_dir.rank_log(0), place="rank 0"):
            rank_logger.info("the model and its training")
        assert capfd.readouterr().err == ""
        rank_logger.warning("after it")
        assert "after it" in capfd.readouterr().err
    finally:
        logging.getLogger().removeHandler(handler)
    assert "the model and its training" in run_dir.rank_log(0).read_text(encoding="utf-8")


def test_a_full_disk_is_survived_without_a_word(run_dir: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir.rank_log(0).symlink_to("/dev/full")
    with rank_log(run_dir.rank_log(0), place="rank 0"):
        rank_logger.warning("lost")
    assert capfd.readouterr().err == ""

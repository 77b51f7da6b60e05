from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from framework.distributed.context import Context
from framework.rank_log import logger, rank_log
from framework.run_dir import RunDir, create_run_dir
from framework.topology import Topology


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return create_run_dir(tmp_path / "some")


def context(rank: int) -> Context:
    devices = (torch.device("cuda:2"), torch.device("cuda:3"))
    return Context(Topology(2, 2, 4, 2), rank, rank % 2, rank // 2, devices, "nccl")


def test_the_first_line_says_who_writes_there(run_dir: RunDir) -> None:
    with rank_log(run_dir, context(3)):
        pass
    (line,) = run_dir.rank_log(3).read_text().splitlines()
    assert f"pid {os.getpid()}, rank 3, local rank 1, world size 4, backend nccl, node 1 (" in line
    assert line.endswith("devices cuda:2, cuda:3")


def test_records_of_the_framework_go_there_with_their_level(run_dir: RunDir) -> None:
    with rank_log(run_dir, context(0)):
        logger.warning("going on from %s", "é")
        logging.getLogger("framework.some.part").info("from a part")
        logger.debug("not that")
        logging.getLogger("elsewhere").error("nor that")
    lines = run_dir.rank_log(0).read_text(encoding="utf-8").splitlines()[1:]
    assert [line.split(" ", 2)[2] for line in lines] == ["WARNING going on from é", "INFO from a part"]


def test_each_rank_has_its_own_and_a_resumed_run_goes_on_in_it(run_dir: RunDir) -> None:
    for rank in (0, 1, 0):
        with rank_log(run_dir, context(rank)):
            logger.info("hello from %d", rank)
    assert run_dir.rank_log(0).read_text().count("hello from 0") == 2
    assert run_dir.rank_log(1).read_text().count("hello from") == 1


def test_a_full_disk_ends_nothing_and_says_nothing(run_dir: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir.rank_log(0).symlink_to("/dev/full")
    with rank_log(run_dir, context(0)):
        logger.warning("lost")
    assert capfd.readouterr().err == ""


def test_another_fault_of_a_record_is_no_fault_of_the_disk(run_dir: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    with rank_log(run_dir, context(0)), pytest.raises(TypeError):
        logger.warning("%d", "no number")  # pytest's own handler raises it; the file's shows it
    assert capfd.readouterr().err.count("--- Logging error ---") == 1


def test_afterwards_the_logger_is_as_it_was_also_after_an_error(run_dir: RunDir) -> None:
    before = (logger.level, list(logger.handlers))
    with pytest.raises(ValueError, match="oops"), rank_log(run_dir, context(0)):
        raise ValueError("oops")
    assert (logger.level, logger.handlers) == before
    logger.warning("too late")
    assert "too late" not in run_dir.rank_log(0).read_text()

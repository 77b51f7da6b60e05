"""Stages of one model on four ranks, in every schedule: they end as one process does, and so do their checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from framework.launch.warm import WarmServer
from tests.helpers.ranks import left_by_ranks

pytestmark = pytest.mark.multiproc


def test_stages_and_their_checkpoints_end_as_one_process(warm: WarmServer, tmp_path: Path) -> None:
    entry = "tests.multiproc.pipeline_entries:end_as_one_process"
    assert left_by_ranks(entry, procs=4, warm=warm, folder=tmp_path) == [3] * 4

"""Ranks whose streams are of uneven length: the numbers of one process, resumed exactly, and nobody waits for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from framework.launch.warm import WarmServer
from tests.helpers.ranks import left_by_ranks

pytestmark = pytest.mark.multiproc


def test_ranks_with_uneven_streams_train_as_one_process_does(warm: WarmServer, tmp_path: Path) -> None:
    left = left_by_ranks("tests.multiproc.stream_entries:uneven_streams", procs=3, warm=warm, folder=tmp_path)
    assert [each["steps"] for each in left] == [[12] * 3] * 3
    assert "Rank 0 waited in vain for what other ranks read of their streams" in left[0]["late"]
    assert left[1]["late"] == "came late"


def test_statistics_go_on_where_the_first_rank_has_nothing_left(warm: WarmServer, tmp_path: Path) -> None:
    entry = "tests.multiproc.stream_entries:statistics_of_uneven_streams"
    left = left_by_ranks(entry, procs=2, warm=warm, folder=tmp_path)
    for each in left:
        assert set(each["counted"].values()) == {10, 12}
        assert "strategy.broadcast_buffers=false leaves each process buffers of its own" in each["told"]

"""Ranks that are slow, found by the others' waiting not being blamed: real processes, which sleep."""

from __future__ import annotations

from pathlib import Path

import pytest

from framework.launch.warm import WarmServer
from tests.helpers.ranks import left_by_ranks

pytestmark = pytest.mark.multiproc
ENTRIES = "tests.multiproc.slow_entries"


def test_each_slow_rank_is_named_in_its_phase_and_no_other(warm: WarmServer, tmp_path: Path) -> None:
    left, *others = left_by_ranks(f"{ENTRIES}:slow_together", procs=4, warm=warm, folder=tmp_path)
    assert {name: sorted(named) for name, named in left.items()} == {
        "ddp": [[1, "data"], [2, "compute"], [3, "callbacks"]],
        "allreduce": [[0, "compute"], [1, "data"], [3, "callbacks"]],
        "none": [],
    }
    assert all(not any(named.values()) for named in others)  # the first tells


@pytest.mark.exhaustive
@pytest.mark.slow
def test_so_each_of_two_is_in_each_place_by_itself(warm: WarmServer, tmp_path: Path) -> None:
    assert left_by_ranks(f"{ENTRIES}:slow_alone", procs=2, warm=warm, folder=tmp_path) == [[]] * 2

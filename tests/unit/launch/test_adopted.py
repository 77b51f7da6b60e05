"""What a rank does that something else has started, before it meets the others."""

from __future__ import annotations

import os
from typing import Any

import pytest

from framework.launch import adopted
from framework.launch.environment import Place


@pytest.mark.parametrize(("users", "read"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_ranks_that_begin_at_once_do_not_count_each_other(
    monkeypatch: pytest.MonkeyPatch, own_state: None, users: str | None, read: str
) -> None:
    """Each would take the others for somebody else at work on its cores. What the user has said stays."""
    asked: list[dict[str, Any]] = []

    def environment(**how: Any) -> dict[str, str]:
        asked.append(how)
        return {"OMP_WAIT_POLICY": "PASSIVE"}

    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if users is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", users)
    monkeypatch.setattr(adopted, "openmp_environment", environment)
    monkeypatch.setattr(adopted, "_follow", lambda place, _: 10 + place.rank)
    place = Place("torchrun", 1, 1, 1, 2, "localhost", 29400, "MASTER_PORT", True, 0)
    assert adopted.take_part(place, [], lead=lambda _: 0) == 11
    assert asked == [{"alone": False}]
    assert os.environ["OMP_WAIT_POLICY"] == read

"""`benchmarks/sweep_kills.py`: whole sweeps that are killed at random moments and resumed; a short form of it."""

from __future__ import annotations

import random

import pytest

from benchmarks.sweep_kills import SWEEPS, check

pytestmark = [pytest.mark.multiproc, pytest.mark.exhaustive, pytest.mark.timeout(400)]


@pytest.mark.parametrize("kind", SWEEPS)
def test_a_sweep_that_is_killed_ends_as_if_it_never_had_been(kind: str) -> None:
    assert check(kind, kills=3, moments=random.Random(kind)) == []

"""A small sample of `python -m benchmarks.corruptions`: right weights, or an error in words."""

from __future__ import annotations

import pytest

from benchmarks.corruptions import bad_ones, fuzz


@pytest.mark.exhaustive
def test_no_corruption_causes_wrong_weights_or_a_hang(fork_server, tmp_path, monkeypatch, own_state):
    monkeypatch.chdir(tmp_path)
    outcomes = fuzz(tmp_path, runs=12, seed=1, server=fork_server)
    assert bad_ones(outcomes) == []
    assert any(outcome.endswith("right weights") for outcome in outcomes)
    assert any("refused" in outcome for outcome in outcomes)

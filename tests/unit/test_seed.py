from __future__ import annotations

import io
import os
import random
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from framework.errors import CheckpointError
from tests.helpers.internals import (
    generator_states,
    mix_seeds,
    restore_generator_states,
    seed_everything,
    seed_fingerprint,
    set_deterministic,
)

CPU = [torch.device("cpu")]
SEEDS = st.integers(0, 2**32 - 1)


def draw() -> list[Any]:
    """Odd numbers of normal deviates, so that a cached half of a pair is part of the state."""
    return [
        random.random(),
        random.gauss(0, 1),
        *numpy.random.standard_normal(3).tolist(),
        *torch.randn(3).tolist(),
        torch.rand(1, dtype=torch.float64).item(),
    ]


def test_seed_and_rank_decide_every_generator(own_state):
    drawn = []
    for seed, rank in ((7, 0), (7, 1), (8, 0), (7, 0)):
        seed_everything(seed, rank=rank)
        drawn.append(draw())
    assert drawn[3] == drawn[0]
    for column in zip(*drawn[:3], strict=True):
        assert len(set(column)) == 3


def test_weights_only_states_restore_exactly(own_state):
    seed_everything(3, rank=0)
    draw()
    file = io.BytesIO()
    torch.save(generator_states(CPU), file)
    expected = [draw() for _ in range(3)]
    seed_everything(99, rank=5)
    file.seek(0)
    assert restore_generator_states(torch.load(file, weights_only=True), devices=CPU) is True
    assert [draw() for _ in range(3)] == expected


def test_states_of_other_devices_are_left_out(own_state):
    states = generator_states(CPU)
    states["devices"] = [{"kind": "cuda", "state": torch.zeros(16, dtype=torch.uint8)}]
    expected = draw()
    assert restore_generator_states(states, devices=CPU) is False
    assert draw() == expected


def test_damaged_states_are_a_checkpoint_error(own_state):
    for key, value in (("cpu", torch.zeros(3, dtype=torch.uint8)), ("python", {"version": 3})):
        with pytest.raises(CheckpointError, match="generator states"):
            restore_generator_states({**generator_states(CPU), key: value}, devices=CPU)


def test_mixing_is_the_same_everywhere():
    """A change of these numbers changes every run's random numbers."""
    int64: Any = numpy.int64(1)
    assert mix_seeds(0) == 5621864261735219286
    assert mix_seeds(1, "epoch", 2) == mix_seeds(int64, "epoch", int64 + int64) == 1270990003676464527


@given(SEEDS, SEEDS, st.integers(0, 4096))
def test_mixing_separates_seeds_ranks_and_order(seed, other, rank):
    assert 0 <= mix_seeds(seed, rank) < 2**63
    assert mix_seeds(seed, rank) != mix_seeds(seed, rank + 1)
    assert (mix_seeds(seed, rank) == mix_seeds(other, rank)) == (seed == other)
    assert len({mix_seeds(seed, 1, 23), mix_seeds(seed, 12, 3), mix_seeds(seed, 123), mix_seeds(seed, "123")}) == 4


@pytest.mark.parametrize(
    ("on", "benchmark", "expected"),
    [(True, None, False), (False, None, True), (True, True, True), (False, False, False)],
)
def test_deterministic_mode_sets_torchs_switches(own_state, on, benchmark, expected):
    set_deterministic(on, benchmark=benchmark)
    assert torch.are_deterministic_algorithms_enabled() is on
    assert torch.backends.cudnn.deterministic is on
    assert torch.backends.cudnn.benchmark is expected
    assert not on or os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8")


def test_any_draw_is_seen(own_state):
    for draws in (random.random, numpy.random.rand, lambda: torch.rand(1)):
        before = seed_fingerprint(CPU)
        assert seed_fingerprint(CPU) == before
        draws()
        assert seed_fingerprint(CPU) != before

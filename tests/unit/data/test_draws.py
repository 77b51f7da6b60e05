from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.data.draws import Draws

MASK = (1 << 64) - 1


def splitmix(state: int) -> tuple[int, int]:
    """The C code of https://prng.di.unimi.it/splitmix64.c in Python's whole numbers."""
    state = (state + 0x9E3779B97F4A7C15) & MASK
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return state, z ^ (z >> 31)


def reference(key: int, index: int, n: int) -> list[int]:
    """Number `index` of the generator seeded with `key` seeds the sample's own generator."""
    _, state = splitmix((key + index * 0x9E3779B97F4A7C15) & MASK)
    numbers = []
    for _ in range(n):
        state, number = splitmix(state)
        numbers.append(number)
    return numbers


def draws(key: int, *indices: int) -> Draws:
    return Draws(key, torch.tensor(indices))


def test_the_reference_gives_the_published_numbers():
    state, numbers = 1234567, []
    for _ in range(2):
        state, number = splitmix(state)
        numbers.append(number)
    assert numbers == [6457827717110365317, 3203168211198807973]


@settings(deadline=None)  # the first call may load much of torch
@given(key=st.integers(0, 2**63 - 1), indices=st.lists(st.integers(0, 2**40), min_size=1, max_size=5))
def test_numbers_are_those_of_splitmix64(key, indices):
    wanted = [[(number >> 40) / 2**24 for number in reference(key, index, 3)] for index in indices]
    given = draws(key, *indices)
    assert len(given) == len(indices)
    uniform = torch.cat([given.uniform(1), given.uniform(2)], dim=1)
    assert uniform.dtype == torch.float32
    assert uniform.tolist() == wanted


@settings(deadline=None)  # the first call may load much of torch
@given(key=st.integers(0, 2**63 - 1), low=st.integers(-(2**40), 2**40), size=st.integers(1, 2**31))
def test_integers_are_the_high_bits_times_the_range(key, low, size):
    given = draws(key, 7, 8).integers(low, low + size, 4)
    wanted = [[low + (((number >> 32) * size) >> 32) for number in reference(key, index, 4)] for index in (7, 8)]
    assert given.tolist() == wanted


def test_integers_reach_both_ends_and_no_further():
    given = draws(3, *range(200)).integers(-2, 3, 5)
    assert given.dtype == torch.int64
    assert given.unique().tolist() == [-2, -1, 0, 1, 2]


@pytest.mark.parametrize(("low", "high"), [(3, 3), (3, 2), (0, 2**31 + 1)])
def test_a_range_that_cannot_be_drawn_from_is_refused(low, high):
    with pytest.raises(ValueError, match="high must be above low"):
        draws(0, 1).integers(low, high, 1)


def test_a_sample_draws_the_same_in_every_batch_and_others_draw_otherwise():
    together = draws(5, 4, 9, 2).uniform(6)
    assert torch.equal(draws(5, 9).uniform(6), together[1:2])
    assert torch.equal(draws(5, 2, 4).uniform(6), together[[2, 0]])
    different = torch.cat([together.flatten(), draws(6, 4, 9, 2).uniform(6).flatten()])
    assert len(different.unique()) == 36


def test_numbers_are_spread_evenly():
    numbers = draws(11, *range(20_000)).uniform(2)
    assert numbers.mean().item() == pytest.approx(0.5, abs=0.01)
    assert torch.corrcoef(numbers.T)[0, 1].abs().item() < 0.03
    assert torch.corrcoef(torch.stack([numbers[:-1, 0], numbers[1:, 0]]))[0, 1].abs().item() < 0.03


def test_a_key_is_asked_for_only_where_something_is_drawn():
    def refuse() -> int:
        raise AssertionError("nothing was drawn")

    idle = Draws(refuse, torch.tensor([1]))
    assert len(idle) == 1
    assert torch.equal(Draws(lambda: 5, torch.tensor([4])).uniform(2), draws(5, 4).uniform(2))

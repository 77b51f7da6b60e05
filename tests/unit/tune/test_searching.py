"""The search for the largest batch: any limit, any beginning, and ranks with limits of their own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from framework.tune.searching import grain, largest_fitting
from tests.unit.simulated_ranks import SimulatedRanks

SIZES = st.integers(1, 100_000)


@given(limit=st.integers(0, 200_000), start=SIZES, most=SIZES)
def test_what_is_found_fits_and_a_grain_more_does_not(limit: int, start: int, most: int) -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= limit

    found = largest_fitting(fits, start=start, most=most)
    assert len(asked) == len(set(asked))
    assert all(1 <= size <= most for size in asked)
    if limit == 0:
        assert found is None
        return
    assert found is not None
    assert found in asked
    assert found <= limit
    assert found == most or found + grain(found) > limit
    # Beyond what fits it is never far: the first is the user's own.
    assert all(size <= 2 * limit or size <= start for size in asked)
    assert len(asked) <= 25


@given(limit=st.integers(1, 200_000), start=SIZES, most=SIZES)
def test_from_below_nothing_is_begun_far_beyond_what_is_known(limit: int, start: int, most: int) -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        known = max((each for each in asked if each <= limit), default=1.2)
        assert size <= 2.5 * known
        asked.append(size)
        return size <= limit

    found = largest_fitting(fits, start=start, most=most, from_below=True)
    assert found is not None
    assert found == most or found <= limit < found + grain(found)
    assert len(asked) == len(set(asked)) <= 25
    assert min(start, most) in asked or min(start, most) > limit


def test_the_way_up_comes_by_the_start() -> None:
    asked: list[int] = []
    assert largest_fitting(lambda size: not asked.append(size), start=20, most=70, from_below=True) == 70  # type: ignore[func-returns-value]
    assert asked == [2, 5, 10, 20, 40, 70]


@given(limits=st.lists(st.integers(1, 5000), min_size=2, max_size=5), start=SIZES)
def test_several_limits_are_the_least_of_them(limits: list[int], start: int) -> None:
    of_all = largest_fitting(lambda size: all(size <= limit for limit in limits), start=start, most=4096)
    assert of_all == largest_fitting(lambda size: size <= min(limits), start=start, most=4096)


def test_ranks_that_tell_each_other_agree() -> None:
    ranks = SimulatedRanks(3)
    limits = (700, 90, 3000)

    def search(context: object) -> tuple[int | None, list[int]]:
        asked: list[int] = []

        def fits(size: int) -> bool:
            asked.append(size)
            return not ranks.any(size > limits[context.rank], context)  # type: ignore[attr-defined,arg-type]

        return largest_fitting(fits, start=16, most=4096), asked

    first, *others = ranks.run(search)
    assert first == (88, [16, 32, 64, 128, 96, 80, 88, 92])
    assert others == [first, first]


def test_grains() -> None:
    assert [grain(size) for size in (1, 31, 32, 63, 64, 1000, 1024)] == [1, 1, 2, 2, 4, 32, 64]

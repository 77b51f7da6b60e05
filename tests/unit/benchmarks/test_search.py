"""How a search is compared with random search."""

from __future__ import annotations

from benchmarks.search import compared


def test_steps_count_to_the_median_of_random_search() -> None:
    chance = [[(10, 0.5), (30, 0.2)], [(10, 0.6), (30, 0.3)], [(10, 0.9), (30, 0.4)]]
    tpe = [[(10, 0.3), (20, 0.1)], [(10, 0.4), (15, 0.25)], [(20, 0.35)]]
    row, _, used = compared("steps", tpe, chance)
    assert row.ours == "15 (10–never)"
    assert row.ratio == "0.50 (0.33–never)"
    assert row.reached == "no"
    assert used.theirs == "30 (30–30) steps"

"""What is left out by default is a further variant of something that isn't."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.choice import COLLECTED, without_another

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("functions", "faults"),
    [
        ({"one": [True, False]}, []),
        ({"one": [True, True], "other": [False]}, []),
        ({"one": [True, True]}, ["file::one"]),
        ({"one": [True], "other": [True, True]}, ["file::one", "file::other"]),
        ({"one": [True], "other": [True, False]}, ["file::one"]),
    ],
)
def test_what_nothing_stands_for_is_found(functions: dict[str, list[bool]], faults: list[str]) -> None:
    assert without_another({"file": functions, "unmarked": {"test": [False]}}) == faults


def test_every_test_that_is_left_out_has_another(request: pytest.FixtureRequest) -> None:
    found = request.config.stash[COLLECTED]
    files = {path.relative_to(TESTS.parent).as_posix() for path in TESTS.rglob("test_*.py")}
    if not files <= found.keys():
        pytest.skip("only part of the tests was collected")
    assert without_another(found) == []
    assert any(any(marked) for functions in found.values() for marked in functions.values())

"""What is said of an exception."""

from __future__ import annotations

import pytest

from framework.causes import said


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), "MemoryError"),
        (ValueError("\n one\n\n two"), "ValueError:  one"),
        (ValueError(" "), "ValueError"),
    ],
)
def test_the_class_and_the_first_line_that_is_not_empty(error: Exception, expected: str) -> None:
    assert said(error) == expected

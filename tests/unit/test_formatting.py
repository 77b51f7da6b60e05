"""Sizes and times as people read them."""

from __future__ import annotations

import pytest

from tests.helpers.internals import format_binary_bytes, format_bytes, format_seconds


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (99_949, "99.9 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (123_456_789_000, "123 GB"),
        (5 * 10**18, "5000 PB"),
    ],
)
def test_sizes_have_three_digits(number: int, text: str) -> None:
    assert format_bytes(number) == text


def test_times_and_buffers_have_the_unit_that_fits() -> None:
    assert [format_seconds(each) for each in (52e-6, -0.0014, 12.345, 5000)] == [
        "52 µs",
        "-1.4 ms",
        "12.3 s",
        "5,000 s",
    ]
    assert [format_binary_bytes(each) for each in (4, 65536, 26_736_000_000)] == ["4 B", "64 KiB", "24.9 GiB"]

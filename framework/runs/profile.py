"""Where the time of a profiled run went, as tables for the terminal and reports. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from framework.system.formatting import format_binary_bytes, format_seconds

# Of more ranks, the first and the last ones are shown.
_MAX_RANKS = 16


class ProfileTables(NamedTuple):
    """What `profile` in run.json says. The first row of a table is its header."""

    title: str
    ranks: list[tuple[str, ...]]
    operators: list[tuple[str, ...]]
    # What `job=plan` forecasts, beside it.
    forecast: list[tuple[str, ...]]
    # What the forecast leaves out, or why there is none.
    notes: list[str]


def profile_tables(profile: Mapping[str, Any]) -> ProfileTables:
    """Return the tables. Raises KeyError, TypeError or ValueError for content that the profiler hasn't written."""
    first_step, last_step = profile["steps"]
    num_steps = last_step - first_step + 1
    step_s = profile["step_s"]
    profiled_s = profile["profiled_step_s"]
    title = f"Where the time went in steps {first_step:,} to {last_step:,}, {format_seconds(profiled_s)} each"
    if step_s is not None:
        title += f" ({format_seconds(step_s)} without the profiler)"

    shares_of_ranks = profile["ranks"]
    parts = list(shares_of_ranks[0])
    ranks = [("rank", *parts)]
    for rank, shares in enumerate(shares_of_ranks):
        ranks.append((str(rank), *(_percent(shares[part]) for part in parts)))
    if len(shares_of_ranks) > _MAX_RANKS:
        half = _MAX_RANKS // 2
        ranks[half + 1 : -half] = [("…",) * len(ranks[0])]

    operators: list[tuple[str, ...]] = [("operator", "calls a step", "time a step", "share")]
    for operator in profile["operators"]:
        operators.append(
            (
                operator["name"],
                f"{operator['calls'] / num_steps:.12g}",
                format_seconds(operator["seconds"] / num_steps),
                _percent(operator["share"]),
            )
        )
    forecast = profile.get("forecast")
    if forecast is None:
        return ProfileTables(title, ranks, operators, [], [])
    rows: list[tuple[str, ...]] = [("", "measured", "forecast")]
    least = _shown(forecast["least_step_s"], lambda seconds: f"at least {format_seconds(seconds)}")
    rows.append(("a step", format_seconds(step_s or profiled_s), least))
    measured_bytes = profile.get("peak_bytes")
    rows.append(
        (
            "peak of the memory",
            _shown(measured_bytes, format_binary_bytes),
            _shown(forecast["peak_bytes"], format_binary_bytes),
        )
    )
    return ProfileTables(title, ranks, operators, rows, [str(note) for note in forecast["notes"]])


def _shown(number: float | None, shown: Callable[[float], str]) -> str:
    """Return the number as text; `–` if it isn't known."""
    if number is None:
        return "–"
    return shown(number)


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"

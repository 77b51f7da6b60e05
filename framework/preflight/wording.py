"""How amounts, ranks and the verdict are said: the same on the terminal and in a failure. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_SHOWN = 10  # failures
_DECIMAL = ("", "k", "M", "G", "T", "P")


def amount(size_bytes: float) -> str:
    """`4 B`, `64 KiB`, `24.9 GiB`: sizes of buffers are powers of two."""
    size, unit = float(size_bytes), 0
    while size >= 1024 and unit < len(_BINARY) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {_BINARY[unit]}" if size == int(size) or unit == 0 else f"{size:.1f} {_BINARY[unit]}"


def rate(bytes_per_s: float) -> str:
    """`12.3 MB/s`, `1.25 GB/s`: decimal, as networks are sold."""
    return _decimal(bytes_per_s, "B/s")


def flops(flops_per_s: float) -> str:
    return _decimal(flops_per_s, "FLOP/s")


def _decimal(value: float, unit: str) -> str:
    power = 0
    while value >= 999.5 and power < len(_DECIMAL) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} {_DECIMAL[power]}{unit}"


def seconds_text(seconds: float) -> str:
    """`52 µs`, `1.4 ms`, `12.3 s`, and a sign where there is one."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}" if abs(seconds) < 1000 * scale else f"{seconds / scale:,.0f} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def rank_label(rank: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> str:
    """`rank 1`, and its machine where there are several: `rank 1 (host2)`."""
    several = len({each["node"] for each in ranks}) > 1
    return f"rank {rank['rank']} ({rank['host']})" if several else f"rank {rank['rank']}"


def link_line(result: Mapping[str, Any]) -> str | None:
    """Which link is slowest; None without links."""
    link, ranks = result["slowest_link"], result["ranks"]
    if link is None:
        return None
    one, other = (rank_label(ranks[number], ranks) for number in link["ranks"])
    line = f"slowest link: {one} – {other}: {_compared(link)}, {_beside(link, result)}"
    if result["slow_nodes"]:
        hosts = {rank["node"]: rank["host"] for rank in ranks}
        named = ", ".join(f"node {node} ({hosts[node]})" for node in result["slow_nodes"])
        line += f"; all links of {named} are slow"
    return line


def _compared(link: Mapping[str, Any]) -> str:
    return f"{rate(link['compared_bytes_per_s'])} at {amount(link['compared_bytes'])}"


def _beside(link: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    kinds = {each["is_within_node"] for each in result["links"]}
    kind = "" if len(kinds) == 1 else " within a node" if link["is_within_node"] else " between nodes"
    alike = [each for each in result["links"] if each["is_within_node"] == link["is_within_node"]]
    if len(alike) == 1:
        return f"the only one{kind}"
    return _factor(link, f"the median link{kind}")


def _factor(found: Mapping[str, Any], median: str) -> str:
    if found["times_slower"] < 1.05:
        return f"as fast as {median}"
    return (
        f"{found['times_slower']:.1f} times slower than {median}{', which stands out' if found['stands_out'] else ''}"
    )


def device_line(result: Mapping[str, Any]) -> str | None:
    """Which device is slowest; None where there is one only."""
    found = result["slowest_device"]
    if found is None or sum(len(rank["matmul"]) for rank in result["ranks"]) == 1:
        return None
    ranks = result["ranks"]
    label = rank_label(ranks[found["rank"]], ranks)
    return f"slowest rank: {label} on {found['device']}: {flops(found['flops_per_s'])}, {_factor(found, 'the median')}"


def verdict_line(result: Mapping[str, Any]) -> str:
    """Passed, or which checks failed."""
    took = f"in {result['took_s']:.1f} s"
    if result["passed"]:
        number = len(result["ranks"])
        what = f"{number} ranks, every value right" if number > 1 else "1 rank"
        return f"Preflight passed {took}: {what}"
    return f"Preflight failed {took}: {', '.join(dict.fromkeys(each['check'] for each in result['failures']))}"


def verdict(result: Mapping[str, Any]) -> str:
    """The line of the verdict, and one for each failure, of many the first."""
    failures = result["failures"]
    lines = [verdict_line(result), *(f"  {each['check']}: {each['text']}" for each in failures[:_SHOWN])]
    if len(failures) > _SHOWN:
        lines.append(f"  … and {len(failures) - _SHOWN} more")
    return "\n".join(lines)

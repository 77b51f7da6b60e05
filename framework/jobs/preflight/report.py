"""Judge what all ranks measured (failures, notes, the slowest), and print it. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from framework.config.schema import PreflightConfig
from framework.system.formatting import format_binary_bytes, format_facts, format_rate, format_seconds, format_table

RESULT = "preflight.json"
WITHIN, BETWEEN = "within nodes", "between nodes"
"""Kinds of links."""
STANDS_OUT = 2.0
"""Times slower than the median from which a link or a device stands out."""

_NONE = "–"
_MAX_FAILURES = 10
_TINY_BYTES = 1024  # bandwidths of smaller buffers say nothing


def assess(found: Mapping[str, Any], settings: PreflightConfig) -> dict[str, Any]:
    """Return passed, failures, notes, slowest_link and slowest_device, as preflight.json has them.

    found: its ranks, checks, links and faults.
    """
    ranks = found["ranks"]
    failures = [_failure(each["check"], f"{ranks[each['rank']]['name']}: {each['text']}") for each in found["faults"]]
    failures += _missing_data(ranks)
    for check, key, where, value, unit in _measured(found):
        limit = getattr(settings, key)
        allowed = "at most" if key.startswith("max") else "at least"
        if limit is None or (value is not None and (value <= limit if allowed == "at most" else value >= limit)):
            continue
        shown = "unknown" if value is None else f"{value:,.4g} {unit}"
        text = f"{where}: {shown}; preflight.{key} allows {limit:,.10g} {unit} {allowed}"
        failures.append(_failure(check, text, value=value, limit=limit))
    devices = [{"rank": rank["rank"], **one} for rank in ranks for one in rank["matmul"]]
    most = format_binary_bytes(found["max_bytes"])
    reduced = f"nothing above {most} was exchanged: that is what free memory allows"
    return {
        "passed": not failures,
        "failures": failures,
        "notes": [reduced] if found["max_bytes"] < settings.max_bytes else [],
        "slowest_link": slowest_link(found["links"]),
        "slowest_device": _slowest(devices, "flops_per_s"),
    }


def _failure(check: str, text: str, *, value: Any = None, limit: Any = None) -> dict[str, Any]:
    return {"check": check, "text": text, "value": value, "limit": limit}


def _missing_data(ranks: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the nodes that lack data.root, unless all do."""
    roots = [(rank, rank["data_root"]) for rank in _first_of_nodes(ranks) if rank["data_root"] is not None]
    if any(root["state"] != "missing" for _, root in roots):  # missing everywhere, it may yet be downloaded
        for rank, root in roots:
            if root["state"] != "there":
                text = f"data.root={root['path']} is {root['state']} on {_node(rank)}"
                yield _failure("data root", text, value=root["state"])


def _measured(found: Mapping[str, Any]) -> Iterator[tuple[str, str, str, float | None, str]]:
    """Yield what limits hold for: the check, the limit's key, what was measured, the value and its unit."""
    ranks = found["ranks"]
    for rank in ranks:
        clock = rank["clock"]
        yield "clocks", "max_clock_offset", rank["name"], abs(clock["ahead_s"]) - clock["error_s"], "s"
        for one in rank["matmul"]:
            yield "matmul", "min_matmul", f"{rank['name']} on {one['device']}", one["flops_per_s"] / 1e9, "GFLOP/s"
    for link in found["links"]:
        yield "latency", "max_latency", _link(link, ranks), link["latency_s"], "s"
        yield "link bandwidth", "min_link_bandwidth", _link(link, ranks), link["bytes_per_s"] / 1e6, "MB/s"
    for exchange in found["checks"]:
        if exchange["name"] == "all_reduce":
            best = max(point["bus_bytes_per_s"] for point in exchange["points"])
            yield "bus bandwidth", "min_bus_bandwidth", "all_reduce", best / 1e6, "MB/s"
    for check, key, fact in (("free_disk", "min_free_disk", "free_disk_bytes"), ("shm", "min_shm", "free_shm_bytes")):
        for rank in _first_of_nodes(ranks):
            yield check, key, _node(rank), None if rank[fact] is None else rank[fact] / 1e9, "GB"


def _first_of_nodes(ranks: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [rank for rank in ranks if rank["local_rank"] == 0]


def _node(rank: Mapping[str, Any]) -> str:
    return f"node {rank['node']}, {rank['host']}"


def _link(link: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> str:
    return " – ".join(ranks[number]["name"] for number in link["ranks"])


def _of_kind(kind: str, links: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [link for link in links if link["kind"] == kind]


# The slowest


def _slowest(found: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any] | None:
    """Return the one with the least `key`, compared with the median of all, which the page shows; None of none.

    times_slower is 1 for the only one.
    """
    if not found:
        return None
    slowest = min(found, key=lambda each: each[key])
    times = median(each[key] for each in found) / slowest[key]
    return {**slowest, "times_slower": times, "stands_out": times >= STANDS_OUT}


def slowest_link(links: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the link that is slowest compared with others of its kind; None without links."""
    kinds = (_slowest(_of_kind(kind, links), "bytes_per_s") for kind in (WITHIN, BETWEEN))
    found = [link for link in kinds if link is not None]
    return max(found, key=lambda each: (each["times_slower"], -each["bytes_per_s"]), default=None)


# The terminal


def slowest_lines(result: Mapping[str, Any]) -> list[str]:
    """Return which link and which rank is slowest, as far as there are several."""
    ranks, link, device = result["ranks"], result["slowest_link"], result["slowest_device"]
    lines = []
    if link is not None:
        speed, compared = format_rate(link["bytes_per_s"]), _times_slower(link, f"the median {link['kind']}")
        lines.append(f"slowest link: {_link(link, ranks)}: {speed}, {compared}")
    if sum(len(rank["matmul"]) for rank in ranks) > 1:
        rank, speed = ranks[device["rank"]]["name"], format_rate(device["flops_per_s"], "FLOP/s")
        lines.append(f"slowest rank: {rank} on {device['device']}: {speed}, {_times_slower(device, 'the median')}")
    return lines


def _times_slower(found: Mapping[str, Any], median: str) -> str:
    if found["times_slower"] < 1.05:
        return f"as fast as {median}"
    stands_out = ", which stands out" if found["stands_out"] else ""
    return f"{found['times_slower']:.1f} times slower than {median}{stands_out}"


def verdict(result: Mapping[str, Any]) -> str:
    """Return a line that says if it passed or which checks failed, and one for each of the first failures."""
    took, failures, number = f"in {result['took_s']:.1f} s", result["failures"], len(result["ranks"])
    if result["passed"]:
        return f"Preflight passed {took}: {f'{number} ranks, every value right' if number > 1 else '1 rank'}"
    lines = [f"Preflight failed {took}: {', '.join(dict.fromkeys(each['check'] for each in failures))}"]
    lines += [f"  {each['check']}: {each['text']}" for each in failures[:_MAX_FAILURES]]
    if len(failures) > _MAX_FAILURES:
        lines.append(f"  … and {len(failures) - _MAX_FAILURES} more")
    return "\n".join(lines)


def render(found: Mapping[str, Any]) -> str:
    """Return the page that is printed: machines, exchanges, the slowest, the verdict."""
    parts = [_ranks_table(found["ranks"])]
    parts += [f"Node {rank['node']}\n{rank['interconnect']}" for rank in found["ranks"] if rank["interconnect"]]
    if found["links"]:
        parts += [format_facts(_barriers_and_links(found)), *_exchange_tables(found)]
    parts += [
        "\n".join(lines) for lines in ([f"Note: {note}" for note in found["notes"]], slowest_lines(found)) if lines
    ]
    return "\n\n".join([*parts, verdict(found)])


def _ranks_table(ranks: Sequence[Mapping[str, Any]]) -> str:
    rows: list[tuple[str, ...]] = [("rank", "node", "device", "matmul", "clock", "disk", "/dev/shm", "data root")]
    for rank in ranks:
        devices = ", ".join(f"{one['device']} {one['name']}".strip() for one in rank["devices"])
        ahead_s, error_s = rank["clock"]["ahead_s"], rank["clock"]["error_s"]
        clock = f"{'+' if ahead_s >= 0 else '-'}{format_seconds(abs(ahead_s))} ±{format_seconds(error_s)}"
        free = (rank["free_disk_bytes"], rank["free_shm_bytes"])
        rows.append(
            (
                str(rank["rank"]),
                f"{rank['node']} {rank['host']}",
                devices,
                ", ".join(format_rate(one["flops_per_s"], "FLOP/s") for one in rank["matmul"]),
                clock if rank["node"] > 0 else _NONE,
                *(_NONE if size_bytes is None else format_binary_bytes(size_bytes) for size_bytes in free),
                _NONE if rank["data_root"] is None else rank["data_root"]["state"],
            )
        )
    return format_table(rows)


def _barriers_and_links(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a row for barriers, and one for each kind of links."""
    yield "barrier", format_seconds(max(rank["barrier_s"] for rank in found["ranks"]))
    for kind, number in found["num_links"].items():
        if links := _of_kind(kind, found["links"]):
            latency, speed = (median(link[key] for link in links) for key in ("latency_s", "bytes_per_s"))
            measured = f"{len(links):,} of {number:,} links {kind}, {len(links[0]['round_trips_s'])} rounds each"
            rates = f"{format_rate(speed)} at {format_binary_bytes(links[0]['bytes'])}"
            yield "ping-pong", f"{measured}; median {format_seconds(latency)} one way, {rates}"


def _exchange_tables(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of times and one of bandwidths: a column for each exchange, a row for each size."""
    checks = found["checks"]
    for title, key, form, least in (
        ("time of one", "seconds", format_seconds, 0),
        ("bus bandwidth", "bus_bytes_per_s", format_rate, _TINY_BYTES),
    ):
        columns = [{p["size_bytes"]: form(p[key]) for p in check["points"]} for check in checks]
        sizes = [size for size in max(columns, key=len, default={}) if size >= least]
        rows = [[format_binary_bytes(size), *(column.get(size, _NONE) for column in columns)] for size in sizes]
        yield format_table([[title, *(check["name"] for check in checks)], *rows])

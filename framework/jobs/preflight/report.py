"""Judge what all ranks measured (failures, notes, the slowest), and print it. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from framework.config.schema import PreflightConfig
from framework.system.formatting import format_binary_bytes, format_facts, format_rate, format_seconds, format_table

RESULT = "preflight.json"
# Kinds of links.
WITHIN = "within nodes"
BETWEEN = "between nodes"
# Times slower than the median from which a link or a device stands out.
STANDS_OUT = 2.0

_NONE = "–"
_MAX_FAILURES = 10
# Bandwidths of smaller buffers say nothing.
_TINY_BYTES = 1024


def assess(found: Mapping[str, Any], settings: PreflightConfig) -> dict[str, Any]:
    """Return passed, failures, notes, slowest_link and slowest_device, as preflight.json has them.

    found: its ranks, checks, links and faults.
    """
    ranks = found["ranks"]
    failures = []
    for fault in found["faults"]:
        name = ranks[fault["rank"]]["name"]
        failures.append(_failure(fault["check"], f"{name}: {fault['text']}"))
    failures += _missing_data(ranks)
    for check, key, where, value, unit in _measured(found):
        limit = getattr(settings, key)
        if limit is None or _is_allowed(key, value, limit):
            continue
        allowed = "at most" if key.startswith("max") else "at least"
        measured = "unknown"
        if value is not None:
            measured = f"{value:,.4g} {unit}"
        text = f"{where}: {measured}; preflight.{key} allows {limit:,.10g} {unit} {allowed}"
        failures.append(_failure(check, text, value=value, limit=limit))

    notes = []
    if found["max_bytes"] < settings.max_bytes:
        largest = format_binary_bytes(found["max_bytes"])
        notes.append(f"nothing above {largest} was exchanged: that is what free memory allows")
    devices = []
    for rank in ranks:
        devices += [{"rank": rank["rank"], **device} for device in rank["matmul"]]
    return {
        "passed": not failures,
        "failures": failures,
        "notes": notes,
        "slowest_link": slowest_link(found["links"]),
        "slowest_device": _slowest(devices, "flops_per_s"),
    }


def _is_allowed(key: str, value: float | None, limit: float) -> bool:
    if value is None:
        return False
    if key.startswith("max"):
        return value <= limit
    return value >= limit


def _failure(check: str, text: str, *, value: Any = None, limit: Any = None) -> dict[str, Any]:
    return {"check": check, "text": text, "value": value, "limit": limit}


def _missing_data(ranks: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the nodes that lack data.root, unless all do."""
    firsts = [rank for rank in _first_of_nodes(ranks) if rank["data_root"] is not None]
    # If it is missing everywhere, it may yet be downloaded.
    if all(rank["data_root"]["state"] == "missing" for rank in firsts):
        return
    for rank in firsts:
        root = rank["data_root"]
        if root["state"] != "there":
            text = f"data.root={root['path']} is {root['state']} on {_node(rank)}"
            yield _failure("data root", text, value=root["state"])


def _measured(found: Mapping[str, Any]) -> Iterator[tuple[str, str, str, float | None, str]]:
    """Yield what limits hold for: the check, the limit's key, what was measured, the value and its unit."""
    ranks = found["ranks"]
    for rank in ranks:
        clock = rank["clock"]
        yield "clocks", "max_clock_offset", rank["name"], abs(clock["ahead_s"]) - clock["error_s"], "s"
        for device in rank["matmul"]:
            where = f"{rank['name']} on {device['device']}"
            yield "matmul", "min_matmul", where, device["flops_per_s"] / 1e9, "GFLOP/s"
    for link in found["links"]:
        yield "latency", "max_latency", _link(link, ranks), link["latency_s"], "s"
        yield "link bandwidth", "min_link_bandwidth", _link(link, ranks), link["bytes_per_s"] / 1e6, "MB/s"
    for exchange in found["checks"]:
        if exchange["name"] == "all_reduce":
            best = max(point["bus_bytes_per_s"] for point in exchange["points"])
            yield "bus bandwidth", "min_bus_bandwidth", "all_reduce", best / 1e6, "MB/s"
    for rank in _first_of_nodes(ranks):
        yield "free_disk", "min_free_disk", _node(rank), _gigabytes(rank["free_disk_bytes"]), "GB"
    for rank in _first_of_nodes(ranks):
        yield "shm", "min_shm", _node(rank), _gigabytes(rank["free_shm_bytes"]), "GB"


def _gigabytes(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / 1e9


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
    slowest = min(found, key=lambda entry: entry[key])
    times = median(entry[key] for entry in found) / slowest[key]
    return {**slowest, "times_slower": times, "stands_out": times >= STANDS_OUT}


def slowest_link(links: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the link that is slowest compared with others of its kind; None without links."""
    slowest = []
    for kind in (WITHIN, BETWEEN):
        link = _slowest(_of_kind(kind, links), "bytes_per_s")
        if link is not None:
            slowest.append(link)
    return max(slowest, key=lambda link: (link["times_slower"], -link["bytes_per_s"]), default=None)


# The terminal


def slowest_lines(result: Mapping[str, Any]) -> list[str]:
    """Return which link and which rank is slowest, as far as there are several."""
    ranks = result["ranks"]
    lines = []
    link = result["slowest_link"]
    if link is not None:
        speed = format_rate(link["bytes_per_s"])
        compared = _times_slower(link, f"the median {link['kind']}")
        lines.append(f"slowest link: {_link(link, ranks)}: {speed}, {compared}")
    if sum(len(rank["matmul"]) for rank in ranks) > 1:
        device = result["slowest_device"]
        name = ranks[device["rank"]]["name"]
        speed = format_rate(device["flops_per_s"], "FLOP/s")
        lines.append(f"slowest rank: {name} on {device['device']}: {speed}, {_times_slower(device, 'the median')}")
    return lines


def _times_slower(found: Mapping[str, Any], median: str) -> str:
    if found["times_slower"] < 1.05:
        return f"as fast as {median}"
    stands_out = ", which stands out" if found["stands_out"] else ""
    return f"{found['times_slower']:.1f} times slower than {median}{stands_out}"


def verdict(result: Mapping[str, Any]) -> str:
    """Return a line that says if it passed or which checks failed, and one for each of the first failures."""
    took = f"in {result['took_s']:.1f} s"
    num_ranks = len(result["ranks"])
    if result["passed"]:
        what = "1 rank"
        if num_ranks > 1:
            what = f"{num_ranks} ranks, every value right"
        return f"Preflight passed {took}: {what}"

    failures = result["failures"]
    checks = dict.fromkeys(failure["check"] for failure in failures)
    lines = [f"Preflight failed {took}: {', '.join(checks)}"]
    lines += [f"  {failure['check']}: {failure['text']}" for failure in failures[:_MAX_FAILURES]]
    if len(failures) > _MAX_FAILURES:
        lines.append(f"  … and {len(failures) - _MAX_FAILURES} more")
    return "\n".join(lines)


def render(found: Mapping[str, Any]) -> str:
    """Return the page that is printed: machines, exchanges, the slowest, the verdict."""
    parts = [_ranks_table(found["ranks"])]
    for rank in found["ranks"]:
        if rank["interconnect"]:
            parts.append(f"Node {rank['node']}\n{rank['interconnect']}")
    if found["links"]:
        parts.append(format_facts(_barriers_and_links(found)))
        parts += _exchange_tables(found)
    if found["notes"]:
        parts.append("\n".join(f"Note: {note}" for note in found["notes"]))
    slowest = slowest_lines(found)
    if slowest:
        parts.append("\n".join(slowest))
    parts.append(verdict(found))
    return "\n\n".join(parts)


def _ranks_table(ranks: Sequence[Mapping[str, Any]]) -> str:
    rows: list[tuple[str, ...]] = [("rank", "node", "device", "matmul", "clock", "disk", "/dev/shm", "data root")]
    for rank in ranks:
        devices = [f"{device['device']} {device['name']}".strip() for device in rank["devices"]]
        speeds = [format_rate(device["flops_per_s"], "FLOP/s") for device in rank["matmul"]]
        clock = _NONE
        if rank["node"] > 0:
            clock = _clock(rank["clock"])
        data_root = _NONE
        if rank["data_root"] is not None:
            data_root = rank["data_root"]["state"]
        rows.append(
            (
                str(rank["rank"]),
                f"{rank['node']} {rank['host']}",
                ", ".join(devices),
                ", ".join(speeds),
                clock,
                _size(rank["free_disk_bytes"]),
                _size(rank["free_shm_bytes"]),
                data_root,
            )
        )
    return format_table(rows)


def _clock(clock: Mapping[str, float]) -> str:
    """Return how far a clock is ahead of rank 0's."""
    ahead_s = clock["ahead_s"]
    sign = "+" if ahead_s >= 0 else "-"
    return f"{sign}{format_seconds(abs(ahead_s))} ±{format_seconds(clock['error_s'])}"


def _size(size_bytes: int | None) -> str:
    return _NONE if size_bytes is None else format_binary_bytes(size_bytes)


def _barriers_and_links(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a row for barriers, and one for each kind of links."""
    slowest_s = max(rank["barrier_s"] for rank in found["ranks"])
    yield "barrier", format_seconds(slowest_s)
    for kind, number in found["num_links"].items():
        links = _of_kind(kind, found["links"])
        if not links:
            continue
        latency_s = median(link["latency_s"] for link in links)
        speed = format_rate(median(link["bytes_per_s"] for link in links))
        size = format_binary_bytes(links[0]["bytes"])
        rounds = len(links[0]["round_trips_s"])
        measured = f"{len(links):,} of {number:,} links {kind}, {rounds} rounds each"
        yield "ping-pong", f"{measured}; median {format_seconds(latency_s)} one way, {speed} at {size}"


def _exchange_tables(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of times and one of bandwidths: a column for each exchange, a row for each size."""
    checks = found["checks"]
    yield _exchange_table("time of one", checks, key="seconds", form=format_seconds, least_bytes=0)
    yield _exchange_table("bus bandwidth", checks, key="bus_bytes_per_s", form=format_rate, least_bytes=_TINY_BYTES)


def _exchange_table(
    title: str, checks: Sequence[Mapping[str, Any]], *, key: str, form: Callable[[float], str], least_bytes: int
) -> str:
    """Return a table of one value of each exchange and size. form: returns a value as text."""
    columns = []
    for check in checks:
        columns.append({point["size_bytes"]: form(point[key]) for point in check["points"]})
    rows = [[title, *(check["name"] for check in checks)]]
    # Time may not have reached for all sizes of every exchange.
    for size_bytes in max(columns, key=len, default={}):
        if size_bytes >= least_bytes:
            cells = [column.get(size_bytes, _NONE) for column in columns]
            rows.append([format_binary_bytes(size_bytes), *cells])
    return format_table(rows)

"""What `job=preflight` prints, from the object that it writes: machines, exchanges, the slowest, the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from framework.preflight.wording import amount, device_line, flops, link_line, rate, seconds_text, verdict

_NONE = "–"
_SHOWN_RANKS = 32
_DEVICE_CHARS = 32
_TINY_BYTES = 1024


def render(found: Mapping[str, Any]) -> str:
    """The page; a line is as long as it takes."""
    parts = [_table(_ranks(found))]
    if len(found["ranks"]) > _SHOWN_RANKS:
        parts[-1] += f"\n  … and {len(found['ranks']) - _SHOWN_RANKS} more ranks"
    parts += [f"Node {node}\n{text}" for node, text in found["interconnects"].items()]
    if found["checks"]:
        parts += [_rows(_talks(found)), _exchanges(found, "seconds"), _exchanges(found, "bus_bytes_per_s")]
    if found["notes"]:
        parts.append("\n".join(f"Note: {note}" for note in found["notes"]))
    named = [line for line in (link_line(found), device_line(found)) if line is not None]
    return "\n\n".join(["", *parts, *(["\n".join(named)] if named else []), verdict(found)]).lstrip("\n")


def _ranks(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("rank", "node", "device", "matmul", "clock", "late", "disk", "/dev/shm", "data root")
    ]
    for rank in found["ranks"][:_SHOWN_RANKS]:
        devices = ", ".join(f"{one['device']} {one['name']}".strip() for one in rank["devices"])
        rows.append(
            (
                str(rank["rank"]),
                f"{rank['node']} {rank['host']}",
                devices if len(devices) <= _DEVICE_CHARS else f"{devices[: _DEVICE_CHARS - 1]}…",
                ", ".join(flops(one["flops_per_s"]) for one in rank["matmul"]),
                _clock(rank),
                seconds_text(rank["late_s"]) if len(found["ranks"]) > 1 else _NONE,
                *(_NONE if rank[key] is None else amount(rank[key]) for key in ("free_disk_bytes", "free_shm_bytes")),
                _NONE if rank["data_root"] is None else rank["data_root"]["state"],
            )
        )
    return rows


def _clock(rank: Mapping[str, Any]) -> str:
    if rank["node"] == 0:  # where rank 0 is
        return _NONE
    clock = rank["clock"]
    sign = "+" if clock["ahead_s"] >= 0 else "-"
    return f"{sign}{seconds_text(abs(clock['ahead_s']))} ±{seconds_text(clock['error_s'])}"


def _talks(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    ranks = found["ranks"]
    turns = [rank["turn"] for rank in ranks]
    order = "in order, rank 0 first" if turns == sorted(turns) else "NOT in order: " + ", ".join(map(str, turns))
    late = [rank["late_sender"] for rank in ranks if rank["late_sender"] is not None]
    stuck = sum(not each["overlapped"] for each in late)
    told = f"{stuck} of {len(late)} receivers were HELD UP" if stuck else f"{len(late)} receivers went on meanwhile"
    waited, posted = (max(each[key] for each in late) for key in ("total_s", "posted_s"))
    return [
        ("barrier", f"{order}; {seconds_text(max(rank['barrier_s'] for rank in ranks))}"),
        *_links(found),
        (
            "isend/irecv",
            f"{told}: free after {seconds_text(posted)}; what was sent late was there after {seconds_text(waited)}",
        ),
    ]


def _links(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """One row for each kind of them."""
    both = all(found["num_links"].values())
    name = "ping-pong"
    for kind, where in (("within_node", "within nodes: "), ("between_nodes", "between nodes: ")):
        there_are = found["num_links"][kind]
        links = [link for link in found["links"] if link["is_within_node"] == (kind == "within_node")]
        if links:
            number = f"{len(links):,} of {there_are:,} links" if there_are > 1 else "1 link"
            latency, speed = (median(link[key] for link in links) for key in ("latency_s", "compared_bytes_per_s"))
            yield (
                name,
                (
                    f"{where if both else ''}{number}, {len(links[0]['round_trips_s'])} rounds each; median "
                    f"{seconds_text(latency)} one way, {rate(speed)} at {amount(links[0]['compared_bytes'])}"
                ),
            )
            name = ""


def _exchanges(found: Mapping[str, Any], key: str) -> str:
    """One column for each exchange, one row for each size."""
    checks = [check for check in found["checks"] if check["points"]]
    wrong = {fault["check"] for fault in found["faults"]}
    by_size = [{point["size_bytes"]: point for point in check["points"]} for check in checks]
    title = "time of one" if key == "seconds" else "bus bandwidth"
    shown = sorted({size for points in by_size for size in points})
    if key != "seconds":  # of what is tiny it says nothing
        shown = [size for size in shown if size >= _TINY_BYTES] or shown[-1:]
    rows = [(title, *(f"{check['name']} WRONG" if check["name"] in wrong else check["name"] for check in checks))]
    for size in shown:
        cells = [_cell(points.get(size), key) for points in by_size]
        rows.append((amount(size), *cells))
    return _table(rows)


def _cell(point: Mapping[str, Any] | None, key: str) -> str:
    if point is None:
        return _NONE
    return seconds_text(point[key]) if key == "seconds" else rate(point[key])


def _rows(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"  {name:<12} {text}" for name, text in rows)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )

"""What of all that was found is a failure, and which of it is named. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from framework.config.schema import PreflightConfig
from framework.preflight.arithmetic import slow_ends, slowest_device, slowest_link
from framework.preflight.wording import amount, flops, rank_label, rate, seconds_text

_MB, _GB, _GFLOP = 1e6, 1e9, 1e9


def assess(found: Mapping[str, Any], settings: PreflightConfig) -> dict[str, Any]:
    """What preflight.json says of what was `found`: passed, failures, notes, slowest_link, slow_nodes, slowest_device.

    found: ranks, checks, links, num_links and faults (check, rank, text), as they are in it.
    """
    failures = [
        *_wrong_values(found),
        *_held_up(found["ranks"]),
        *_differing_versions(found["ranks"]),
        *_data_roots(found["ranks"]),
        *_limits(found, settings),
    ]
    return {
        "passed": not failures,
        "failures": failures,
        "notes": list(_notes(found)),
        "slowest_link": slowest_link(found["links"]),
        "slow_nodes": slow_ends(found["links"]),
        "slowest_device": slowest_device(found["ranks"]),
    }


def _failure(check: str, text: str, *, value: Any = None, limit: Any = None) -> dict[str, Any]:
    return {"check": check, "text": text, "value": value, "limit": limit}


def _wrong_values(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for fault in found["faults"]:
        what = "not in order" if fault["check"] == "barrier" else "wrong values"
        yield _failure(fault["check"], f"{what} on rank {fault['rank']}: {fault['text']}")


def _held_up(ranks: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for rank in ranks:
        late = rank["late_sender"]
        if late is not None and not late["overlapped"]:
            held, source = rank_label(rank, ranks), rank_label(ranks[late["source"]], ranks)
            text = f"irecv held {held} up for {seconds_text(late['posted_s'])}, until {source} sent without its word"
            yield _failure("isend/irecv", f"{text}: nothing goes on beside a receive", value=late["posted_s"])


def _differing_versions(ranks: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of the rank before all: those that differ from it, each version named once."""
    for name in sorted({name for rank in ranks for name in rank["versions"]}):
        first = ranks[0]["versions"].get(name)
        others: dict[str | None, list[int]] = {}
        for rank in ranks:
            others.setdefault(rank["versions"].get(name), []).append(rank["rank"])
        others.pop(first)
        for version, which in others.items():
            where = f"rank{'s' if len(which) > 1 else ''} {', '.join(map(str, which))}"
            yield _failure("versions", f"{name} is {version or 'none'} on {where}, and {first or 'none'} on rank 0")


def _data_roots(ranks: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    asked = [rank for rank in ranks if rank["data_root"] is not None]
    all_missing = all(rank["data_root"]["state"] == "missing" for rank in asked)
    for rank in _one_of_each_node(asked):
        path, state = rank["data_root"]["path"], rank["data_root"]["state"]
        if state == "not readable" or (state == "missing" and not all_missing):
            elsewhere = " and there on another node" if state == "missing" else ""
            yield _failure("data root", f"data.root={path} is {state} on {_node(rank)}{elsewhere}", value=state)


def _limits(found: Mapping[str, Any], settings: PreflightConfig) -> Iterator[dict[str, Any]]:
    ranks, links = found["ranks"], found["links"]
    if settings.max_clock_offset is not None:
        for rank in ranks:
            ahead, error = rank["clock"]["ahead_s"], rank["clock"]["error_s"]
            if abs(ahead) - error > settings.max_clock_offset:
                where = f"the clock of rank {rank['rank']} ({_node(rank)})"
                text = f"{where} is {seconds_text(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} rank 0's"
                yield _failure(
                    "clocks", _beyond(text, "max_clock_offset", settings.max_clock_offset, unit="s"),
                    value=ahead, limit=settings.max_clock_offset,
                )  # fmt: skip
    for link in links:
        if settings.max_latency is not None and link["latency_s"] > settings.max_latency:
            text = _beyond(f"the way {_between(link, ranks)} takes {seconds_text(link['latency_s'])}", "max_latency",
                           settings.max_latency, unit="s")  # fmt: skip
            yield _failure("latency", text, value=link["latency_s"], limit=settings.max_latency)
        least = settings.min_link_bandwidth
        if least is not None and link["bytes_per_s"] < least * _MB:
            carried = f"{rate(link['bytes_per_s'])} at {amount(link['bytes'])}"
            text = _beyond(f"the link {_between(link, ranks)} carries {carried}", "min_link_bandwidth", least,
                           unit="MB/s")  # fmt: skip
            yield _failure("link bandwidth", text, value=link["bytes_per_s"] / _MB, limit=least)
    yield from _exchange_limits(found, settings)
    yield from _machine_limits(ranks, settings)


def _between(link: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> str:
    one, other = (rank_label(ranks[number], ranks) for number in link["ranks"])
    return f"between {one} and {other}"


def _exchange_limits(found: Mapping[str, Any], settings: PreflightConfig) -> Iterator[dict[str, Any]]:
    least, best = settings.min_bus_bandwidth, best_bus(found)
    if least is not None and best is not None and best < least * _MB:
        text = _beyond(f"the bus bandwidth of all_reduce is {rate(best)}", "min_bus_bandwidth", least, unit="MB/s")
        yield _failure("bus bandwidth", text, value=best / _MB, limit=least)


def _machine_limits(ranks: Sequence[Mapping[str, Any]], settings: PreflightConfig) -> Iterator[dict[str, Any]]:
    if settings.min_matmul is not None:
        for rank in ranks:
            for one in rank["matmul"]:
                if one["flops_per_s"] < settings.min_matmul * _GFLOP:
                    text = f"{one['device']} of rank {rank['rank']} ({_node(rank)}) does {flops(one['flops_per_s'])}"
                    yield _failure(
                        "matmul", _beyond(text, "min_matmul", settings.min_matmul, unit="GFLOP/s"),
                        value=one["flops_per_s"] / _GFLOP, limit=settings.min_matmul,
                    )  # fmt: skip
    rooms = (
        ("free_disk_bytes", "min_free_disk", settings.min_free_disk, "for the run directory"),
        ("free_shm_bytes", "min_shm", settings.min_shm, "in /dev/shm"),
    )
    for fact, key, least, where in rooms:
        for rank in _one_of_each_node(ranks) if least is not None else ():
            free = rank[fact]
            if least is not None and (free is None or free < least * _GB):
                known = "an unknown amount is" if free is None else f"{amount(free)} are"
                text = _beyond(f"{known} free {where} of {_node(rank)}", key, least, unit="GB")
                yield _failure(key.removeprefix("min_"), text, value=None if free is None else free / _GB, limit=least)


def _beyond(what: str, key: str, limit: float, *, unit: str) -> str:
    return f"{what}; preflight.{key} allows {limit:,.10g} {unit} at {'most' if key.startswith('max') else 'least'}"


def _notes(found: Mapping[str, Any]) -> Iterator[str]:
    ranks = found["ranks"]
    asked = [rank["data_root"] for rank in ranks if rank["data_root"] is not None]
    if asked and all(root["state"] == "missing" for root in asked):
        yield f"data.root={asked[0]['path']} isn't there yet"
    for check in found["checks"]:
        if check.get("unsupported"):
            yield f"{check['name']} is not supported by {found['backend']}: {check['unsupported']}"
    limit = found["sizes"]["limited_by"]
    if limit is not None:
        yield f"nothing above {amount(found['sizes']['max_bytes'])} was exchanged: {limit}"
    cut = {check["name"]: check["cut_at_bytes"] for check in found["checks"] if check.get("cut_at_bytes")}
    if cut:
        shown = ", ".join(f"{name} after {amount(size)}" for name, size in cut.items())
        yield f"preflight.seconds={found['seconds']:g} ended the growth of sizes: {shown}"
    yield from _links_left_out(found)
    if len(ranks) == 1:
        yield "one process has nobody to talk to: nothing was exchanged"


def _links_left_out(found: Mapping[str, Any]) -> Iterator[str]:
    for kind, where in (("within_node", "within nodes"), ("between_nodes", "between nodes")):
        measured = sum(link["is_within_node"] == (kind == "within_node") for link in found["links"])
        if measured < found["num_links"][kind]:
            yield (
                f"preflight.seconds={found['seconds']:g} ended the measuring of links {where}: "
                f"{measured:,} of {found['num_links'][kind]:,}"
            )


def best_bus(found: Mapping[str, Any]) -> float | None:
    """The best bus bandwidth of all_reduce, in bytes a second; None where it wasn't measured."""
    points = [point for check in found["checks"] if check["name"] == "all_reduce" for point in check["points"]]
    return max((point["bus_bytes_per_s"] for point in points), default=None)


def _one_of_each_node(ranks: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return list({rank["node"]: rank for rank in reversed(ranks)}.values())[::-1]


def _node(rank: Mapping[str, Any]) -> str:
    return f"node {rank['node']}, {rank['host']}"

"""What a preflight finds, made up: two nodes with two ranks each, where all is well."""

from __future__ import annotations

from typing import Any

NODES = (0, 0, 1, 1)
PAIRS = ((0, 1), (0, 2), (1, 3), (2, 3))
STUCK = {"source": 2, "posted_s": 20.0, "worked_s": 0.05, "total_s": 20.05, "overlapped": False}


def link(one: int, other: int, *, bytes_per_s: float = 1e9, latency_s: float = 1e-4) -> dict[str, Any]:
    nodes = [NODES[one], NODES[other]]
    return {
        **{"ranks": [one, other], "nodes": nodes, "is_within_node": nodes[0] == nodes[1]},
        **{"bytes_per_s": bytes_per_s, "bytes": 2**22, "latency_s": latency_s, "round_trips_s": [2 * latency_s] * 10},
        **{"compared_bytes_per_s": bytes_per_s / 2, "compared_bytes": 2**18},
    }


def rank(number: int, **changes: Any) -> dict[str, Any]:
    facts = {"rank": number, "node": NODES[number], "host": f"host{NODES[number] + 1}", "local_rank": number % 2}
    machine = {"free_disk_bytes": 50 * 10**9, "free_shm_bytes": 2 * 10**9, "data_root": None}
    own = {"clock": {"ahead_s": 0.0, "error_s": 1e-4}, "matmul": [{"device": "cpu", "flops_per_s": 4e10}]}
    late = {"source": (number - 1) % 4, "posted_s": 1e-5, "worked_s": 0.05, "total_s": 0.051, "overlapped": True}
    waited = {"turn": number + 1, "barrier_s": 1e-4, "late_s": 1e-5, "late_sender": late}
    devices = [{"device": "cpu", "name": "A processor with a very long name indeed"}]
    versions = {"python": "3.11.2", "torch": "2.15", "framework": "1"}
    return {**facts, **machine, **own, **waited, "devices": devices, "versions": versions, **changes}


def check(name: str, *, bus: float = 5e8, **changes: Any) -> dict[str, Any]:
    points = [
        {"size_bytes": size, "seconds": 1e-3, "bus_bytes_per_s": bus * share}
        for size, share in ((4, 0.01), (4096, 1.0), (16384, 0.5))
    ]
    return {"name": name, "unsupported": None, "cut_at_bytes": None, "points": points, **changes}


def found(**changes: Any) -> dict[str, Any]:
    """What `assess` is given."""
    return {
        **{"recipe": "toy", "backend": "gloo", "seconds": 20.0, "took_s": 1.25},
        **{"ranks": [rank(number) for number in range(4)], "links": [link(*pair) for pair in PAIRS]},
        "num_links": {"within_node": 2, "between_nodes": 2},
        **{"checks": [check("broadcast"), check("all_reduce")], "faults": [], "interconnects": {}},
        **{"sizes": {"max_bytes": 16384, "limited_by": None}, **changes},
    }

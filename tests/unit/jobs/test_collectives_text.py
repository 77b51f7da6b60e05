"""The page of `job=collectives`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from framework.jobs.collectives import render


def who(rank: int, *, interconnect: str | None = None) -> dict[str, Any]:
    return {
        **{"rank": rank, "local_rank": rank, "world_size": 20, "backend": "gloo", "node": 0, "host": "gpu01"},
        **{"pid": 100 + rank, "devices": [{"device": "cpu", "name": "A processor with a very long name, indeed"}]},
        **{"environment": {"RANK": str(rank), "MASTER_ADDR": None}, "interconnect": interconnect},
    }


def seen(before: Sequence[float], after: Sequence[float], *, seconds: float = 0.001, **more: Any) -> dict[str, Any]:
    def tensor(values: Sequence[float]) -> dict[str, Any]:
        return {"shape": [len(values)], "dtype": "float64", "values": list(values)}

    return {
        **{"before": tensor(before), "after": tensor(after), "seconds": seconds, "notes": [], "rounds": []},
        **more,
    }


def rendered(by_backend: dict[str, Any], *, ranks: int = 2, **of_first: Any) -> str:
    exchange = {"name": "all_reduce", "about": "Sums.", "code": ["dist.all_reduce(tensor)"], "by_backend": by_backend}
    return render(
        {
            "backends": {"gloo": "cpu", "nccl": "cuda"} if len(by_backend) > 1 else {"gloo": "cpu"},
            "ranks": [who(0, **of_first), *(who(rank) for rank in range(1, ranks))],
            "exchanges": [exchange],
        }
    )


def test_backends_stand_side_by_side() -> None:
    gloo = [seen([0], [1], seconds=0.001, notes=["waited"]), seen([1], [1], seconds=0.002)]
    nccl = [seen([0], [1], seconds=2e-5), seen([1], [1], seconds=3e-5)]
    text = rendered({"gloo": gloo, "nccl": nccl}, interconnect="GPU0 GPU1\nX NV12")
    assert "all_reduce\n  Sums.\n\n    dist.all_reduce(tensor)\n" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["0", "[0]", "[1]", "1", "ms", "20", "µs"] in lines
    assert "  rank 0: waited" in text
    assert lines[-2:] == [["exchange", "gloo", "(cpu)", "nccl", "(cuda)"], ["all_reduce", "2", "ms", "30", "µs"]]
    assert "Links between the GPUs of node 0 (nvidia-smi topo -m)\n\nGPU0 GPU1\nX NV12" in text
    assert "gave other values" not in text


def test_what_a_backend_lacks_or_gets_wrong_is_said() -> None:
    gloo, lacking = [seen([0], [1]), seen([1], [1])], [{"missing": "not offered by nccl: no"}] * 2
    assert "\n  not offered by nccl: no" in rendered({"gloo": gloo, "nccl": lacking})
    assert rendered({"gloo": gloo, "nccl": lacking}).endswith("  all_reduce  1 ms        –")
    wrong = [seen([0], [1]), seen([1], [2])]
    assert "nccl gave other values than gloo" in rendered({"gloo": gloo, "nccl": wrong})
    assert "Links between GPUs\n\n  none: " in rendered({"gloo": gloo})


def test_many_ranks_and_values_are_shortened_and_a_difference_is_told() -> None:
    many = [seen(range(100), [1.0] * 99 + [1 / 3], rounds=["↔ 1 [1:2]"] * 2) for _ in range(20)]
    text = rendered({"gloo": many}, ranks=20)
    assert text.count("… and 4 more ranks, in collectives.json") == 4
    assert "  [0, 1, 2, 3, 4, 5, 6, 7, 8, …, 99]  [1, 1, 1, 1, 1, 1, 1, …, 0.333333]  " in text
    assert "the largest difference from it is 98.7" in text
    assert max(map(len, text.splitlines())) <= 100

"""Where ranks disagree about collectives, from dumps that torch's flight recorder may have made."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.internals import compare_dumps

# torch's buffer.
MAX_ENTRIES = 2000
WORLD = {"0": ("default_pg", [0, 1, 2])}
PAIR = {"1": ("pair", [0, 1])}


def entry(number: int, *, group: str = "0", at_ns: int | None = None, **changes: Any) -> dict[str, Any]:
    """The record of a collective, as torch dumps it. number: within the group, from 1."""
    desc = {**WORLD, **PAIR}[group][0]
    plain = {
        "process_group": (group, desc),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "profiling_name": "gloo:all_reduce",
        "time_created_ns": number * 1000 if at_ns is None else at_ns,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "state": "scheduled",
        "is_p2p": False,
        "frames": [{"filename": "/home/me/torch/mine.py", "line": 5, "name": "step"}],
    }
    return {**plain, **changes}


def compared(tmp_path: Path, *ranks: Iterable[Mapping[str, Any]] | None) -> list[str]:
    """Return what is said of the ranks' records; None: a rank without a dump."""
    for rank, records in enumerate(ranks):
        if records is not None:
            numbered = [{"record_id": number, **record} for number, record in enumerate(records)]
            write(tmp_path, rank, numbered[-MAX_ENTRIES:])
    answer = compare_dumps({"prefix": str(tmp_path / "dump_"), "world_size": len(ranks)})
    assert "uncompared" not in answer, answer
    differences: list[str] = answer["collectives"]
    return differences


def write(tmp_path: Path, rank: int, entries: Sequence[Mapping[str, Any]]) -> None:
    groups = {}
    for name, (desc, members) in {**WORLD, **PAIR}.items():
        if rank in members:
            groups[name] = {"name": name, "desc": desc, "ranks": str(members)}
    dump = {"version": "2.10", "pg_config": groups, "entries": entries}
    (tmp_path / f"dump_{rank}").write_bytes(pickle.dumps(dump, protocol=2))


def steps(rank: int, number: int) -> list[dict[str, Any]]:
    """Each step has a collective of the pair, which rank 2 isn't in, and then one of all."""
    entries = []
    for step in range(1, number + 1):
        if rank < 2:
            entries.append(entry(step, group="1", at_ns=step * 1000 - 1))
        entries.append(entry(step))
    return entries


def test_ranks_with_other_groups_forget_other_collectives(tmp_path: Path) -> None:
    assert compared(tmp_path, steps(0, 3000), steps(1, 3000), steps(2, 3000)) == []


def test_the_collective_that_began_first_comes_first(tmp_path: Path) -> None:
    # Rank 1 doesn't join the pair's last one and waits for rank 0, which waits for it.
    in_pair = steps(0, 3000)[:-1]
    skips_it = [*steps(1, 2999), entry(3000)]
    first, second = compared(tmp_path, in_pair, skips_it, steps(2, 3000))
    at = "all_reduce of Float [4] at /home/me/torch/mine.py:5"
    assert first == f"collective 3000 of the group pair: rank 0 calls {at}; rank 1 never calls it"
    assert second == f"collective 3000: ranks 1–2 call {at}; rank 0 never calls it"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"input_dtypes": ["Double"], "output_dtypes": ["Double"]}, "all_reduce of Double [4]"),
        ({"profiling_name": "gloo:barrier", "input_sizes": [], "output_sizes": []}, "barrier"),
        ({"state": "started"}, "all_reduce of Float [4] at /home/me/torch/mine.py:5 (started)"),
    ],
)
def test_the_difference_is_said(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    agreed = entry(1)
    (difference,) = compared(tmp_path, [agreed, entry(2)], [agreed, entry(2, **change)], [agreed, entry(2)])
    assert difference.startswith("collective 2: ranks 0, 2 call all_reduce of Float [4] at ")
    assert f"; rank 1 calls {said}" in difference


def test_a_rank_without_a_dump_is_not_named(tmp_path: Path) -> None:
    (difference,) = compared(tmp_path, [entry(1)], [entry(1, input_sizes=[[5]])], None)
    assert "2" not in difference.partition("at /")[0]
    assert compared(tmp_path, [entry(1)]) == []


def test_a_damaged_dump_is_said(tmp_path: Path) -> None:
    write(tmp_path, 0, [{"record_id": 0, **entry(1)}])
    (tmp_path / "dump_1").write_bytes((tmp_path / "dump_0").read_bytes()[:50])
    answer = compare_dumps({"prefix": str(tmp_path / "dump_"), "world_size": 2})
    assert answer["uncompared"].startswith("torch's reader can't compare what the ranks recorded: ")

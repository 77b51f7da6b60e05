"""Values by which a mistake is seen, and what a rank says of itself; a group of one needs no other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from framework.config.parse import parse
from framework.errors import RunError
from framework.preflight.facts import data_root, facts, free_bytes
from framework.preflight.lines import difference, pattern, pattern_sum, under_way
from framework.preflight.running import Room, size_limit
from framework.run_dir import RunDir
from tests.unit.config.raw import raw_config
from tests.unit.simulated_ranks import CPU, cpu_context


def test_every_rank_and_every_place_has_its_value() -> None:
    whole = pattern(3, 2500, device=CPU)
    assert whole.dtype is torch.float32
    assert torch.equal(whole, whole.round())
    assert torch.equal(pattern(3, 50, device=CPU, begin=2450), whole[2450:])
    assert torch.equal(
        pattern_sum(3, 70, device=CPU, begin=5),
        torch.stack([pattern(rank, 75, device=CPU)[5:] for rank in range(3)]).sum(dim=0),
    )
    assert len({tuple(pattern(rank, 4, device=CPU).tolist()) for rank in range(256)}) == 256
    for block in (1, 2, 3, 4, 64, 1024, 2048):
        assert not torch.equal(whole[:32], whole.roll(block)[:32])


def test_what_is_wrong_is_told() -> None:
    expected = torch.arange(2000.0)
    assert difference(expected.clone(), expected) is None
    wrong = expected.clone()
    wrong[[7, 1500]] = torch.tensor([0.5, float("nan")])
    assert difference(wrong, expected) == "2 of 2,000 values are wrong; number 7 is 0.5 instead of 7"


def test_an_error_of_torchs_gets_the_name_of_the_check() -> None:
    said = r"^Preflight check all_reduce failed on rank 1 of 2: \[tcp\] Timed out$"
    with pytest.raises(RunError, match=said) as raised, under_way("all_reduce", cpu_context(1, world_size=2)):
        raise RuntimeError("[tcp] Timed out\nand more")
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_what_a_rank_says_of_itself(tmp_path: Path) -> None:
    config = parse(raw_config({"data.root": str(tmp_path)}))
    found = facts(config, cpu_context(), RunDir(tmp_path))
    assert found["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert found["data_root"] == {"path": str(tmp_path), "state": "there"}
    assert found["free_disk_bytes"] > 0
    assert [each["device"] for each in found["devices"]] == ["cpu"]
    assert found["driver"] is None


def test_where_the_data_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert data_root(None) is None
    states = [data_root(str(tmp_path / name)) for name in ("", "file", "none")]
    assert [state["state"] for state in states if state is not None] == ["there", "not readable", "missing"]
    assert free_bytes(tmp_path / "none") is None


def test_memory_limits_what_is_exchanged() -> None:
    asked = parse(raw_config({"preflight.max_bytes": 4096})).preflight
    ranks = [Room(number, "here", size_bytes) for number, size_bytes in enumerate((None, 5000, 2048))]
    assert size_limit(ranks[:2], asked) == {"max_bytes": 4096, "limited_by": None}
    assert size_limit(ranks[:1], asked) == {"max_bytes": 4096, "limited_by": None}
    limit = size_limit(ranks, asked)
    assert limit["max_bytes"] == 2048
    assert limit["limited_by"] == "the free memory of rank 2 (here) leaves 2 KiB for a buffer"

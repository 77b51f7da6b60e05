"""A model spread over two to four ranks: its numbers, its evaluation, and its checkpoints, which all ranks write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.checkpoint import load, read_manifest
from framework.launch.warm import WarmServer
from tests.helpers.ranks import left_by_ranks

pytestmark = pytest.mark.multiproc
Run = Callable[..., list[Any]]
PARAMETERS = 3 * 7 + 7 + 7 + 7 + 7 + 1


@pytest.fixture
def run(warm: WarmServer, tmp_path: Path) -> Run:
    """Runs an entry on `procs` ranks; gives what each left."""

    def call(entry: str, *, procs: int) -> list[Any]:
        return left_by_ranks(f"tests.multiproc.spread_entries:{entry}", procs=procs, warm=warm, folder=tmp_path)

    return call


@pytest.mark.parametrize(("before", "after"), [pytest.param(4, (3, 1), marks=pytest.mark.exhaustive), (2, (4,))])
def test_any_number_of_ranks_reads_what_another_wrote_bit_for_bit(
    run: Run, tmp_path: Path, before: int, after: tuple[int, ...]
) -> None:
    assert run("train_and_save", procs=before) == [8] * before
    folders = list(tmp_path.rglob("plain.pt"))
    assert len(folders) == 1
    directory = folders[0].parent / "checkpoints" / "step_00000008"
    assert read_manifest(directory).is_sharded
    for procs in after:
        ends = run("load_again", procs=procs)
        assert all(end["different"] == [] and end["step"] == 8 for end in ends)
        assert sum(end["held"] for end in ends) == PARAMETERS
    plain = torch.load(folders[0], weights_only=True)
    state = load(directory, map_location="cpu")
    assert all(torch.equal(value, plain[name]) for name, value in state["model"].items())
    entries = state["training"]["optimizer"]["state"]
    for number, entry in entries.items():
        assert all(torch.equal(value, plain[f"{number} {name}"]) for name, value in entry.items())
    assert len(plain) == len(state["model"]) + sum(map(len, entries.values()))


def test_a_disk_that_refuses_one_rank_costs_that_checkpoint_and_no_more(run: Run) -> None:
    (left, steps, warned), *others = run("fail_and_go_on", procs=3)
    assert left == ["last", "step_00000006", "step_00000008"]
    assert steps == [6, 8]
    assert "The shards of" in warned
    assert "rank 1: [Errno 28] No space left on device" in warned
    assert others == [[left, steps, None]] * 2


def test_all_ranks_hear_of_a_fault_of_one(run: Run) -> None:
    assert run("agree_on_a_fault", procs=3) == ["it changed; no room for 12"] * 3


def test_an_evaluation_counts_every_sample_once_though_ranks_have_unlike_many(run: Run) -> None:
    ends = run("evaluate_uneven_parts", procs=3)
    for found, wanted in ends:
        assert found == {size: pytest.approx(loss, rel=1e-5) for size, loss in wanted.items()}
        assert found == ends[0][0]


def test_gradients_are_measured_and_clipped_as_those_of_a_plain_model(run: Run) -> None:
    assert run("measure_gradients", procs=2) == [16, 16]


def test_a_step_that_overflows_on_one_rank_is_left_out_on_all(run: Run) -> None:
    assert run("leave_out_an_overflow", procs=2) == [[[], 0.5]] * 2

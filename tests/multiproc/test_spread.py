"""A model spread over two to four ranks: its numbers, its evaluation, and its checkpoints, which all ranks write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.checkpoint import load, read_manifest
from framework.config.schema import Precision
from framework.launch.warm import WarmServer
from tests.helpers.ranks import left_by_ranks
from tests.multiproc.spread_entries import PAIRS

pytestmark = pytest.mark.multiproc
Run = Callable[..., list[Any]]
PARAMETERS = 3 * 7 + 7 + 7 + 7 + 7 + 1


@pytest.fixture
def run(warm: WarmServer, tmp_path: Path) -> Run:
    """Runs an entry on `procs` ranks; gives what each left."""

    def call(entry: str, *, procs: int) -> list[Any]:
        return left_by_ranks(f"tests.multiproc.spread_entries:{entry}", procs=procs, warm=warm, folder=tmp_path)

    return call


ONE, COPIES = ("train_and_save", "load_again"), ("train_copies_and_save", "load_copies_again")


@pytest.mark.parametrize(
    ("before", "wrote", "after"),
    [
        pytest.param(4, ONE, ((3, ONE), (1, ONE)), marks=pytest.mark.exhaustive),
        pytest.param(2, ONE, ((4, ONE), (4, COPIES)), marks=pytest.mark.exhaustive),
        (4, COPIES, ((3, ONE),)),
    ],
    ids=["four", "two", "copies"],
)
def test_any_number_of_ranks_reads_what_another_wrote_bit_for_bit(
    run: Run, tmp_path: Path, before: int, wrote: tuple[str, str], after: tuple[tuple[int, tuple[str, str]], ...]
) -> None:
    """Also where each two of four have a copy of the model, and each part is written by one of those that hold it."""
    assert run(wrote[0], procs=before) == [8] * before
    folders = list(tmp_path.rglob("plain.pt"))
    assert len(folders) == 1
    directory = folders[0].parent / "checkpoints" / "step_00000008"
    assert read_manifest(directory).is_sharded
    for procs, reads in after:
        ends = run(reads[1], procs=procs)
        assert all(end["different"] == [] and end["step"] == 8 for end in ends)
        assert sum(end["held"] for end in ends) == PARAMETERS * (procs // 2 if reads is COPIES else 1)
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


def test_ranks_of_one_copy_wait_no_longer_than_all_would(run: Run) -> None:
    waited_in_vain, *others = run("wait_in_a_copy_in_vain", procs=4)
    assert "imed out" in waited_in_vain
    assert others == ["waited", "computed", "computed"]


def test_an_evaluation_counts_every_sample_once_though_ranks_have_unlike_many(run: Run) -> None:
    ends = run("evaluate_uneven_parts", procs=3)
    for found, wanted in ends:
        assert found == {size: pytest.approx(loss, rel=1e-5) for size, loss in wanted.items()}
        assert found == ends[0][0]


def test_every_number_format_ends_where_its_rule_does_in_one_process(run: Run) -> None:
    """To a unit of the format in which weights are kept; and those that round something are elsewhere without it."""
    ends = run("every_number_format", procs=2)
    assert ends[0] == ends[1]
    for (precision, param, reduce), (off, from_exact) in zip(PAIRS, ends[0], strict=True):
        asked = (precision, param, reduce)
        assert off <= {Precision.BF16: 2.0**-8, Precision.FP64: 1e-12}.get(precision, 2.0**-22), asked
        assert (from_exact < 1e-5) == (asked[1:] == (None, None) and precision in (Precision.FP32, Precision.FP64)), (
            asked
        )


def test_gradients_are_measured_and_clipped_as_those_of_a_plain_model(run: Run) -> None:
    assert run("measure_gradients", procs=2) == [16, 16]


def test_a_step_that_overflows_on_one_rank_is_left_out_on_all(run: Run) -> None:
    assert run("leave_out_an_overflow", procs=2) == [[[], 0.5]] * 2

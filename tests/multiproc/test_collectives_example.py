"""examples/collectives.py as it is typed: what each rank shows is what the exchange should have given it."""

from __future__ import annotations

import json
import re

import pytest

from tests.helpers.command import ROOT, run_python

pytestmark = pytest.mark.multiproc

EXAMPLE = str(ROOT / "examples" / "collectives.py")
Table = dict[str, list[list[str]]]


def run_example(procs: int) -> str:
    """Return what is printed by that many processes of torchrun."""
    torchrun = ("-m", "torch.distributed.run", f"--nproc-per-node={procs}")
    result = run_python(*torchrun, EXAMPLE, "--delay", "0.2", cwd=ROOT, timeout=110)
    assert result.returncode == 0, result.stderr
    return result.stdout


def rows_by_block(page: str) -> Table:
    """Return the rows of each block of the page, by the block's name."""
    rows: Table = {}
    for block in page.split("\n\n\n"):
        lines = re.findall(r"^  \d .*", block, re.MULTILINE)
        rows[block.splitlines()[0]] = [re.split(r" {2,}", line.strip()) for line in lines]
    return rows


def after(rows: Table, name: str) -> list[list[float]]:
    """Return what each rank has after an exchange."""
    values: list[list[float]] = [json.loads(row[2]) for row in rows[name]]
    return values


@pytest.mark.parametrize("procs", [3, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_every_exchange_gives_what_it_should(procs: int) -> None:
    """Rank r gives 10r, 10r + 1, …"""
    printed = run_example(procs)
    rows = rows_by_block(printed)
    ranks = range(procs)

    who = rows["Who each rank is, and what it reads from its environment (–: not set)"]
    assert [row[0] for row in who] == [str(rank) for rank in ranks]
    assert [row[3] for row in who] == [str(rank) for rank in ranks]
    assert len({row[2] for row in who}) == procs

    assert after(rows, "barrier") == [[rank + 1] for rank in ranks]
    # The last of an odd number of ranks has no partner.
    num_paired = procs - procs % 2
    assert after(rows, "ping_pong") == [[10.0 if rank < num_paired else 0.0] for rank in ranks]
    sums = [sum(range(1, rank + 2)) for rank in ranks]
    assert after(rows, "send_recv") == [[sums[-1]], *([total] for total in sums[1:])]
    senders = [rank - rank % 2 for rank in ranks]
    assert after(rows, "isend_irecv") == [[10 * rank, 10 * rank + 1] for rank in senders]

    columns = [[10 * rank + place for rank in ranks] for place in range(max(4, procs))]
    assert after(rows, "all_reduce") == [[sum(column) for column in columns[:4]]] * procs
    assert after(rows, "reduce_scatter") == [[sum(columns[rank])] for rank in ranks]
    assert after(rows, "all_gather") == [columns[0]] * procs
    mean = [sum(column) / procs for column in columns[:2]]
    assert after(rows, "butterfly") == [pytest.approx(mean, rel=1e-5)] * procs
    assert after(rows, "broadcast") == [[0, 1, 2, 3]] * procs
    assert after(rows, "all_to_all") == [columns[rank] for rank in ranks]

    assert "dist.all_reduce(tensor, op=dist.ReduceOp.SUM" in printed
    delays_ms = re.findall(r"isend returned after ([\d.]+) ms", printed)
    assert len(delays_ms) == procs // 2
    assert min(map(float, delays_ms)) >= 200


def test_one_process_shows_what_needs_no_other() -> None:
    rows = rows_by_block(run_example(1))
    assert "barrier" in rows
    assert "send_recv" not in rows
    assert after(rows, "all_reduce") == [[0, 1, 2, 3]]

"""`job=collectives` as it is typed: what each rank shows is what the exchange should have given it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from framework.command import compose

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_state")]

Train = Callable[..., Path]
SHOWN = ("job=collectives", "recipe=toy", "collectives.delay=0.2s")


def shown_in(run_dir: Path) -> dict[str, list[list[str]]]:
    """The rows of each block of the page, by the block's name."""
    blocks = (run_dir / "collectives.txt").read_text().split("\n\n\n")
    shown = {}
    for block in blocks:
        rows = re.findall(r"^  \d .*", block, re.MULTILINE)
        shown[block.splitlines()[0]] = [re.split(r" {2,}", row.strip()) for row in rows]
    return shown


def after(shown: dict[str, list[list[str]]], name: str) -> list[list[float]]:
    """What each rank has after an exchange."""
    values: list[list[float]] = [json.loads(row[2]) for row in shown[name]]
    return values


def assert_right(found: dict[str, list[list[str]]], procs: int) -> None:
    """Rank r gives 10r, 10r + 1, …"""
    ranks = range(procs)
    who = found["Who each rank is, and what it reads from its environment (–: not set)"]
    for rank, row in zip(ranks, who, strict=True):
        assert row[0] == row[4] == str(rank)
    # Every rank has its own pid.
    assert len({row[2] for row in who}) == procs
    assert after(found, "barrier") == [[rank + 1] for rank in ranks]
    # A rank beyond the largest power of two has no partner.
    last = procs - 1 if procs % 2 else procs
    assert after(found, "ping_pong") == [[10.0]] * last + [[0.0]] * (procs - last)
    assert after(found, "send_recv") == [[sum(range(1, (rank or procs - 1) + 2))] for rank in ranks]
    sent = [rank - 1 if rank % 2 else rank for rank in ranks]
    assert after(found, "isend_irecv") == [[10 * rank, 10 * rank + 1] for rank in sent]
    columns = []
    for place in range(max(4, procs)):
        columns.append([10 * rank + place for rank in ranks])
    assert after(found, "all_reduce") == [[sum(column) for column in columns[:4]]] * procs
    assert after(found, "reduce_scatter") == [[sum(columns[rank])] for rank in ranks]
    assert after(found, "all_gather") == [columns[0]] * procs
    mean = [sum(column) / procs for column in columns[: 1 << (procs.bit_length() - 1)]]
    # Values are compared as printed.
    assert after(found, "butterfly") == [pytest.approx(mean, rel=1e-5)] * procs
    assert after(found, "broadcast") == [[0, 1, 2, 3]] * procs
    assert after(found, "all_to_all") == [columns[rank] for rank in ranks]


@pytest.mark.parametrize("procs", [3, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (2, 5))])
def test_every_exchange_gives_what_it_should(train: Train, procs: int, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = train(*SHOWN, f"topology.procs_per_node={procs}")
    assert_right(shown_in(run_dir), procs)
    printed = capfd.readouterr().out
    assert f"Collectives of toy: {procs} processes, CPU" in printed
    assert "dist.all_reduce(tensor, op=dist.ReduceOp.SUM" in printed
    delays = re.findall(r"isend returned after ([\d.]+) ms", printed)
    assert len(delays) == procs // 2
    assert min(map(float, delays)) >= 200
    for rank in range(procs):
        assert "all_to_all over gloo" in (run_dir / "logs" / f"rank_{rank}.log").read_text()


def test_one_process_shows_what_needs_no_other(train: Train) -> None:
    shown = shown_in(train(*SHOWN, "launcher=in_process"))
    assert ("barrier" in shown, "send_recv" in shown) == (True, False)
    assert after(shown, "all_reduce") == [[0, 1, 2, 3]]


def test_nccl_without_gpus_is_refused_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert compose.main([*SHOWN, "collectives.backends=[gloo,nccl]"]) == 2
    said = capsys.readouterr().err
    assert "collectives.backends names nccl, which needs a GPU for each process, and these processes have none." in said
    assert not list(tmp_path.iterdir())

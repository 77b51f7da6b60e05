"""`job=collectives` as it is typed: what each rank shows is what the exchange should have given it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from framework import cli

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_state")]

Train = Callable[..., Path]
SHOWN = ("job=collectives", "recipe=toy", "collectives.delay=0.2s")


def found_in(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "collectives.json").read_text())
    return content


def seen(found: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """What each rank showed of an exchange over gloo."""
    (exchange,) = (each for each in found["exchanges"] if each["name"] == name)
    by_rank: list[dict[str, Any]] = exchange["by_backend"]["gloo"]
    return by_rank


def after(found: dict[str, Any], name: str) -> list[list[float]]:
    return [rank["after"]["values"] for rank in seen(found, name)]


def assert_right(found: dict[str, Any], procs: int) -> None:
    """Rank r gives 10r, 10r + 1, …"""
    ranks = range(procs)
    assert [rank["rank"] for rank in found["ranks"]] == list(ranks)
    assert len({rank["pid"] for rank in found["ranks"]}) == procs
    assert [rank["environment"]["RANK"] for rank in found["ranks"]] == [str(rank) for rank in ranks]
    assert after(found, "barrier") == [[rank + 1] for rank in ranks]
    last = procs - 1 if procs % 2 else procs  # who has no partner
    assert after(found, "ping_pong") == [[10.0 if rank < last else 0.0] for rank in ranks]
    assert after(found, "send_recv") == [[sum(range(1, (rank or procs - 1) + 2))] for rank in ranks]
    sent = [rank - 1 if rank % 2 else rank for rank in ranks]
    assert after(found, "isend_irecv") == [[10 * rank, 10 * rank + 1] for rank in sent]
    columns = [[10 * rank + place for rank in ranks] for place in range(max(4, procs))]
    assert after(found, "all_reduce") == [[sum(column) for column in columns[:4]]] * procs
    assert after(found, "reduce_scatter") == [[sum(columns[rank])] for rank in ranks]
    assert after(found, "all_gather") == [columns[0]] * procs
    mean = [sum(column) / procs for column in columns[: 1 << (procs.bit_length() - 1)]]
    assert after(found, "butterfly") == [pytest.approx(mean, rel=1e-15)] * procs
    assert after(found, "broadcast") == [[0, 1, 2, 3]] * procs
    assert after(found, "all_to_all") == [columns[rank] for rank in ranks]


@pytest.mark.parametrize("procs", [3, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (2, 5))])
def test_every_exchange_gives_what_it_should(train: Train, procs: int, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = train(*SHOWN, f"topology.procs_per_node={procs}")
    found = found_in(run_dir)
    assert_right(found, procs)
    sender, receiver = seen(found, "isend_irecv")[:2]
    assert min(sender["seconds"], receiver["seconds"]) >= 0.2
    printed = capfd.readouterr().out
    assert f"Collectives of toy: {procs} processes, CPU" in printed
    assert "dist.all_reduce(tensor, op=dist.ReduceOp.SUM" in printed
    for rank in range(procs):
        assert "all_to_all over gloo" in (run_dir / "logs" / f"rank_{rank}.log").read_text()


def test_one_process_shows_what_it_can_and_a_backend_what_it_offers(
    train: Train, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def lacking(*_: object, **__: object) -> None:
        raise RuntimeError("Backend gloo does not support reduce_scatter")

    monkeypatch.setattr(dist, "reduce_scatter_tensor", lacking)
    found = found_in(train(*SHOWN, "launcher=in_place"))
    assert seen(found, "send_recv") == [{"missing": "needs two processes"}]
    assert after(found, "all_reduce") == [[0, 1, 2, 3]]
    assert "  not offered by gloo: Backend gloo does not support reduce_scatter\n" in capfd.readouterr().out


def test_an_exchange_that_fails_is_named(
    train: Train, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "all_gather_into_tensor", failing)
    train(*SHOWN, "launcher=in_place", status=1)
    assert "all_gather over gloo failed on rank 0 of 1: Connection closed by peer" in capfd.readouterr().err


def test_nccl_without_gpus_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main([*SHOWN, "collectives.backends=[gloo,nccl]"]) == 2
    said = capsys.readouterr().err
    assert "collectives.backends names nccl, which needs a GPU for each process, and these processes have none." in said
    assert not list(tmp_path.iterdir())

"""The checkpoint to go on from: the newest whole one, which all ranks find, or the run is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from framework import restoring
from framework.checkpoint import whole
from framework.checkpoint.lookup import LastWhole
from framework.checkpoint.store import point
from framework.errors import CheckpointError, RunError
from framework.run_dir import RunDir
from tests.unit.checkpoint.states import write_small
from tests.unit.simulated_ranks import SimulatedRanks

WORLD = 3


def beginning(
    monkeypatch: pytest.MonkeyPatch,
    folders: list[Path],
    *,
    attempt: int = 0,
    resume: str | None = None,
    gather: Any = None,
) -> list[Any]:
    """What each rank goes on from, or raised; the disk that rank n sees is `folders[n]`.

    resume: a path below that disk.
    """
    ranks = SimulatedRanks(WORLD)
    monkeypatch.setattr(restoring, "gather_to_all", gather or ranks.gather)

    def one(context: Any) -> LastWhole:
        rank = SimpleNamespace(
            config=SimpleNamespace(resume=None if resume is None else str(folders[context.rank] / resume)),
            run_dir=RunDir(folders[context.rank]),
            attempt=attempt,
            context=context,
        )
        return restoring._own_checkpoint(rank)  # type: ignore[arg-type]

    return ranks.run(one)


def disk(folder: Path, *steps: int) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    for step in steps:
        write_small(folder / "checkpoints", step)
        point(folder / "checkpoints", "last", step=step)
    return folder


def place(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step_{step:08d}"


def flip(file: Path) -> None:
    """One bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


LAST = [{"attempt": 1}, {"resume": "."}]


def test_every_file_is_read_by_one_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read: list[str] = []
    known = whole._crc32

    def noted(path: Path) -> str:
        read.append(path.name)
        return known(path)

    monkeypatch.setattr(whole, "_crc32", noted)
    run = disk(tmp_path / "run", 10)
    assert beginning(monkeypatch, [run] * WORLD, attempt=1) == [LastWhole(place(run, 10))] * WORLD
    assert sorted(read) == ["config.yaml", "generators.pt", "model.pt", "training.pt"]


@pytest.mark.parametrize("how", LAST)
@pytest.mark.parametrize(("other", "named"), [((), "none"), ((4,), "step_00000004")])
def test_ranks_that_see_different_disks_all_refuse(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: dict[str, Any], other: tuple[int, ...], named: str
) -> None:
    shared, own = disk(tmp_path / "shared", 8), disk(tmp_path / "own", *other)
    for folders, others in (([shared, shared, own], named), ([own, shared, shared], "step_00000008")):
        ends = beginning(monkeypatch, folders, **how)
        assert all(isinstance(end, RunError) for end in ends), ends
        for end in ends:
            assert f"finds {others} in" in str(end)
            assert "on a disk that all nodes share" in str(end)


def test_ranks_that_see_the_same_go_on_from_it_or_begin_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    full, empty = disk(tmp_path / "full", 8), disk(tmp_path / "empty")
    assert beginning(monkeypatch, [full] * WORLD, attempt=1) == [LastWhole(place(full, 8))] * WORLD
    assert beginning(monkeypatch, [empty] * WORLD, attempt=1) == [LastWhole(None)] * WORLD


def test_a_new_run_asks_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a collective")

    assert beginning(monkeypatch, [disk(tmp_path / "new")] * WORLD, gather=never) == [LastWhole(None)] * WORLD


@pytest.mark.parametrize("how", LAST)
def test_damaged_ones_are_each_told_once_and_all_ranks_take_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    how: dict[str, Any],
) -> None:
    run = disk(tmp_path / "run", 10, 20, 30, 40)
    flip(place(run, 40) / "training.pt")
    (place(run, 30) / "manifest.json").unlink()
    ends = beginning(monkeypatch, [run] * WORLD, **how)
    assert ends == [ends[0]] * WORLD
    assert ends[0].directory == place(run, 20)
    assert [directory for directory, _ in ends[0].damaged] == [place(run, 40), place(run, 30)]
    expected = [
        f"The checkpoint {place(run, 40)} can't be used: training.pt has another checksum than when it was written. "
        "An earlier one is; nothing is deleted",
        f"The checkpoint {place(run, 30)} can't be used: it has no manifest.json. "
        "An earlier one is; nothing is deleted",
    ]
    assert [record.getMessage() for record in caplog.records] == expected
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert capsys.readouterr().out.splitlines() == expected
    assert (place(run, 40) / "training.pt").exists()


@pytest.mark.parametrize("how", LAST)
def test_where_none_is_whole_nothing_is_begun_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: dict[str, Any]
) -> None:
    run = disk(tmp_path / "run", 10, 20)
    flip(place(run, 10) / "generators.pt")
    (place(run, 20) / "config.yaml").unlink()
    for end in beginning(monkeypatch, [run] * WORLD, **how):
        assert isinstance(end, CheckpointError)
        assert "step_00000010: generators.pt has another checksum than when it was written\n" in str(end)
        assert "step_00000020: config.yaml is missing\n" in str(end)


@pytest.mark.parametrize("name", ["model.pt", "config.yaml"])
def test_a_checkpoint_that_is_named_is_never_replaced_by_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    run = disk(tmp_path / "run", 10, 20, 30)
    named = "checkpoints/step_00000020"
    assert beginning(monkeypatch, [run] * WORLD, resume=named) == [LastWhole(place(run, 20))] * WORLD
    flip(place(run, 20) / name)
    for end in beginning(monkeypatch, [run] * WORLD, resume=named):
        assert isinstance(end, CheckpointError)
        assert f"step_00000020 is damaged: {name} has another checksum" in str(end)
        assert str(end).endswith(": step_00000010, step_00000030")


def test_a_run_whose_only_checkpoint_is_gone_is_not_begun_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = disk(tmp_path / "run")
    (run / "checkpoints" / "last").symlink_to("step_00000030")
    for end in beginning(monkeypatch, [run] * WORLD, resume="."):
        assert isinstance(end, CheckpointError)
        assert "step_00000030: it is gone" in str(end)

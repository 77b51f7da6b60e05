"""The checkpoint to go on from: all ranks find the same, or the run is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from framework import restoring
from framework.errors import CheckpointError, RunError
from framework.run_dir import RunDir
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
    """What each rank goes on from, or raised; the disk that rank n sees is `folders[n]`."""
    ranks = SimulatedRanks(WORLD)
    monkeypatch.setattr(restoring, "gather_to_all", gather or ranks.gather)

    def one(context: Any) -> Path | None:
        rank = SimpleNamespace(
            config=SimpleNamespace(resume=None if resume is None else str(folders[context.rank])),
            run_dir=RunDir(folders[context.rank]),
            attempt=attempt,
            context=context,
        )
        return restoring._own_checkpoint(rank)  # type: ignore[arg-type]

    return ranks.run(one)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder named step_N on a disk is a checkpoint that is complete."""

    def find(path: Path) -> Path:
        steps = sorted((path / "checkpoints").glob("step_*"))
        if not steps:
            raise CheckpointError("none")
        return steps[-1]

    monkeypatch.setattr(restoring, "find", find)


def disk(folder: Path, *steps: int) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    for step in steps:
        (folder / "checkpoints" / f"step_{step}").mkdir()
    return folder


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize("how", [{"attempt": 1}, {"resume": "it"}])
@pytest.mark.parametrize(("other", "named"), [((), "none"), ((4,), "step_4")])
def test_ranks_that_see_different_disks_all_refuse(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: dict[str, Any], other: tuple[int, ...], named: str
) -> None:
    shared, own = disk(tmp_path / "shared", 8), disk(tmp_path / "own", *other)
    ends = beginning(monkeypatch, [shared, shared, own], **how)
    assert all(isinstance(end, RunError) for end in ends), ends
    for end in ends:
        assert "finds step_8 in" in str(end)
        assert f"finds {named} in" in str(end)
        assert "on a disk that all nodes share" in str(end)


@pytest.mark.usefixtures("found")
def test_ranks_that_see_the_same_go_on_from_it_or_begin_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    full, empty = disk(tmp_path / "full", 8), disk(tmp_path / "empty")
    assert beginning(monkeypatch, [full] * WORLD, attempt=1) == [full / "checkpoints" / "step_8"] * WORLD
    assert beginning(monkeypatch, [empty] * WORLD, attempt=1) == [None] * WORLD


def test_a_new_run_asks_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a collective")

    assert beginning(monkeypatch, [disk(tmp_path / "new")] * WORLD, gather=never) == [None] * WORLD

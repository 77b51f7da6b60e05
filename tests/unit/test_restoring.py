"""All ranks resume from the checkpoint that the first one finds, or refuse."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from framework.checkpoint import LocalStorage
from framework.errors import CheckpointError, RunError
from tests.helpers.internals import Context, RunDir, own_checkpoint, point_checkpoint, restore_module, restore_run
from tests.unit.checkpoint.states import flip, write_small


class FoundError(Exception):
    """The checkpoint is found, and loading it would be next."""


def refusal(context: Context, disks: list[Path], attempt: int, resume: str | None) -> tuple[str, str]:
    """The error of a rank that sees `disks[rank]` as the run directory. resume: a path below it."""
    folder = disks[context.rank]
    rank: Any = SimpleNamespace(
        config=SimpleNamespace(
            resume=None if resume is None else str(folder / resume),
            init_from=None,
            path=SimpleNamespace(outputs=str(folder)),
        ),
        run_dir=RunDir(folder),
        attempt=attempt,
        context=context,
    )
    # The trainer isn't used before the checkpoint is found.
    trainer: Any = None
    resumes = mock.patch.object(restore_module, "_resume", side_effect=FoundError)
    with resumes, pytest.raises((RunError, CheckpointError, FoundError)) as caught:
        restore_run(rank, trainer, own_checkpoint(rank))
    return type(caught.value).__name__, str(caught.value)


def disk(folder: Path, *steps: int) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    for step in steps:
        write_small(folder / "checkpoints", step)
        point_checkpoint(LocalStorage(folder / "checkpoints"), "last", step=step)
    return folder


RESUMED = pytest.mark.parametrize(("attempt", "resume"), [(1, None), (0, ".")], ids=["restart", "resume"])


@RESUMED
def test_ranks_that_see_different_disks_refuse(
    rank_pool: Any, tmp_path: Path, attempt: int, resume: str | None
) -> None:
    shared = disk(tmp_path / "shared", 8)
    own = disk(tmp_path / "own", 4)
    empty = disk(tmp_path / "empty")
    for disks, refuse in (
        ([shared, shared, empty], [False, False, True]),
        ([own, shared, shared], [False, True, True]),
    ):
        step = "step_00000008" if disks[0] is shared else "step_00000004"
        answers = rank_pool.run(refusal, disks, attempt, resume, ranks=3)
        assert [kind for kind, _ in answers] == ["RunError" if each else "FoundError" for each in refuse]
        for _, text in (answer for answer in answers if answer[0] == "RunError"):
            assert f"doesn't have the checkpoint to resume from, {tmp_path}" in text
            assert step in text
            assert "on a disk that all nodes share" in text


def test_without_a_whole_checkpoint_all_ranks_refuse(rank_pool: Any, tmp_path: Path) -> None:
    """A damaged file is found whichever rank reads it."""
    run = disk(tmp_path / "run", 10, 20, 30)
    (run / "checkpoints" / "last").unlink()
    (run / "checkpoints" / "last").symlink_to("step_00000040")
    for step, file in ((10, "generators.pt"), (20, "model.pt"), (30, "training.pt")):
        flip(run / "checkpoints" / f"step_{step:08d}" / file)
    errors = rank_pool.run(refusal, [run] * 3, 1, None, ranks=3)
    assert errors == [errors[0]] * 3
    kind, text = errors[0]
    assert kind == "CheckpointError"
    assert "step_00000040: it is gone" in text
    for step, file in ((10, "generators.pt"), (20, "model.pt"), (30, "training.pt")):
        assert f"step_{step:08d}: {file} has another checksum" in text


def test_a_named_checkpoint_is_never_replaced(rank_pool: Any, tmp_path: Path) -> None:
    run = disk(tmp_path / "run", 10, 20, 30)
    flip(run / "checkpoints" / "step_00000020" / "training.pt")
    errors = rank_pool.run(refusal, [run] * 3, 0, "checkpoints/step_00000020", ranks=3)
    assert errors == [errors[0]] * 3
    assert "step_00000020 is damaged: training.pt has another checksum" in errors[0][1]
    assert errors[0][1].endswith(": step_00000010, step_00000030")

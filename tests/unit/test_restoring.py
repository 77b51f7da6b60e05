"""All ranks resume from the same checkpoint, or all refuse with the same error."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from framework.checkpoint.store import point
from framework.distributed.context import Context
from framework.errors import CheckpointError, RunError
from framework.restoring import restore
from framework.run_dir import RunDir
from tests.unit.checkpoint.states import flip, write_small


def refusal(context: Context, disks: list[Path], attempt: int, resume: str | None) -> tuple[str, str]:
    """The error of a rank that sees `disks[rank]` as the run directory. resume: a path below it."""
    folder = disks[context.rank]
    rank: Any = SimpleNamespace(
        config=SimpleNamespace(resume=None if resume is None else str(folder / resume), init_from=None),
        run_dir=RunDir(folder),
        attempt=attempt,
        context=context,
    )
    trainer: Any = None  # it isn't touched before all ranks agree
    with pytest.raises((RunError, CheckpointError)) as caught:
        restore(rank, trainer)
    return type(caught.value).__name__, str(caught.value)


def disk(folder: Path, *steps: int) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    for step in steps:
        write_small(folder / "checkpoints", step)
        point(folder / "checkpoints", "last", step=step)
    return folder


RESUMED = pytest.mark.parametrize(("attempt", "resume"), [(1, None), (0, ".")], ids=["restart", "resume"])


@RESUMED
@pytest.mark.parametrize(("other", "named"), [((), "none"), ((4,), "step_00000004")])
def test_ranks_that_see_different_disks_all_refuse(
    rank_pool: Any, tmp_path: Path, attempt: int, resume: str | None, other: tuple[int, ...], named: str
) -> None:
    shared, own = disk(tmp_path / "shared", 8), disk(tmp_path / "own", *other)
    for disks, others in (([shared, shared, own], named), ([own, shared, shared], "step_00000008")):
        for kind, text in rank_pool.run(refusal, disks, attempt, resume, ranks=3):
            assert kind == "RunError"
            assert f"finds {others} in" in text
            assert "on a disk that all nodes share" in text


@RESUMED
def test_if_no_checkpoint_is_whole_all_ranks_refuse_and_name_each(
    rank_pool: Any, tmp_path: Path, attempt: int, resume: str | None
) -> None:
    """A damaged file is found whichever rank reads it."""
    run = disk(tmp_path / "run", 10, 20, 30)
    (run / "checkpoints" / "last").unlink()
    (run / "checkpoints" / "last").symlink_to("step_00000040")
    for step, file in ((10, "generators.pt"), (20, "model.pt"), (30, "training.pt")):
        flip(run / "checkpoints" / f"step_{step:08d}" / file)
    errors = rank_pool.run(refusal, [run] * 3, attempt, resume, ranks=3)
    assert errors == [errors[0]] * 3
    kind, text = errors[0]
    assert kind == "CheckpointError"
    assert "step_00000040: it is gone" in text
    for step, file in ((10, "generators.pt"), (20, "model.pt"), (30, "training.pt")):
        assert f"step_{step:08d}: {file} has another checksum" in text


@pytest.mark.parametrize("name", ["config.yaml", "generators.pt", "model.pt", "training.pt"])
def test_a_checkpoint_that_is_named_is_never_replaced_by_another(rank_pool: Any, tmp_path: Path, name: str) -> None:
    run = disk(tmp_path / "run", 10, 20, 30)
    flip(run / "checkpoints" / "step_00000020" / name)
    errors = rank_pool.run(refusal, [run] * 3, 0, "checkpoints/step_00000020", ranks=3)
    assert errors == [errors[0]] * 3
    assert f"step_00000020 is damaged: {name} has another checksum" in errors[0][1]
    assert errors[0][1].endswith(": step_00000010, step_00000030")

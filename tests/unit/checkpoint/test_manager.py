from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from framework.checkpoint import CheckpointManager, find, load, store
from framework.checkpoint import manager as manager_module
from framework.config.schema import CheckpointConfig, Mode
from framework.errors import CheckpointError, ConfigError, DiskError
from tests.unit.checkpoint.states import small_state

CONFIG = CheckpointConfig(
    path=None,
    enabled=True,
    monitor="val/loss",
    mode=Mode.MIN,
    save_top_k=1,
    save_last_k=1,
    every_n_steps=None,
    every_n_epochs=None,
    every_n_minutes=None,
    asynchronous=False,
)


def manager_of(folder: Path, *, is_writer: bool = True, warn=pytest.fail, **changes) -> CheckpointManager:
    return CheckpointManager(replace(CONFIG, **changes), folder, config_text="a: 1\n", is_writer=is_writer, warn=warn)


def save(manager: CheckpointManager, step: int, loss: float | None) -> None:
    metrics = None if loss is None else {"val/loss": loss}
    manager.save(small_state(float(step)), step=step, epoch=0, metrics=metrics)


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in folder.glob("step_*"))


def target(folder: Path, pointer: str) -> int | None:
    path = folder / pointer
    return int(path.readlink().name.removeprefix("step_")) if path.is_symlink() else None


def test_when_it_is_due(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, every_n_steps=10, every_n_epochs=2)
    assert [step for step in range(1, 31) if manager.due_step(step)] == [10, 20, 30]
    assert [epoch for epoch in range(6) if manager.due_epoch(epoch)] == [1, 3, 5]
    never = manager_of(tmp_path)
    assert not any(never.due_step(step) or never.due_epoch(step) for step in range(1, 31))


def test_nothing_happens_where_checkpoints_are_not_enabled(tmp_path: Path) -> None:
    manager = manager_of(tmp_path / "checkpoints", enabled=False, every_n_steps=1, every_n_epochs=1)
    assert not manager.due_step(1)
    assert not manager.due_epoch(0)
    assert manager.monitor is None
    save(manager, 1, 0.5)
    assert not (tmp_path / "checkpoints").exists()


def test_best_follows_the_monitor_and_last_the_time(tmp_path: Path) -> None:
    manager = manager_of(tmp_path)
    assert manager.monitor == "val/loss"
    seen = []
    for step, loss in ((1, 0.5), (2, 0.3), (3, 0.4), (4, None), (5, 0.3), (6, 0.2)):
        save(manager, step, loss)
        seen.append((target(tmp_path, "best"), target(tmp_path, "last"), steps_in(tmp_path)))
    assert seen == [
        (1, 1, [1]),
        (2, 2, [2]),
        (2, 3, [2, 3]),
        (2, 4, [2, 4]),
        (2, 5, [2, 5]),  # of equals the earlier
        (6, 6, [6]),
    ]
    assert load(find(tmp_path / "best"), map_location="cpu")["model"]["bias"].tolist() == [6.0, 6.0]


def test_a_damaged_one_is_not_the_best_nor_deleted_nor_kept_in_a_good_ones_place(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, save_top_k=2)
    for step, loss in ((1, 0.4), (2, 0.3), (3, 0.1)):
        save(manager, step, loss)
    assert manager.settle() is None
    assert (target(tmp_path, "best"), steps_in(tmp_path)) == (3, [2, 3])
    again = manager_of(tmp_path, save_top_k=2)
    again.go_on_from(3, damaged=[3])
    save(again, 4, 0.2)
    save(again, 5, 0.9)
    assert again.settle() is None
    assert (target(tmp_path, "best"), steps_in(tmp_path)) == (4, [2, 3, 4, 5])
    save(again, 3, 0.05)  # training has come to its step again
    save(again, 6, 0.9)
    assert again.settle() is None
    assert (target(tmp_path, "best"), steps_in(tmp_path)) == (3, [3, 4, 6])
    for each in (manager, again):
        each.close()


@pytest.mark.parametrize("save_top_k", [2, -1])
def test_training_that_was_gone_back_behind_has_no_best(tmp_path: Path, save_top_k: int) -> None:
    manager = manager_of(tmp_path, save_top_k=-1)
    for step, loss in ((1, 0.4), (2, 0.3), (3, 0.1)):
        save(manager, step, loss)
    again = manager_of(tmp_path, save_top_k=save_top_k)
    again.go_on_from(2)
    best = again.best
    assert best is not None
    assert (target(tmp_path, "best"), best.step, best.metrics) == (2, 2, {"val/loss": 0.3})
    assert steps_in(tmp_path) == [1, 2, 3]  # until another is saved
    save(again, 5, 0.35)
    assert steps_in(tmp_path) == ([2, 5] if save_top_k == 2 else [1, 2, 3, 5])
    assert (target(tmp_path, "best"), target(tmp_path, "last")) == (2, 5)
    manager_of(tmp_path).go_on_from(0)
    assert target(tmp_path, "best") is None


def test_what_cannot_be_deleted_is_told_and_is_no_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def busy(directory: Path) -> None:
        raise DiskError(f"The checkpoint {directory} can't be deleted: Device or resource busy.")

    manager = manager_of(tmp_path, monitor=None, warn=told.append)
    save(manager, 1, None)
    monkeypatch.setattr(manager_module, "remove", busy)
    save(manager, 2, None)
    assert manager.settle() is None
    assert [text.rpartition("/")[2] for text in told] == ["step_00000001 can't be deleted: Device or resource busy."]
    assert (target(tmp_path, "last"), steps_in(tmp_path)) == (2, [1, 2])


def test_what_a_killed_save_has_left_is_gone_before_room_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / ".saving_step_00000001").mkdir()
    manager_of(tmp_path / "others", is_writer=False)
    manager_of(tmp_path, is_writer=False)
    assert [path.name for path in tmp_path.iterdir()] == [".saving_step_00000001"]  # it isn't theirs
    manager_of(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_max_mode(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, mode=Mode.MAX)
    for step, value in ((1, 0.5), (2, 0.7), (3, 0.6)):
        save(manager, step, value)
    assert (target(tmp_path, "best"), steps_in(tmp_path)) == (2, [2, 3])


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_best(tmp_path: Path, mode: Mode, value: float) -> None:
    manager = manager_of(tmp_path, mode=mode)
    save(manager, 1, value)
    assert target(tmp_path, "best") is None
    save(manager, 2, 0.5)
    save(manager, 3, value)
    assert (target(tmp_path, "best"), target(tmp_path, "last")) == (2, 3)
    save(manager_of(tmp_path, mode=mode), 4, value)
    assert (target(tmp_path, "best"), target(tmp_path, "last")) == (2, 4)


def test_the_ranking_goes_on_after_a_resume(tmp_path: Path) -> None:
    save(manager_of(tmp_path, save_top_k=2), 1, 0.1)
    save(manager_of(tmp_path, save_top_k=2), 2, 0.3)
    save(manager_of(tmp_path, save_top_k=2), 3, 0.2)
    save(manager_of(tmp_path, save_top_k=2), 4, 0.9)
    assert (target(tmp_path, "best"), steps_in(tmp_path)) == (1, [1, 3, 4])


def test_minus_one_keeps_all_and_zero_only_the_last(tmp_path: Path) -> None:
    for folder, save_top_k in ((tmp_path / "all", -1), (tmp_path / "none", 0)):
        manager = manager_of(folder, save_top_k=save_top_k)
        for step, loss in ((1, 0.1), (2, 0.2), (3, 0.3)):
            save(manager, step, loss)
    assert (steps_in(tmp_path / "all"), target(tmp_path / "all", "best")) == ([1, 2, 3], 1)
    assert (steps_in(tmp_path / "none"), target(tmp_path / "none", "best")) == ([3], None)


def test_without_a_monitor_there_is_only_last(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, monitor=None)
    for step in (1, 2):
        save(manager, step, 0.1)
    assert (steps_in(tmp_path), target(tmp_path, "best"), target(tmp_path, "last")) == ([2], None, 2)


def test_what_the_user_named_or_renamed_is_kept(tmp_path: Path) -> None:
    manager = manager_of(tmp_path)
    save(manager, 1, 0.5)
    (tmp_path / "production").symlink_to("step_00000001")
    shutil.copytree(tmp_path / "step_00000001", tmp_path / "step_00000001_copy")
    shutil.copytree(tmp_path / "step_00000001", tmp_path / "step_00000077")
    for step, loss in ((2, 0.4), (3, 0.3)):
        save(manager_of(tmp_path), step, loss)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink()) == [
        "step_00000001",
        "step_00000001_copy",
        "step_00000003",
        "step_00000077",
    ]


def test_a_checkpoint_deleted_by_hand_is_forgotten(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, save_top_k=2)
    save(manager, 1, 0.1)
    save(manager, 2, 0.2)
    shutil.rmtree(tmp_path / "step_00000001")
    save(manager, 3, 0.3)
    assert (target(tmp_path, "best"), steps_in(tmp_path)) == (2, [2, 3])


@pytest.mark.parametrize("is_writer", [True, False])
def test_an_unknown_monitor_is_an_error_on_every_rank_before_anything_is_written(
    tmp_path: Path, is_writer: bool
) -> None:
    manager = manager_of(tmp_path, is_writer=is_writer)
    with pytest.raises(ConfigError, match=r"checkpoint\.monitor=val/loss .*\n.*val/losses, val/accuracy") as caught:
        manager.save(small_state(), step=1, epoch=0, metrics={"val/losses": 1.0, "val/accuracy": 0.5})
    assert caught.match("Did you mean val/losses")
    assert list(tmp_path.iterdir()) == []


def test_the_others_write_nothing(tmp_path: Path) -> None:
    save(manager_of(tmp_path / "checkpoints", is_writer=False), 1, 0.5)
    assert not (tmp_path / "checkpoints").exists()


def test_what_cannot_be_saved_is_an_error_and_nothing_is_begun(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        manager_of(tmp_path).save({**small_state(), "generators": [object()]}, step=1, epoch=0, metrics=None)
    assert list(tmp_path.iterdir()) == []


# Beside the training that goes on


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[CheckpointManager]:
    manager = manager_of(tmp_path / "checkpoints", asynchronous=True, monitor=None, save_top_k=-1)
    yield manager
    manager.close()


def weights_in(folder: Path, step: int) -> list[float]:
    weight: torch.Tensor = load(folder / "checkpoints" / f"step_{step:08d}", map_location="cpu")["model"]["weight"]
    return weight.tolist()


def state_of(weight: torch.Tensor) -> dict[str, Any]:
    return {"model": {"weight": weight}, "training": {}, "generators": []}


def test_it_is_written_once_weights_may_change_and_as_they_were(beside: CheckpointManager, tmp_path: Path) -> None:
    weight = torch.zeros(3)
    beside.save(state_of(weight), step=1, epoch=0, metrics=None, late=[weight])
    assert steps_in(tmp_path / "checkpoints") == []
    beside.before_update()
    weight.add_(1)
    beside.before_update()  # nothing is left to be waited for
    assert beside.settle() is None
    assert weights_in(tmp_path, 1) == [0, 0, 0]


def test_the_next_save_waits_for_the_one_before(
    beside: CheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, at_once = threading.Event(), []
    real = store.write

    def slow(folder: Path, *rest: Any, **named: Any) -> Path:
        at_once.append(named["step"])
        assert may_go_on.wait(30)
        at_once.remove(named["step"])
        return real(folder, *rest, **named)

    monkeypatch.setattr(manager_module, "write", slow)
    weight = torch.zeros(3)
    beside.save(state_of(weight), step=1, epoch=0, metrics=None)
    threading.Timer(0.2, may_go_on.set).start()
    weight.add_(1)
    beside.save(state_of(weight), step=2, epoch=0, metrics=None)
    assert at_once in ([], [2])
    assert beside.settle() is None
    assert (weights_in(tmp_path, 1), weights_in(tmp_path, 2)) == ([0, 0, 0], [1, 1, 1])


def test_weights_that_change_too_early_give_up_one_checkpoint_and_the_next_is_copied_at_once(tmp_path: Path) -> None:
    told: list[str] = []
    manager = manager_of(tmp_path / "checkpoints", asynchronous=True, monitor=None, save_top_k=-1, warn=told.append)
    weight = torch.zeros(3)
    for step in (1, 2):
        manager.save(state_of(weight), step=step, epoch=0, metrics=None, late=[weight])
        weight.add_(1)
        manager.before_update()
        failure = manager.settle()
        assert (failure is None) == (step == 2)
    manager.close()
    (text,) = told
    assert text.startswith("The checkpoint of step 1 was given up: model.weight changed while it was copied.")
    assert steps_in(tmp_path / "checkpoints") == [2]
    assert weights_in(tmp_path, 2) == [1, 1, 1]


def test_weights_that_change_unseen_in_the_first_step_are_copied_at_once(tmp_path: Path) -> None:
    """Through `.data` nothing is counted."""
    manager = manager_of(tmp_path / "checkpoints", asynchronous=True, monitor=None, save_top_k=-1)
    weight = torch.zeros(3)
    manager.watch([weight])
    weight.data.add_(1)
    manager.before_update()
    manager.save(state_of(weight), step=1, epoch=0, metrics=None, late=[weight])
    weight.data.add_(1)
    assert manager.settle() is None
    manager.close()
    assert weights_in(tmp_path, 1) == [1, 1, 1]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_disk_that_refuses_is_told_and_the_next_save_may_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    told: list[str] = []
    folder = tmp_path / "checkpoints"
    manager = manager_of(folder, asynchronous=asynchronous, monitor=None, warn=told.append)
    save(manager, 1, None)
    assert manager.settle() is None
    monkeypatch.setattr(manager_module, "require_room", full_disk)
    save(manager, 2, None)
    failure = manager.settle()
    assert failure is not None
    assert failure.startswith(f"The checkpoint of step 2 can't be written to {folder}: No space left on device")
    text, _, good = failure.rpartition("\n")
    assert good == "The last good checkpoint is step_00000001."
    assert told == [f"{text}\nTraining goes on without it."]
    assert (steps_in(folder), target(folder, "last")) == ([1], 1)
    monkeypatch.undo()
    save(manager, 3, None)
    assert manager.settle() is None
    manager.close()
    assert (steps_in(folder), target(folder, "last")) == ([3], 3)


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_our_own_fault_in_the_thread_is_not_silent(beside: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Path:
        raise ZeroDivisionError

    monkeypatch.setattr(manager_module, "write", broken)
    save(beside, 1, None)
    with pytest.raises(ZeroDivisionError):
        save(beside, 2, None)


def test_it_is_due_by_the_writers_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("framework.checkpoint.manager.time.monotonic", lambda: now[0])
    manager = manager_of(tmp_path, every_n_minutes=0.5)
    other = manager_of(tmp_path, every_n_minutes=0.5, is_writer=False)
    never = manager_of(tmp_path)
    seen = []
    for now[0] in (129.0, 130.0, 131.0, 160.0, 161.0):
        seen.append(manager.due_time())
        assert not other.due_time()
        assert not never.due_time()
        if now[0] == 131.0:
            save(manager, 1, None)
    assert seen == [False, True, True, False, True]


LOSSES = st.one_of(st.none(), st.just(math.nan), st.sampled_from([0.1, 0.2, 0.3, 0.4]))
SAVES = st.lists(st.tuples(st.integers(0, 2), LOSSES, st.booleans()), min_size=1, max_size=8)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(saves=SAVES, save_top_k=st.integers(-1, 3), save_last_k=st.integers(1, 3), mode=st.sampled_from(Mode))
def test_retention_is_as_a_simple_model_says(
    monkeypatch: pytest.MonkeyPatch,
    saves: list[tuple[int, float | None, bool]],
    save_top_k: int,
    save_last_k: int,
    mode: Mode,
) -> None:
    """Steps that advance or repeat, with and without metrics, through restarts."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # the disk's time, not what is tested here
    sign = 1 if mode is Mode.MIN else -1
    with tempfile.TemporaryDirectory() as name:
        folder, step = Path(name), 1
        known: dict[int, float | None] = {}
        best: int | None = None
        how: dict[str, Any] = {"save_top_k": save_top_k, "save_last_k": save_last_k, "mode": mode}
        manager = manager_of(folder, **how)
        for advance, loss, restart in saves:
            step += advance
            if restart:
                manager = manager_of(folder, **how)
            save(manager, step, loss)
            known[step] = None if loss is None or math.isnan(loss) else sign * loss
            ranking = sorted((score, at) for at, score in known.items() if score is not None)
            if ranking and save_top_k != 0:
                best = ranking[0][1]
            top = {at for _, at in (ranking if save_top_k == -1 else ranking[:save_top_k])}
            if save_top_k != -1:
                kept = top | {best} | set(sorted(known)[-save_last_k:])
                known = {at: score for at, score in known.items() if at in kept}
            assert steps_in(folder) == sorted(known)
            assert (target(folder, "last"), target(folder, "best")) == (step, best)
            assert all((folder / f"step_{at:08d}" / "manifest.json").exists() for at in known)

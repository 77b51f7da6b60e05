from __future__ import annotations

import math
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from framework.checkpoint import CheckpointManager, find, load
from framework.config.schema import CheckpointConfig, Mode
from framework.errors import CheckpointError, ConfigError
from tests.unit.checkpoint.states import small_state

CONFIG = CheckpointConfig(
    path=None, enabled=True, monitor="val/loss", mode=Mode.MIN, save_top_k=1, every_n_steps=None, every_n_epochs=None
)


def manager_of(folder: Path, *, is_writer: bool = True, barrier=lambda: None, **changes) -> CheckpointManager:
    return CheckpointManager(
        replace(CONFIG, **changes), folder, config_text="a: 1\n", is_writer=is_writer, barrier=barrier
    )


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
    manager = manager_of(tmp_path, is_writer=is_writer, barrier=lambda: pytest.fail("nobody may wait"))
    with pytest.raises(ConfigError, match=r"checkpoint\.monitor=val/loss .*\n.*val/losses, val/accuracy") as caught:
        manager.save(small_state(), step=1, epoch=0, metrics={"val/losses": 1.0, "val/accuracy": 0.5})
    assert caught.match("Did you mean val/losses")
    assert list(tmp_path.iterdir()) == []


def test_the_others_only_wait(tmp_path: Path) -> None:
    events: list[str] = []
    folder = tmp_path / "checkpoints"
    save(manager_of(folder, is_writer=False, barrier=lambda: events.append("other")), 1, 0.5)
    assert not folder.exists()
    save(manager_of(folder, barrier=lambda: events.append(f"writer, {steps_in(folder)}")), 1, 0.5)
    assert events == ["other", "writer, [1]"]


def test_a_writer_that_fails_raises_instead_of_waiting(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, barrier=lambda: pytest.fail("it must not wait"))
    with pytest.raises(CheckpointError):
        manager.save({**small_state(), "generators": [object()]}, step=1, epoch=0, metrics=None)


LOSSES = st.one_of(st.none(), st.just(math.nan), st.sampled_from([0.1, 0.2, 0.3, 0.4]))
SAVES = st.lists(st.tuples(st.integers(0, 2), LOSSES, st.booleans()), min_size=1, max_size=8)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(saves=SAVES, save_top_k=st.integers(-1, 3), mode=st.sampled_from(Mode))
def test_retention_is_as_a_simple_model_says(
    monkeypatch: pytest.MonkeyPatch, saves: list[tuple[int, float | None, bool]], save_top_k: int, mode: Mode
) -> None:
    """Steps that advance or repeat, with and without metrics, through restarts."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # the disk's time, not what is tested here
    sign = 1 if mode is Mode.MIN else -1
    with tempfile.TemporaryDirectory() as name:
        folder, step = Path(name), 1
        known: dict[int, float | None] = {}
        best: int | None = None
        manager = manager_of(folder, save_top_k=save_top_k, mode=mode)
        for advance, loss, restart in saves:
            step += advance
            if restart:
                manager = manager_of(folder, save_top_k=save_top_k, mode=mode)
            save(manager, step, loss)
            known[step] = None if loss is None or math.isnan(loss) else sign * loss
            ranking = sorted((score, at) for at, score in known.items() if score is not None)
            if ranking and save_top_k != 0:
                best = ranking[0][1]
            top = {at for _, at in (ranking if save_top_k == -1 else ranking[:save_top_k])}
            if save_top_k != -1:
                known = {at: score for at, score in known.items() if at in top | {step, best}}
            assert steps_in(folder) == sorted(known)
            assert (target(folder, "last"), target(folder, "best")) == (step, best)
            assert all((folder / f"step_{at:08d}" / "manifest.json").exists() for at in known)

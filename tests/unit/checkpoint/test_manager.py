"""Which checkpoints a run keeps, which are `last` and `best`, and saving beside the training that continues."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from framework.checkpoint import load
from framework.errors import CheckpointError
from tests.helpers.disks import full_at
from tests.helpers.exact import tree_differences
from tests.helpers.internals import CheckpointManager, Mode
from tests.unit.checkpoint.states import manager_of, names, small_state, steps_in, target


def save(manager: CheckpointManager, step: int, loss: float | None) -> None:
    metrics = None if loss is None else {"val/loss": loss}
    manager.save(small_state(float(step)), step=step, epoch=0, metrics=metrics)


def test_when_a_checkpoint_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = manager_of(tmp_path, every_n_steps=10, every_n_epochs=2)
    assert [step for step in range(1, 31) if manager.due_step(step)] == [10, 20, 30]
    assert [epoch for epoch in range(6) if manager.due_epoch(epoch)] == [1, 3, 5]
    never = manager_of(tmp_path)
    assert not any(never.due_step(step) or never.due_epoch(step) or never.due_time() for step in range(1, 31))

    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    by_clock = manager_of(tmp_path, every_n_minutes=0.5)
    other_rank = manager_of(tmp_path, every_n_minutes=0.5, is_writer=False)
    seen = []
    for now[0] in (129.0, 130.0, 131.0, 160.0, 161.0):
        seen.append(by_clock.due_time())
        assert not other_rank.due_time()
        if now[0] == 131.0:
            save(by_clock, 1, None)
    assert seen == [False, True, True, False, True]


def test_nothing_is_written_by_other_ranks(tmp_path: Path) -> None:
    save(manager_of(tmp_path / "checkpoints", is_writer=False), 1, 0.5)
    assert not (tmp_path / "checkpoints").exists()


LOSSES = st.one_of(st.none(), st.sampled_from([math.nan, math.inf, -math.inf, 0.1, 0.2, 0.3, 0.4]))
SAVES = st.lists(st.tuples(st.integers(0, 2), LOSSES, st.booleans()), min_size=1, max_size=8)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    saves=SAVES,
    save_top_k=st.integers(-1, 3),
    save_last_k=st.integers(1, 3),
    mode=st.sampled_from(get_args(Mode)),
    monitor=st.sampled_from(["val/loss", "val/loss", None]),
)
def test_retention_is_as_a_simple_model_says(
    no_waiting_for_the_disk: None,
    saves: list[tuple[int, float | None, bool]],
    save_top_k: int,
    save_last_k: int,
    mode: Mode,
    monitor: str | None,
) -> None:
    """Steps that advance or repeat, with and without metrics, through restarts.

    `last` is the newest. `best` has the best finite metric, of equals the earlier one. Kept are the save_last_k newest
    and the save_top_k best, or all.
    """
    sign = 1 if mode == "min" else -1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        step = 1
        known: dict[int, float | None] = {}
        best: int | None = None
        how: dict[str, Any] = {"save_top_k": save_top_k, "save_last_k": save_last_k, "mode": mode, "monitor": monitor}
        manager = manager_of(folder, **how)
        for advance, loss, restart in saves:
            step += advance
            if restart:
                manager = manager_of(folder, **how)
            save(manager, step, loss)
            is_ranked = loss is not None and math.isfinite(loss) and monitor is not None
            known[step] = sign * loss if is_ranked and loss is not None else None
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


def test_damaged_checkpoints_are_neither_best_nor_deleted(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, save_top_k=2)
    for step, loss in ((1, 0.4), (2, 0.3), (3, 0.1)):
        save(manager, step, loss)
    assert (target(tmp_path, "best"), steps_in(tmp_path)) == (3, [2, 3])
    resumed = manager_of(tmp_path, save_top_k=2)
    resumed.resume_from(3, damaged=[3])
    save(resumed, 4, 0.2)
    save(resumed, 5, 0.9)
    assert (target(tmp_path, "best"), steps_in(tmp_path)) == (4, [2, 3, 4, 5])
    # Training has reached its step again.
    save(resumed, 3, 0.05)
    save(resumed, 6, 0.9)
    assert (target(tmp_path, "best"), steps_in(tmp_path)) == (3, [3, 4, 6])


@pytest.mark.parametrize("save_top_k", [2, -1])
def test_later_checkpoints_do_not_count_after_resuming(tmp_path: Path, save_top_k: int) -> None:
    manager = manager_of(tmp_path, save_top_k=-1)
    for step, loss in ((1, 0.4), (2, 0.3), (3, 0.1)):
        save(manager, step, loss)
    resumed = manager_of(tmp_path, save_top_k=save_top_k)
    resumed.resume_from(2)
    best = resumed.best
    assert best is not None
    assert (target(tmp_path, "best"), best.step, best.metrics) == (2, 2, {"val/loss": 0.3})
    # All stay until another is saved.
    assert steps_in(tmp_path) == [1, 2, 3]
    save(resumed, 5, 0.35)
    assert steps_in(tmp_path) == ([2, 5] if save_top_k == 2 else [1, 2, 3, 5])
    assert (target(tmp_path, "best"), target(tmp_path, "last")) == (2, 5)
    manager_of(tmp_path).resume_from(0)
    assert target(tmp_path, "best") is None


def test_users_names_copies_and_deletions_are_respected(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, save_top_k=2)
    save(manager, 1, 0.5)
    (tmp_path / "production").symlink_to("step_00000001")
    for copy in ("step_00000001_copy", "step_00000077"):
        shutil.copytree(tmp_path / "step_00000001", tmp_path / copy)
    save(manager, 2, 0.1)
    shutil.rmtree(tmp_path / "step_00000002")
    for step, loss in ((3, 0.4), (4, 0.3), (5, 0.2)):
        save(manager, step, loss)
    shown = ["step_00000001", "step_00000001_copy", "step_00000004", "step_00000005", "step_00000077"]
    assert names(tmp_path) == ["best", "last", "production", *shown]
    assert target(tmp_path, "best") == 5


def test_a_pointer_copied_as_directory_is_replaced(tmp_path: Path) -> None:
    save(manager_of(tmp_path / "run"), 1, 0.5)
    copy = Path(shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=False))
    save(manager_of(copy), 2, 0.9)
    assert names(copy) == ["best", "last", "step_00000001", "step_00000002"]
    assert (target(copy, "last"), target(copy, "best")) == (2, 1)


# What is refused


def test_an_unreadable_state_is_refused_before_writing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"generators\[0\]"):
        manager_of(tmp_path).save({**small_state(), "generators": [object()]}, step=1, epoch=0, metrics=None)
    assert names(tmp_path) == []


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_refusing_disk_is_reported_and_retried(tmp_path: Path, asynchronous: bool) -> None:
    warnings: list[str] = []
    folder = tmp_path / "checkpoints"
    manager = manager_of(folder, asynchronous=asynchronous, monitor=None, warn=warnings.append)
    save(manager, 1, None)
    assert manager.wait() is None
    with full_at(100):
        save(manager, 2, None)
        failure = manager.wait()
    assert failure is not None
    assert failure.startswith(f"The checkpoint of step 2 can't be written to {folder}: File too large")
    text, _, good = failure.rpartition("\n")
    assert good == "The last good checkpoint is step_00000001."
    (warning,) = warnings
    assert warning.startswith(text)
    assert (steps_in(folder), target(folder, "last")) == ([1], 1)
    save(manager, 3, None)
    assert manager.wait() is None
    manager.close()
    assert (steps_in(folder), target(folder, "last")) == ([3], 3)


# Beside the training that continues


def test_each_checkpoint_holds_its_own_weights(tmp_path: Path) -> None:
    """Training changes them as soon as `save` returns."""
    manager = manager_of(tmp_path, asynchronous=True, monitor=None, save_top_k=-1)
    weights = torch.zeros(600_000)
    for step in range(1, 7):
        state = {"model": {"weights": weights}, "training": {}, "generators": []}
        manager.save(state, step=step, epoch=0, metrics=None)
        weights.add_(1)
    assert manager.wait() is None
    manager.close()
    assert steps_in(tmp_path) == [*range(1, 7)]
    for step in range(1, 7):
        read = load(tmp_path / f"step_{step:08d}", map_location="cpu")["model"]
        assert read["weights"].unique().tolist() == [step - 1]


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_a_background_copy_is_equal_and_keeps_sharing(tmp_path: Path) -> None:
    whole = torch.arange(10.0)
    large = torch.rand(300, 301)
    plain = [1, 2.5, "three", None, (True, b"4"), {5, 6}, OrderedDict(a=torch.ones(2, 2))]
    tensors = [torch.zeros(0), torch.ones(3, dtype=torch.bfloat16), large.t(), torch.tensor([1 + 2j]).conj()]
    state = {
        "model": {"whole": whole, "part": whole[4:6], "normed": nn.BatchNorm1d(2).state_dict()},
        "training": {"plain": plain, "tensors": tensors},
        "generators": [{"sparse": torch.eye(3).to_sparse()}],
    }
    read = []
    for asynchronous in (True, False):
        manager = manager_of(tmp_path / str(asynchronous), asynchronous=asynchronous)
        manager.save(state, step=1, epoch=0, metrics=None)
        manager.close()
        read.append(load(tmp_path / str(asynchronous) / "step_00000001", map_location="cpu"))
    for one in read:
        sparse = one["generators"][0].pop("sparse")
        assert torch.equal(sparse.to_dense(), torch.eye(3))
        assert one["model"]["normed"]._metadata == nn.BatchNorm1d(2).state_dict()._metadata  # type: ignore[attr-defined]
    assert tree_differences(*read) == []
    assert tree_differences(read[0], {**state, "generators": [{}]}) == []
    read[0]["model"]["whole"][4] = -1
    assert read[0]["model"]["part"].tolist() == [-1, 5]


def test_a_bug_in_the_thread_is_not_silent(tmp_path: Path) -> None:
    config_text: Any = None
    manager = manager_of(tmp_path, asynchronous=True, config_text=config_text)
    save(manager, 1, None)
    with pytest.raises(AttributeError):
        save(manager, 2, None)
    manager.close()

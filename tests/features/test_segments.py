"""What a run records of each time its training began: what was in force from which step."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from framework.errors import ConfigError
from tests.helpers import results
from tests.helpers.internals import RunDir, checkpoint_before, segment_at

SHORT = (
    "recipe=toy",
    "trainer.limit_val_batches=0",
    "trainer.limit_test_batches=0",
    "checkpoint.every_n_steps=10",
    "checkpoint.save_top_k=-1",
    "checkpoint.monitor=null",
    "optimizer.lr=0.01",
)


@pytest.fixture
def resumed(train):
    """A run of 20 steps with one learning rate, then of 20 with another."""
    run = train(*SHORT, "trainer.max_steps=20")
    return train(f"resume={run}", "trainer.max_steps=40", "optimizer.lr=0.02")


def rate_at(run: Path, step: int) -> float:
    optimizer = segment_at(RunDir(run), step).config["optimizer"]
    rate: float = optimizer["lr"]
    return rate


def change_record(run: Path, **changes: Any) -> None:
    content = results.run_file(run) | changes
    (run / "run.json").write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def test_a_step_has_what_was_in_force(resumed):
    before = segment_at(RunDir(resumed), 20)
    since = segment_at(RunDir(resumed), 21)
    assert (before.after, before.until, since.after, since.until) == (0, 20, 20, None)
    assert [rate_at(resumed, step) for step in (1, 20, 21, 40)] == [0.01, 0.01, 0.02, 0.02]
    assert "optimizer.lr=0.01" in before.overrides
    assert "optimizer.lr=0.02" in since.overrides
    assert before.versions == since.versions == results.run_file(resumed)["versions"]
    assert before.topology["world_size"] == 1
    assert before.doubt is None


def test_what_has_not_changed_is_recorded_once(resumed):
    first, second = results.run_file(resumed)["segments"]
    assert set(first) == {"step", "started", "config", "overrides"}
    assert set(second) == {"step", "started"}


def test_a_resume_from_an_earlier_step_drops_what_it_repeats(train, resumed):
    train(f"resume={resumed}/checkpoints/step_00000010", "trainer.max_steps=15", "optimizer.lr=0.03")
    assert [entry["step"] for entry in results.run_file(resumed)["segments"]] == [0, 10]
    assert [rate_at(resumed, step) for step in (10, 11)] == [0.01, 0.03]


def test_checkpoints_of_abandoned_steps_are_left_out(train, resumed):
    """All are kept; the new history writes other steps, and step 40 once more."""
    run = RunDir(resumed)
    train(f"resume={resumed}/checkpoints/step_00000010", "trainer.max_steps=40", "checkpoint.every_n_steps=25")
    assert results.saved_steps(resumed) == [10, 20, 25, 30, 40]
    found = [checkpoint_before(run, step) for step in (9, 10, 24, 39, 40)]
    assert [path and path.name for path in found] == [
        None,
        "step_00000010",
        "step_00000010",
        "step_00000025",
        "step_00000040",
    ]


def test_a_damaged_checkpoint_is_passed_over(shared_run, tmp_path):
    run = Path(shutil.copytree(shared_run(*SHORT, "trainer.max_steps=20"), tmp_path / "copy", symlinks=True))
    (run / "checkpoints" / "step_00000020" / "model.pt").write_bytes(b"damaged")
    found = checkpoint_before(RunDir(run), 20)
    assert found is not None
    assert found.name == "step_00000010"


def test_the_code_of_a_step_is_known(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    code = "from framework import Callback\n\n\nclass Quiet(Callback):\n    def on_fit_end(self):\n        pass\n"
    Path("segments_case.py").write_text(code)
    run = train(*SHORT, "trainer.max_steps=10", "+callbacks.quiet._target_=segments_case.Quiet")
    Path("segments_case.py").write_text(f"{code}\n\n# Another content.\n")
    train(f"resume={run}", "trainer.max_steps=20")
    before = segment_at(RunDir(run), 10).modules["segments_case"]
    assert before == hashlib.sha256(code.encode()).hexdigest()
    assert segment_at(RunDir(run), 11).modules["segments_case"] != before


def test_a_run_of_an_earlier_version_has_its_only_start(shared_run, tmp_path):
    run = Path(shutil.copytree(shared_run(*SHORT, "trainer.max_steps=20"), tmp_path / "copy", symlinks=True))
    change_record(run, segments=None, modules=None, search_path=None)
    segment = segment_at(RunDir(run), 15)
    assert (segment.doubt, segment.config["optimizer"]["lr"]) == (None, 0.01)
    assert segment.modules == {}


def test_a_resumed_run_of_an_earlier_version_has_what_its_checkpoints_say(train, resumed):
    change_record(resumed, segments=None)
    assert [rate_at(resumed, step) for step in (10, 20, 21, 40, 41)] == [0.01, 0.01, 0.02, 0.02, 0.02]
    doubt = segment_at(RunDir(resumed), 15).doubt
    assert doubt is not None
    assert "the configuration is that of step_00000020" in doubt
    train(f"resume={resumed}", "trainer.max_steps=50", "optimizer.lr=0.03")
    assert [rate_at(resumed, step) for step in (20, 30, 41)] == [0.01, 0.02, 0.03]
    assert segment_at(RunDir(resumed), 41).doubt is None


@pytest.mark.parametrize("segments", [[{"step": "0"}], [{"step": 5}, {"step": 5}], [{"step": 0, "config": 1}]])
def test_a_damaged_record_is_refused(shared_run, tmp_path, segments):
    run = Path(shutil.copytree(shared_run(*SHORT, "trainer.max_steps=20"), tmp_path / "copy", symlinks=True))
    change_record(run, segments=segments)
    with pytest.raises(ConfigError, match=r"run\.json is damaged"):
        segment_at(RunDir(run), 1)

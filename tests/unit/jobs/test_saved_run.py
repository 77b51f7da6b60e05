"""Commands that name a saved run: which run is meant, and what configuration comes of it and of what is typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from framework.errors import CheckpointError, ConfigError
from tests.helpers.internals import (
    BaseRun,
    RunDir,
    SavedRun,
    create_run_dir,
    find_auto_run,
    find_base,
    names_a_run,
    save_config,
    saved_run,
)
from tests.unit.checkpoint.states import write_small
from tests.unit.config.raw import raw_config


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run with two checkpoints, whose configuration is beside each."""
    run_dir = create_run_dir(tmp_path / "outputs" / "some")
    raw = raw_config({"data.batch_size": 77})
    save_config(run_dir, raw=raw, overrides=("optimizer.lr=0.5", "trainer.max_epochs=4"))
    for step in (10, 20):
        write_small(run_dir.checkpoints, step, config_text=run_dir.config_file.read_text())
    return run_dir


def named(*typed: str) -> SavedRun:
    found = saved_run(typed)
    assert found is not None
    return found


def test_a_run_or_a_checkpoint_is_named(run_dir: RunDir) -> None:
    assert saved_run(["recipe=toy", "resume=null", "checkpoint.path=null"]) is None
    resumed = named(f"resume={run_dir.path}")
    assert (resumed.key, resumed.checkpoint, resumed.run_dir) == ("resume", None, run_dir)
    for path, step in ((run_dir.path, 20), (run_dir.checkpoints / "step_00000010", 10)):
        used = named(f"checkpoint.path={path}", "recipe=some")
        assert (used.key, used.checkpoint) == ("checkpoint.path", run_dir.checkpoints / f"step_{step:08d}")
        assert used.raw["data"]["batch_size"] == 77
        assert used.overrides == ("recipe=some", "optimizer.lr=0.5", "trainer.max_epochs=4")


def test_a_damaged_configuration_of_a_checkpoint_is_refused(run_dir: RunDir) -> None:
    place = write_small(run_dir.checkpoints, 20, config_text="- a list\n")
    with pytest.raises(ConfigError, match="must hold a mapping"):
        saved_run([f"checkpoint.path={place}"])
    (place / "config.yaml").write_text("- a lisp\n")
    with pytest.raises(CheckpointError, match=r"config\.yaml has another checksum.*\nUse another .*: step_00000010$"):
        saved_run([f"checkpoint.path={place}"])
    (place / "config.yaml").unlink()
    with pytest.raises(CheckpointError, match=r"config\.yaml is missing"):
        saved_run([f"checkpoint.path={place}"])


def test_a_run_without_its_last_checkpoint_resumes(run_dir: RunDir) -> None:
    (run_dir.checkpoints / "last").symlink_to("step_00000030")
    for what in (".", "checkpoints/last"):
        resumed = named(f"resume={run_dir.path / what}")
        assert (resumed.checkpoint, resumed.run_dir) == (None, run_dir)


def test_saved_and_typed_overrides_are_composed(run_dir: RunDir) -> None:
    typed = [f"checkpoint.path={run_dir.path}", "trainer.max_epochs=9", "job=eval"]
    expected = ["recipe=some", "optimizer.lr=0.5", "trainer.max_epochs=9", "job=eval"]
    composed = {"path": {"outputs": str(run_dir.path.parent)}}
    assert find_base(typed, compose=lambda _: composed, change=lambda raw, _: dict(raw), swept=True)[1] == expected
    alone = find_base(["recipe=toy"], compose=lambda _: {}, change=lambda raw, _: dict(raw), swept=False)
    assert alone[1] == ["recipe=toy"]


def test_keys_that_no_longer_exist_are_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only keys that were set are reported."""
    composed = {"path": {"outputs": str(tmp_path / "outputs")}}

    def overrides_of(name: str, value: bool, overrides: tuple[str, ...]) -> list[str]:
        run_dir = create_run_dir(tmp_path / "outputs" / "some", name=name)
        save_config(run_dir, raw=raw_config({"trainer.log_rank_losses": value}), overrides=overrides)
        base, started_with = find_base(
            [f"resume={run_dir.path}"], compose=lambda _: composed, change=lambda raw, _: dict(raw), swept=False
        )
        assert base.found is not None
        assert base.found.raw == raw_config()
        return started_with

    assert overrides_of("default", False, ()) == ["recipe=some"]
    assert capsys.readouterr().err == ""
    assert overrides_of("set", True, ("trainer.log_rank_losses=true",)) == ["recipe=some"]
    said = capsys.readouterr().err
    assert "sets trainer.log_rank_losses=true, which no longer exists and is ignored." in said
    assert said.count("\n") == 1


# The configuration


def configured(
    run_dir: RunDir, *typed: str, composed: Mapping[str, Any] | None = None, key: str = "checkpoint.path"
) -> dict[str, Any]:
    """What comes of the run and of what is typed, where today's default batch size is 4."""
    name = f"{key}={run_dir.path}"
    base = BaseRun(saved_run([name]), without_typed=raw_config(), typed=(name, *typed))
    return base.configuration(raw_config(composed))


def test_typed_keys_change_the_saved_configuration(run_dir: RunDir) -> None:
    changes = {"data.root": "two", "data.datasets.root": "two", "job": "eval"}
    raw = configured(run_dir, "data.root=two", "job=eval", composed=changes)
    path = {"checkpoint.path": str(run_dir.checkpoints / "step_00000020")}
    assert raw == raw_config({"data.batch_size": 77, **changes, **path})
    # The value equals today's default, but was typed.
    assert configured(run_dir, "data.batch_size=4")["data"]["batch_size"] == 4


def test_an_evaluation_forgets_the_runs_initial_weights(run_dir: RunDir) -> None:
    saved = yaml.safe_dump(yaml.safe_load(run_dir.config_file.read_text()) | {"init_from": "elsewhere"})
    run_dir.config_file.write_text(saved)
    write_small(run_dir.checkpoints, 20, config_text=saved)
    assert configured(run_dir)["init_from"] is None
    assert configured(run_dir, key="resume")["init_from"] == "elsewhere"


def test_options_that_contradict_a_saved_run_are_refused(run_dir: RunDir) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.path=a,b: .* must be one run directory"):
        saved_run(["checkpoint.path=a,b"])
    unsaved = BaseRun(None, without_typed=None, typed=())
    assert unsaved.configuration(raw_config()) == raw_config()
    for key in ("resume", "checkpoint.path"):
        with pytest.raises(ConfigError, match=rf"{key}=somewhere is set in a file\. Type it on the command line"):
            unsaved.configuration(raw_config({key: "somewhere"}))


# resume=auto


def make_run(folder: Path, name: str, *, status: str | None, job: str = "train") -> RunDir:
    run_dir = create_run_dir(folder, name=name)
    save_config(run_dir, raw=raw_config({"job": job}), overrides=())
    if status is not None:
        run_dir.update_run({"status": status})
    return run_dir


def found(tmp_path: Path, *typed: str, node_rank: int = 0) -> list[str]:
    def compose(overrides: Sequence[str]) -> Mapping[str, Any]:
        assert not any(map(names_a_run, overrides))
        return raw_config({"path.outputs": str(tmp_path), "topology.node_rank": node_rank})

    return find_auto_run(typed, compose=compose)


def test_auto_is_the_newest_unfinished_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = tmp_path / "it's, (here)"
    folder = outputs / "some"
    assert found(outputs, "resume=auto", "seed=3") == ["seed=3"]
    assert "no unfinished run" in capsys.readouterr().err
    make_run(folder, "2026-01-01", status="stopped")
    running = make_run(folder, "2026-01-02", status="running")
    make_run(folder, "2026-01-03", status="finished")
    make_run(folder, "2026-01-04", status="failed", job="eval")
    # The run was killed before it had started.
    make_run(folder, "2026-01-05", status=None)
    create_run_dir(folder, name="2026-01-06")
    write_small(running.checkpoints, 20)
    assert named(*found(outputs, "resume=auto", "seed=3")).run_dir == running
    said = capsys.readouterr().err
    assert "2026-01-02 (crashed or still running)" in said
    assert found(outputs, "resume=auto", node_rank=1)
    assert capsys.readouterr().err == ""


def test_a_run_that_auto_finds_began_with_its_weights(tmp_path: Path) -> None:
    begins = ("init_from=weights.pt", "rerun=outputs/some/run", "seed=3")
    assert found(tmp_path, "resume=auto", *begins) == list(begins)
    stopped = make_run(tmp_path / "some", "2026-01-01", status="stopped")
    write_small(stopped.checkpoints, 20)
    typed = found(tmp_path, "resume=auto", *begins)
    assert "seed=3" in typed
    assert named(*typed).run_dir == stopped
    assert not any(text.startswith(("init_from", "rerun")) for text in typed)


def test_only_auto_is_searched(tmp_path: Path) -> None:
    assert found(tmp_path, "seed=1", "resume=some/where") == ["seed=1", "resume=some/where"]
    assert found(tmp_path, "seed=1") == ["seed=1"]

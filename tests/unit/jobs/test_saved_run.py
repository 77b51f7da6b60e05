"""Commands that begin with a saved run: which run is meant, and what configuration comes of it and what is typed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from framework.config.saved import save_config
from framework.errors import CheckpointError, ConfigError
from framework.jobs.saved_run import Ground, composable, names_a_run, saved_run, with_run_found
from framework.run_dir import RunDir, create_run_dir
from tests.unit.checkpoint.states import write_small
from tests.unit.config.raw import raw_config


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run with two checkpoints, whose configuration lies beside each."""
    run_dir = create_run_dir(tmp_path / "outputs" / "some")
    raw = raw_config({"data.batch_size": 77})
    save_config(run_dir, SimpleNamespace(raw=raw, overrides=("optimizer.lr=0.5", "trainer.max_epochs=4")))
    for step in (10, 20):
        write_small(run_dir.checkpoints, step, config_text=run_dir.config_file.read_text())
    return run_dir


def test_nothing_is_named() -> None:
    assert saved_run([]) is None
    assert saved_run(["recipe=toy", "resume=null", "checkpoint.path=null"]) is None
    assert composable(["recipe=toy"], None) == ["recipe=toy"]


def test_a_run_or_a_checkpoint_is_named(run_dir: RunDir) -> None:
    resumed = saved_run([f"resume={run_dir.path}"])
    assert resumed is not None
    assert (resumed.key, resumed.checkpoint, resumed.saved.run_dir) == ("resume", None, run_dir)
    for path, step in ((run_dir.path, 20), (run_dir.checkpoints / "step_00000010", 10)):
        used = saved_run([f"checkpoint.path={path}"])
        assert used is not None
        assert used.key == "checkpoint.path"
        assert used.checkpoint == run_dir.checkpoints / f"step_{step:08d}"
        assert used.saved.raw["data"]["batch_size"] == 77
        assert used.saved.overrides == ("recipe=some", "optimizer.lr=0.5", "trainer.max_epochs=4")


def test_a_checkpoint_that_was_copied_away_brings_its_configuration(run_dir: RunDir, tmp_path: Path) -> None:
    away = shutil.copytree(run_dir.checkpoints / "step_00000010", tmp_path / "away")
    used = saved_run([f"checkpoint.path={away}"])
    assert used is not None
    assert used.checkpoint == away
    assert used.saved.raw["data"]["batch_size"] == 77
    assert used.saved.overrides == ("recipe=some",)


def test_a_checkpoint_whose_configuration_can_not_be_read(run_dir: RunDir) -> None:
    place = write_small(run_dir.checkpoints, 20, config_text="- a list\n")
    with pytest.raises(ConfigError, match="must hold a mapping"):
        saved_run([f"checkpoint.path={place}"])
    (place / "config.yaml").write_text("- a lisp\n")
    with pytest.raises(CheckpointError, match=r"config\.yaml has another checksum.*\nUse another .*: step_00000010$"):
        saved_run([f"checkpoint.path={place}"])
    (place / "config.yaml").unlink()
    with pytest.raises(CheckpointError, match=r"config\.yaml is missing"):
        saved_run([f"checkpoint.path={place}"])


@pytest.mark.parametrize("what", [".", "checkpoints", "checkpoints/last"])
def test_a_run_whose_last_checkpoint_is_gone_can_be_named(run_dir: RunDir, what: str) -> None:
    (run_dir.checkpoints / "last").symlink_to("step_00000030")
    resumed = saved_run([f"resume={run_dir.path / what}"])
    assert resumed is not None
    assert (resumed.checkpoint, resumed.saved.run_dir) == (None, run_dir)


def test_what_is_refused(run_dir: RunDir) -> None:
    path = run_dir.path
    with pytest.raises(ConfigError, match=r"resume can't go with checkpoint\.path"):
        saved_run([f"resume={path}", f"checkpoint.path={path}"])
    with pytest.raises(ConfigError, match="that run's recipe is some"):
        saved_run([f"checkpoint.path={path}", "recipe=other"])
    with pytest.raises(ConfigError, match=r"checkpoint\.path=a,b: must be one run directory"):
        saved_run(["checkpoint.path=a,b"])
    with pytest.raises(CheckpointError, match="There is no nowhere"):
        saved_run(["checkpoint.path=nowhere"])
    assert saved_run([f"checkpoint.path={path}", "recipe=some"]) is not None


def test_a_path_that_hydra_would_want_quoted(run_dir: RunDir, tmp_path: Path) -> None:
    strange = shutil.copytree(run_dir.checkpoints / "step_00000010", tmp_path / "a b=c {1}")
    used = saved_run([f"checkpoint.path={strange}"])
    assert used is not None
    assert used.checkpoint == strange


def test_what_names_a_run_is_not_composed(run_dir: RunDir) -> None:
    typed = [f"checkpoint.path={run_dir.path}", "trainer.max_epochs=9", "job=eval"]
    expected = ["recipe=some", "optimizer.lr=0.5", "trainer.max_epochs=9", "job=eval"]
    assert composable(typed, saved_run(typed)) == expected
    assert [names_a_run(text) for text in ("resume=x", "+checkpoint.path=x", "checkpoint.mode=max")] == [
        True,
        True,
        False,
    ]


# The configuration


def changed(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = deepcopy(dict(raw))
    for key, value in changes.items():
        *sections, name = key.split(".")
        place = result
        for section in sections:
            place = place[section]
        place[name] = value
    return result


def ground(run_dir: RunDir, *typed: str, key: str = "checkpoint.path") -> Ground:
    """What stands before a composition whose defaults are of today: a batch size of 4."""
    named = f"{key}={run_dir.path}"
    return Ground(saved_run([named]), without_typed=raw_config(), typed=(named, *typed))


def test_the_saved_configuration_is_used_and_what_is_typed_with_all_that_follows_it(run_dir: RunDir) -> None:
    composed = raw_config({"data.root": "two", "data.datasets.root": "two", "job": "eval"})
    raw = ground(run_dir, "data.root=two", "job=eval").configuration(composed, swept=False)
    saved = yaml.safe_load(run_dir.config_file.read_text())
    expected = {"data.root": "two", "data.datasets.root": "two", "job": "eval"}
    expected["checkpoint.path"] = str(run_dir.checkpoints / "step_00000020")
    assert raw == changed(saved, expected)
    assert raw["data"]["batch_size"] == 77


def test_typing_todays_default_is_typing_it_all_the_same(run_dir: RunDir) -> None:
    raw = ground(run_dir, "data.batch_size=4").configuration(raw_config(), swept=False)
    assert raw["data"]["batch_size"] == 4


def test_keys_that_are_newer_than_the_run_have_todays_values(run_dir: RunDir) -> None:
    saved = yaml.safe_load(run_dir.config_file.read_text())
    del saved["predict"], saved["trainer"]["benchmark"]
    run_dir.config_file.write_text(yaml.safe_dump(saved))
    raw = ground(run_dir, key="resume").configuration(raw_config({"trainer.benchmark": True}), swept=False)
    assert raw["predict"] == {"part": "test", "output": "predictions.csv"}
    assert raw["trainer"]["benchmark"] is True
    assert raw["resume"] == str(run_dir.path)
    assert raw["checkpoint"]["path"] is None


def test_an_evaluation_forgets_what_the_run_began_with(run_dir: RunDir) -> None:
    saved = yaml.safe_load(run_dir.config_file.read_text()) | {"init_from": "elsewhere"}
    for file in (run_dir.config_file, run_dir.checkpoints / "step_00000020" / "config.yaml"):
        file.write_text(yaml.safe_dump(saved))
    assert ground(run_dir).configuration(raw_config(), swept=False)["init_from"] is None
    assert ground(run_dir, key="resume").configuration(raw_config(), swept=False)["init_from"] == "elsewhere"


def test_several_runs_may_use_a_checkpoint_but_not_go_on_in_one_directory(run_dir: RunDir) -> None:
    assert ground(run_dir).configuration(raw_config(), swept=True)["data"]["batch_size"] == 77
    with pytest.raises(ConfigError, match="resume can't go with several runs"):
        ground(run_dir, key="resume").configuration(raw_config(), swept=True)
    with pytest.raises(ConfigError, match=r"checkpoint\.path can't go with init_from"):
        ground(run_dir, "init_from=x").configuration(raw_config(), swept=False)


@pytest.mark.parametrize("key", ["resume", "checkpoint.path"])
def test_a_file_can_not_name_a_run(key: str) -> None:
    fresh = Ground(None, without_typed=None, typed=())
    assert fresh.configuration(raw_config(), swept=False) == raw_config()
    with pytest.raises(ConfigError, match=r"is set in a file\. Type it on the command line"):
        fresh.configuration(raw_config({key: "somewhere"}), swept=False)


# resume=auto


def make_run(folder: Path, name: str, *, status: str | None, job: str = "train") -> RunDir:
    run_dir = create_run_dir(folder, name=name)
    save_config(run_dir, SimpleNamespace(raw=raw_config({"job": job}), overrides=()))
    if status is not None:
        process = {"pid": 77, "host": "elsewhere"}
        run_dir.update_run({"status": status, "process": process})
    return run_dir


def found(tmp_path: Path, *typed: str, swept: bool = False, node_rank: int = 0) -> list[str]:
    def compose(overrides: Sequence[str]) -> Mapping[str, Any]:
        assert all(not names_a_run(text) for text in overrides)
        return raw_config({"path.outputs": str(tmp_path), "topology.node_rank": node_rank})

    return with_run_found(typed, compose=compose, swept=swept)


def test_auto_is_the_newest_training_that_has_not_come_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "some"
    assert found(tmp_path, "resume=auto", "seed=3") == ["seed=3"]
    assert f"resume=auto: no unfinished run in {folder}; a new one begins" in capsys.readouterr().err
    make_run(folder, "2026-01-01", status="stopped")
    running = make_run(folder, "2026-01-02", status="running")
    make_run(folder, "2026-01-03", status="finished")
    make_run(folder, "2026-01-04", status="failed", job="eval")
    make_run(folder, "2026-01-05", status=None)  # killed before it said anything
    create_run_dir(folder, name="2026-01-06")
    write_small(running.checkpoints, 20)
    assert found(tmp_path, "resume=auto", "seed=3") == ["seed=3", f"resume={running.path}"]
    said = capsys.readouterr().err
    assert "under way, as process 77 on elsewhere; checkpoint of step 20" in said
    assert found(tmp_path, "resume=auto", node_rank=1) == [f"resume={running.path}"]
    assert capsys.readouterr().err == ""
    resumed = saved_run(found(tmp_path, "resume=auto"))
    assert resumed is not None
    assert resumed.saved.run_dir == running


def test_a_folder_with_an_awkward_name_is_found(tmp_path: Path) -> None:
    outputs = tmp_path / "it's, (here)"
    run_dir = make_run(outputs / "some", "2026-01-01", status="stopped")
    resumed = saved_run(found(outputs, "resume=auto"))
    assert resumed is not None
    assert resumed.saved.run_dir == run_dir


def test_auto_stands_alone(tmp_path: Path) -> None:
    assert found(tmp_path, "seed=1", "resume=some/where") == ["seed=1", "resume=some/where"]
    assert found(tmp_path, "seed=1") == ["seed=1"]
    with pytest.raises(ConfigError, match="can't go with several runs"):
        found(tmp_path, "resume=auto", swept=True)

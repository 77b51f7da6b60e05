"""What a run directory keeps of its configuration, and what a resumed run makes of it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from framework.config.saved import (
    apply_typed,
    confirm,
    keep_before,
    load_saved,
    merge_overrides,
    put_back,
    resume_argument,
    save_config,
    value_of,
)
from framework.errors import ConfigError
from framework.run_dir import RunDir, create_run_dir
from tests.unit.config.raw import raw_config


def request(changes: dict[str, Any] | None = None, *overrides: str) -> SimpleNamespace:
    return SimpleNamespace(raw=raw_config(changes), overrides=overrides)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run whose configuration is saved."""
    run_dir = create_run_dir(tmp_path / "outputs" / "some")
    save_config(run_dir, request({}, "seed=3", "resume=x", "+model.x=1"))
    return run_dir


def test_a_saved_configuration_is_loaded_as_it_was(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    given = request({"optimizer.note": "ünïcode: yes", "optimizer.eps": 1e-8, "optimizer.text": "1e-3"}, "recipe=some")
    monkeypatch.chdir(run_dir.path.parent)
    saved = load_saved(run_dir.path.name)
    assert (saved.overrides, saved.recipe) == (("recipe=some", "seed=3", "+model.x=1"), "some")
    save_config(run_dir, given)
    saved = load_saved(run_dir.path)
    assert (saved.raw, saved.overrides, saved.run_dir) == (given.raw, ("recipe=some",), run_dir)
    assert yaml.safe_load(run_dir.config_file.read_text()) == given.raw


def test_a_path_into_the_checkpoints_names_the_run(run_dir: RunDir) -> None:
    step = run_dir.checkpoints / "step_00000001"
    step.mkdir(parents=True)
    (run_dir.checkpoints / "file").touch()
    for pointer in ("last", "best"):
        (run_dir.checkpoints / pointer).symlink_to(step.name)
    for last in (run_dir.path, run_dir.checkpoints, run_dir.checkpoints / "last"):
        assert (load_saved(last).run_dir, load_saved(last).step) == (run_dir, None)
    for one in (step, run_dir.checkpoints / "best"):
        assert (load_saved(one).run_dir, load_saved(one).step) == (run_dir, step)
    for place in (run_dir.logs, run_dir.config_file, run_dir.checkpoints / "file"):
        with pytest.raises(ConfigError, match=f"resume={run_dir.path}"):
            load_saved(place)


def test_a_resumption_changes_nothing_until_it_is_confirmed(run_dir: RunDir) -> None:
    save_config(run_dir, request({"seed": 1}, "seed=1"))
    texts = [run_dir.config_file.read_text(), run_dir.overrides_file.read_text()]
    for seed in (2, 3):  # killed, and tried again
        keep_before(run_dir)
        save_config(run_dir, request({"seed": seed}, f"seed={seed}"))
        assert yaml.safe_load(run_dir.config_file.read_text())["seed"] == seed  # what the ranks read
        assert load_saved(run_dir.path).raw["seed"] == 1
        assert load_saved(run_dir.path).overrides == ("recipe=some", "seed=1")
    put_back(run_dir)
    assert [run_dir.config_file.read_text(), run_dir.overrides_file.read_text()] == texts
    assert not run_dir.before_file.exists()
    keep_before(run_dir)
    save_config(run_dir, request({"seed": 2}, "seed=2"))
    confirm(run_dir)
    put_back(run_dir)
    assert load_saved(run_dir.path).raw["seed"] == 2


@pytest.mark.parametrize("path", ["/a b/c,d", "it's", 'a"b', "3", "null", "a\\'b", "a\\", "$HOME (x) #1", " a "])
def test_a_printed_resume_survives_the_shell_and_hydra(path: str) -> None:
    command = ["bash", "-c", f"printf '%s\\0' {resume_argument(path)}"]
    words = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split("\0")
    assert words[1:] == [""]
    assert value_of(words[0]) == path
    plain = "outputs/toy/2026-01-01_00-00-00_abcd"
    assert resume_argument(plain) == f"resume={plain}"


def test_a_missing_run_gets_the_nearest_and_a_folder_of_runs_the_newest(run_dir: RunDir, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"no such directory[\s\S]*Did you mean resume={run_dir.path}\?"):
        load_saved(f"{run_dir.path}x")
    newer = RunDir(run_dir.path.with_name("9999-01-01_00-00-00_abcd"))
    newer.path.mkdir()
    save_config(newer, request())
    with pytest.raises(ConfigError, match=rf"newest run in it: resume={newer.path}"):
        load_saved(tmp_path / "outputs")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"overrides\.yaml\.$"):
        load_saved(tmp_path / "empty")


@pytest.mark.parametrize("content", ["[1", "- a\n", "3"])
def test_a_damaged_file_is_named(run_dir: RunDir, content: str) -> None:
    run_dir.config_file.write_text(content)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        load_saved(run_dir.path)


@pytest.mark.parametrize(
    ("saved", "typed", "merged"),
    [
        (["recipe=a", "seed=1"], ["trainer.gpus=0"], ["recipe=a", "seed=1", "trainer.gpus=0"]),
        (["seed=1"], ["seed=2"], ["seed=2"]),
        (["+model.x=1"], ["+model.x=2"], ["+model.x=2"]),
        (["optimizer=sgd", "optimizer.momentum=0.5"], ["optimizer=adam"], ["optimizer=adam"]),
        (["optimizer=adam"], ["optimizer.lr=1"], ["optimizer=adam", "optimizer.lr=1"]),
        (["optimizer=adam"], ["optimizer={lr:1}"], ["optimizer=adam", "optimizer={lr:1}"]),
        (["~logger.console"], ["logger=[jsonl]"], ["logger=[jsonl]"]),
    ],
)
def test_typed_overrides_replace_saved_ones(saved: list[str], typed: list[str], merged: list[str]) -> None:
    assert merge_overrides(saved, typed) == merged


def test_only_what_was_typed_changes_the_saved_configuration() -> None:
    saved = {
        **{"seed": 1, "trainer": {"gpus": 1, "max_epochs": 2}, "optimizer": {"lr": 1, "momentum": 2}},
        **{"logger": {"a": 1}, "o": {"betas": [1, 2], "x": 1}},
    }
    composed = {
        **{"seed": 9, "trainer": {"gpus": 9, "max_epochs": 5}, "optimizer": {"lr": 9, "new": [0]}},
        **{"logger": {}, "o": {"betas": [1, 3], "x": 2}},
    }
    typed = ["trainer.max_epochs=5", "optimizer=adam", "~logger.a", "o.betas.1=3"]
    assert apply_typed(saved, composed, typed=typed) == {
        **{"seed": 1, "trainer": {"gpus": 1, "max_epochs": 5}, "optimizer": {"lr": 9, "new": [0]}},
        **{"logger": {}, "o": {"betas": [1, 3], "x": 1}},  # a part of a list takes the whole list
    }
    assert saved["trainer"] == {"gpus": 1, "max_epochs": 2}

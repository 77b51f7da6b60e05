"""What a run directory keeps of its configuration, and what a resumed run makes of it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
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


@dataclass(frozen=True)
class Request:
    raw: dict[str, Any]
    overrides: tuple[str, ...] = ()


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return create_run_dir(tmp_path / "outputs" / "some")


def test_what_is_saved_is_loaded(run_dir: RunDir) -> None:
    raw = raw_config({"optimizer.note": "ünïcode: yes", "optimizer.eps": 1e-8, "optimizer.text": "1e-3"})
    save_config(run_dir, Request(raw, ("seed=3", "resume=x", "+model.x=1")))
    saved = load_saved(run_dir.path)
    assert saved.raw == raw
    assert saved.overrides == ("recipe=some", "seed=3", "+model.x=1")
    assert saved.run_dir == run_dir
    assert saved.recipe == "some"
    assert yaml.safe_load(run_dir.config_file.read_text()) == raw


def test_the_recipe_is_named_once(run_dir: RunDir) -> None:
    save_config(run_dir, Request(raw_config(), ("recipe=some", "seed=3")))
    assert load_saved(run_dir.path).overrides == ("recipe=some", "seed=3")


def test_the_checkpoints_stand_for_the_run(run_dir: RunDir) -> None:
    save_config(run_dir, Request(raw_config()))
    step = run_dir.checkpoints / "step_00000001"
    step.mkdir(parents=True)
    for pointer in ("last", "best"):
        (run_dir.checkpoints / pointer).symlink_to(step.name)
    for last in (run_dir.path, run_dir.checkpoints, run_dir.checkpoints / "last"):
        assert (load_saved(last).run_dir, load_saved(last).step) == (run_dir, None)
    for one in (step, run_dir.checkpoints / "best"):
        assert (load_saved(one).run_dir, load_saved(one).step) == (run_dir, step)


def test_something_else_in_a_run_is_refused(run_dir: RunDir) -> None:
    save_config(run_dir, Request(raw_config()))
    run_dir.checkpoints.mkdir()
    (run_dir.checkpoints / "file").touch()
    for place in (run_dir.logs, run_dir.config_file, run_dir.checkpoints / "file"):
        with pytest.raises(ConfigError, match="neither a run directory nor one of its checkpoints") as caught:
            load_saved(place)
        assert f"resume={run_dir.path}" in str(caught.value)


def test_until_it_is_confirmed_a_resumption_changes_nothing(run_dir: RunDir) -> None:
    old, new, newer = (Request(raw_config({"seed": seed}), (f"seed={seed}",)) for seed in (1, 2, 3))
    save_config(run_dir, old)
    texts = [run_dir.config_file.read_text(), run_dir.overrides_file.read_text()]
    for request in (new, newer):  # killed, and tried again
        keep_before(run_dir)
        save_config(run_dir, request)
        assert yaml.safe_load(run_dir.config_file.read_text()) == request.raw  # what the ranks read
        assert load_saved(run_dir.path).raw == old.raw
        assert load_saved(run_dir.path).overrides == ("recipe=some", "seed=1")
    put_back(run_dir)
    assert [run_dir.config_file.read_text(), run_dir.overrides_file.read_text()] == texts
    assert not run_dir.before_file.exists()
    keep_before(run_dir)
    save_config(run_dir, new)
    confirm(run_dir)
    put_back(run_dir)
    assert load_saved(run_dir.path).raw == new.raw


@pytest.mark.parametrize(
    "path",
    [
        "outputs/toy/2026-01-01_00-00-00_abcd",
        "/a b/c,d",
        "it's",
        'a"b',
        "3",
        "null",
        "a\\'b",
        "a\\",
        "$HOME (x) #1",
        " a ",
    ],
)
def test_a_printed_resume_survives_the_shell_and_hydra(path: str) -> None:
    command = ["bash", "-c", f"printf '%s\\0' {resume_argument(path)}"]
    words = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.split("\0")
    assert words[1:] == [""]
    assert value_of(words[0]) == path


def test_a_plain_path_is_printed_plainly() -> None:
    assert resume_argument("outputs/toy/2026-01-01_00-00-00_abcd") == "resume=outputs/toy/2026-01-01_00-00-00_abcd"


def test_a_relative_path(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    save_config(run_dir, Request(raw_config()))
    monkeypatch.chdir(run_dir.path.parent)
    assert load_saved(run_dir.path.name).run_dir == run_dir


def test_a_missing_run_gets_the_nearest(run_dir: RunDir) -> None:
    save_config(run_dir, Request(raw_config()))
    with pytest.raises(ConfigError) as caught:
        load_saved(f"{run_dir.path}x")
    assert "there is no such directory" in str(caught.value)
    assert f"Did you mean resume={run_dir.path}?" in str(caught.value)


def test_a_folder_of_runs_gets_the_newest(tmp_path: Path, run_dir: RunDir) -> None:
    newer = RunDir(run_dir.path.with_name("9999-01-01_00-00-00_abcd"))
    newer.path.mkdir()
    for each in (run_dir, newer):
        save_config(each, Request(raw_config()))
    with pytest.raises(ConfigError, match="is no run directory") as caught:
        load_saved(tmp_path / "outputs")
    assert f"The newest run in it: resume={newer.path}" in str(caught.value)


def test_an_empty_folder_gets_no_guess(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"overrides\.yaml\.$"):
        load_saved(tmp_path)


@pytest.mark.parametrize("content", ["[1", "- a\n", "3"])
def test_a_damaged_file_is_named(run_dir: RunDir, content: str) -> None:
    save_config(run_dir, Request(raw_config()))
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
def test_merge_overrides(saved: list[str], typed: list[str], merged: list[str]) -> None:
    assert merge_overrides(saved, typed) == merged


def test_only_what_was_typed_is_taken() -> None:
    saved = {
        "seed": 1,
        "trainer": {"gpus": 1, "max_epochs": 2},
        "optimizer": {"lr": 1, "momentum": 2},
        "logger": {"a": 1},
    }
    composed = {"seed": 9, "trainer": {"gpus": 9, "max_epochs": 5}, "optimizer": {"lr": 9, "new": [0]}, "logger": {}}
    result = apply_typed(saved, composed, typed=["trainer.max_epochs=5", "optimizer=adam", "~logger.a"])
    assert result == {
        "seed": 1,
        "trainer": {"gpus": 1, "max_epochs": 5},
        "optimizer": {"lr": 9, "new": [0]},
        "logger": {},
    }
    assert saved["trainer"] == {"gpus": 1, "max_epochs": 2}


def test_a_part_of_a_list_takes_the_whole_list() -> None:
    result = apply_typed({"o": {"betas": [1, 2], "x": 1}}, {"o": {"betas": [1, 3], "x": 2}}, typed=["o.betas.1=3"])
    assert result == {"o": {"betas": [1, 3], "x": 1}}

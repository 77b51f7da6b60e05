"""What a run directory keeps of its configuration, and what a resumed run makes of it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.types import Quote, QuotedString
from hypothesis import given
from hypothesis import strategies as st

from framework.errors import ConfigError
from tests.helpers.internals import (
    RunDir,
    apply_typed,
    create_run_dir,
    load_saved,
    merge_overrides,
    quoted,
    resume_argument,
    save_config,
    value_of,
)
from tests.unit.config.raw import raw_config


def save(run_dir: RunDir, changes: dict[str, Any] | None = None, *overrides: str) -> dict[str, Any]:
    """Save a configuration, and return it."""
    raw = raw_config(changes)
    save_config(run_dir, raw=raw, overrides=overrides)
    return raw


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run whose configuration is saved."""
    run_dir = create_run_dir(tmp_path / "outputs" / "some")
    save(run_dir, {}, "seed=3", "resume=x", "+model.x=1")
    return run_dir


def test_a_saved_configuration_is_loaded_as_it_was(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_dir.path.parent)
    saved = load_saved(run_dir.path.name)
    assert (saved.overrides, saved.raw["recipe"]) == (("recipe=some", "seed=3", "+model.x=1"), "some")
    changes = {"optimizer.note": "ünïcode: yes", "optimizer.eps": 1e-8, "optimizer.text": "1e-3"}
    raw = save(run_dir, changes, "recipe=some")
    saved = load_saved(run_dir.path)
    assert (saved.raw, saved.overrides, saved.run_dir) == (raw, ("recipe=some",), run_dir)
    assert yaml.safe_load(run_dir.config_file.read_text()) == raw


@given(text=st.text(alphabet="a \\'\",=[]{}()#$%é", max_size=8))
def test_a_quoted_text_is_read_as_it_was(text: str) -> None:
    assert value_of(f"path={quoted(text)}") == text
    assert value_of(f"path=[a,{quoted(text)}]") == ["a", text]
    assert quoted(text) == QuotedString(text, Quote.single).with_quotes()


def test_a_path_into_the_checkpoints_names_the_run(run_dir: RunDir) -> None:
    step = run_dir.checkpoints / "step_00000001"
    step.mkdir(parents=True)
    (run_dir.checkpoints / "file").touch()
    for pointer in ("last", "best"):
        (run_dir.checkpoints / pointer).symlink_to(step.name)
    for last in (run_dir.path, run_dir.checkpoints, run_dir.checkpoints / "last"):
        assert (load_saved(last).run_dir, load_saved(last).checkpoint) == (run_dir, None)
    for one in (step, run_dir.checkpoints / "best"):
        assert (load_saved(one).run_dir, load_saved(one).checkpoint) == (run_dir, step)
    for place in (run_dir.logs, run_dir.config_file, run_dir.checkpoints / "file"):
        with pytest.raises(ConfigError, match=f"resume={run_dir.path}"):
            load_saved(place)


@pytest.mark.parametrize("path", ["/a b/c,d", "null", "a\\'b\\", ' $HOME (x) #1" '])
def test_a_printed_resume_survives_the_shell_and_hydra(path: str) -> None:
    command = ["bash", "-c", f"printf '%s\\0' {resume_argument(path)}"]
    words = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split("\0")
    assert words[1:] == [""]
    assert value_of(words[0]) == path
    plain = "outputs/toy/2026-01-01_00-00-00_abcd"
    assert resume_argument(plain) == f"resume={plain}"


def test_a_missing_run_suggests_the_nearest(run_dir: RunDir, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"no such directory[\s\S]*Did you mean resume={run_dir.path}\?"):
        load_saved(f"{run_dir.path}x")
    newer = RunDir(run_dir.path.with_name("9999-01-01_00-00-00_abcd"))
    newer.path.mkdir()
    save(newer)
    with pytest.raises(ConfigError, match=rf"newest run in it: resume={newer.path}"):
        load_saved(tmp_path / "outputs")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"overrides\.yaml\.$"):
        load_saved(tmp_path / "empty")


def test_a_damaged_file_is_named(run_dir: RunDir) -> None:
    for content in ("[1", "- a\n"):
        run_dir.config_file.write_text(content)
        with pytest.raises(ConfigError, match=r"config\.yaml"):
            load_saved(run_dir.path)


@pytest.mark.parametrize(
    ("saved", "typed", "merged"),
    [
        (["recipe=a", "seed=1"], ["trainer.gpus=0"], ["recipe=a", "seed=1", "trainer.gpus=0"]),
        (["seed=1"], ["seed=2"], ["seed=2"]),
        (["optimizer=sgd", "optimizer.momentum=0.5"], ["optimizer=adam"], ["optimizer=adam"]),
        (["optimizer=adam"], ["optimizer.lr=1"], ["optimizer=adam", "optimizer.lr=1"]),
        (["~logger.console"], ["logger=[jsonl]"], ["logger=[jsonl]"]),
    ],
)
def test_typed_overrides_replace_saved_ones(saved: list[str], typed: list[str], merged: list[str]) -> None:
    assert merge_overrides(saved, typed) == merged


def test_only_what_was_typed_changes_the_saved_configuration() -> None:
    saved = {
        "seed": 1,
        "trainer": {"gpus": 1, "max_epochs": 2},
        "optimizer": {"lr": 1, "momentum": 2},
        "logger": {"a": 1},
        "o": {"betas": [1, 2], "x": 1},
    }
    before = {
        "seed": 9,
        "trainer": {"gpus": 9, "max_epochs": 5},
        "optimizer": {"lr": 1, "momentum": 2},
        "logger": {"a": 1},
        "o": {"betas": [1, 2], "x": 2},
    }
    after = {**before, "optimizer": {"lr": 9, "new": [0]}, "logger": {}, "o": {"betas": [1, 3], "x": 2}}
    typed = ["trainer.max_epochs=5", "optimizer=adam", "~logger.a", "o.betas.1=3"]
    assert apply_typed(saved, before=before, after=after, typed=typed) == {
        "seed": 1,
        "trainer": {"gpus": 1, "max_epochs": 5},
        "optimizer": {"lr": 9, "new": [0]},
        "logger": {},
        # A change within a list replaces the whole list.
        "o": {"betas": [1, 3], "x": 1},
    }
    assert saved["trainer"] == {"gpus": 1, "max_epochs": 2}

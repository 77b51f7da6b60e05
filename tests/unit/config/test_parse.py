"""Strict parsing: which values each key takes, and what is said about the others."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.errors import ConfigError
from tests.helpers.internals import assets_module, known_keys, nearest, nearest_key, normalize_override, parse
from tests.unit.config.raw import raw_config


def mistake(changes: dict[str, Any], *, without: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(raw_config(changes, without=without))
    return str(caught.value)


def test_values_become_types() -> None:
    config = parse(raw_config())
    assert config.backend.name == "auto"
    assert config.trainer.precision == "32-true"
    assert config.scheduler.interval == "epoch"
    assert config.trainer.gpus is config.topology.gpus_per_process is None
    assert (config.backend.init_timeout, config.backend.timeout, config.launcher.late_after) == (300.0, 600.0, 10.0)
    assert config.model == {"_target_": "recipes.some.Model", "width": 8}
    assert parse(raw_config({"logger.jsonl": None})).logger == {}
    with pytest.raises(FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "value", "result"),
    [
        ("trainer.gradient_clip_val", 1, 1.0),
        ("trainer.limit_train_batches", 1, 1),
        ("trainer.fast_dev_run", True, True),
        ("checkpoint.save_top_k", -1, -1),
        ("seed", 2**32 - 1, 2**32 - 1),
        ("backend.timeout", 0.5, 0.5),
        ("backend.timeout", "1.5h", 5400.0),
        ("backend.timeout", "1d", 86400.0),
        ("backend.timeout", "90 s", 90.0),
        ("data.mirrors", ["http://one/", "two"], ("http://one/", "two")),
        ("data.mirrors", [], ()),
    ],
)
def test_values_that_are_taken(key: str, value: object, result: object) -> None:
    section, _, name = key.rpartition(".")
    config = parse(raw_config({key: value}))
    taken = getattr(getattr(config, section) if section else config, name)
    assert taken == result
    assert type(taken) is type(result)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("trainer.max_epochs", True, "trainer.max_epochs=true: must be a whole number at least 1, or null"),
        ("trainer.max_epochs", 1000.0, "Write trainer.max_epochs=1000."),
        ("trainer.gpus", "all", "trainer.gpus=all: must be a whole number at least 0, or auto, or null"),
        ("data.global_batch_size", 0, "must be a whole number at least 1, or null"),
        ("trainer.deterministic", 1, "trainer.deterministic=1: must be true or false"),
        ("trainer.fast_dev_run", -1, "must be true or false or a whole number at least 0"),
        ("trainer.gradient_clip_val", 0, "must be a number above 0, or null"),
        ("trainer.gradient_clip_val", float("nan"), "trainer.gradient_clip_val=NaN"),
        ("trainer.limit_val_batches", "half", "must be a whole number or a fraction at least 0, or null"),
        ("trainer.precision", 32, "Type trainer.precision=32-true"),
        ("launcher.name", "loca", "launcher.name=loca: there is no such key."),
        ("launcher._target_", "local", "launcher._target_=local: must be the dotted name of a function"),
        ("trainer.activation_checkpointing", "Block", "Write trainer.activation_checkpointing=[Block]."),
        ("backend.name", "ncll", "must be one of auto, gloo, nccl, mpi. Did you mean backend.name=nccl?"),
        ("backend.timeout", "-5s", "backend.timeout=-5s: must be a time such as 90s, 30m, 2h or 1d"),
        ("backend.timeout", 0, "backend.timeout=0: must be a time"),
        ("backend.timeout", "400d", "at most 365d"),
        ("seed", -1, "seed=-1: must be a whole number at least 0 and at most 4294967295."),
        ("job", "tain", "Did you mean job=train?"),
        ("recipe", "", "recipe=: must be text"),
        ("path.outputs", 12, "Quote it: path.outputs=\"'12'\"."),
        ("data.mirrors", "one", "must be a list of strings such as [one,two], or null. Write data.mirrors=[one]."),
        ("data.mirrors", ["one", 2], 'data.mirrors=["one", 2]: must be a list of strings'),
        ("data.root", [], "data.root=[]: must be text, or null."),
        ("trainer", None, "trainer=null: must be a mapping with the keys gpus, max_epochs"),
        ("preflight", 3, "preflight=3: must be a mapping with the keys enabled, seconds"),
        ("model", {"width": 8}, "model has no `_target_`"),
        ("model._target_", "Model", "model._target_=Model: must be a dotted name"),
        ("task.parts", [{"_target_": 3}], "task.parts.0._target_=3: must be a dotted name"),
        ("scheduler.schedule", {}, "scheduler.schedule has no `_target_`"),
        ("model.width", "???", "model.width has no value. Set model.width=VALUE"),
        ("trainer.gpus", "???", "trainer.gpus has no value. It must be a whole number at least 0, or auto"),
        ("logger.jsonl", 1, "logger.jsonl=1: must be a mapping with `_target_`."),
        ("callbacks", [], "callbacks=[]: must be a mapping from names to mappings"),
        # Keys that there aren't get the nearest of the whole tree, or the list.
        ("trainer.gpsu", 2, "trainer.gpsu=2: there is no such key. Did you mean trainer.gpus=2?"),
        ("gpus", 2, "Did you mean trainer.gpus=2?"),
        ("lr", 2, "Did you mean optimizer.lr=2?"),
        ("trainer.epochs", 2, "Type trainer.max_epochs=2"),
        ("recpie", 2, "Did you mean recipe=2?"),
        ("checkpoint.zzz", 1, "checkpoint.zzz=1: there is no such key. checkpoint has "),
    ],
)
def test_values_that_are_refused(key: str, value: object, said: str) -> None:
    text = mistake({key: value})
    assert said in text
    assert len(text.splitlines()) == 1


REQUIRED = {
    "recipe",
    "job",
    "seed",
    "path.outputs",
    "eval.part",
    "predict.part",
    "predict.output",
    "export.format",
    "export.dynamic_batch",
    "plan.format",
    "parity.steps",
    "model",
    "task",
    "strategy",
    "optimizer",
    "data.datasets",
    "data.batch_size",
    "data.shuffle",
    "logger",
    "callbacks",
    "scheduler.interval",
    "backend.name",
    "backend.init_method",
    "backend.init_timeout",
    "backend.timeout",
    "topology.nnodes",
    "topology.node_rank",
    "topology.min_gpus_per_process",
    "topology.share_gpus",
    "trainer.precision",
    "trainer.accumulate_grad_batches",
    "trainer.gradient_clip_algorithm",
    "trainer.log_every_n_steps",
    "trainer.fast_dev_run",
    "trainer.deterministic",
    "checkpoint.enabled",
    "checkpoint.mode",
    "checkpoint.save_top_k",
    "launcher._target_",
    "launcher.max_restarts",
    "launcher.late_after",
}


def test_only_keys_with_defaults_are_optional() -> None:
    # Include the sections they are in.
    required = REQUIRED | {key.partition(".")[0] for key in REQUIRED}
    for key in known_keys():
        if key in required:
            assert f"{key} is missing. It must be " in mistake({}, without=(key,))
        else:
            parse(raw_config({}, without=(key,)))


def test_all_mistakes_are_listed() -> None:
    lines = mistake({"seed": -1, "trainer.gpsu": 1, "backend.name": "x"}, without=("job",)).splitlines()
    assert lines[0] == "The configuration has 4 mistakes:"
    assert [line[:4] for line in lines[1:]] == ["  - "] * 4
    assert len(mistake({"seed": "x" * 1000})) < 200


def test_a_section_can_be_typed_as_a_switch() -> None:
    on = parse(raw_config({"preflight": {"enabled": True}})).preflight
    assert (on.enabled, on.max_clock_offset) == (True, 1.0)
    assert normalize_override("preflight=false") == "preflight.enabled=false"
    assert normalize_override("+preflight=true,false") == "+preflight.enabled=true,false"
    assert normalize_override("runs=a/b") == "runs.paths=[a/b]"
    assert normalize_override("runs=[a,b]") == "runs.paths=[a,b]"
    assert normalize_override("runs=null") == "runs.paths=null"
    assert normalize_override("runs.filter=a=1 b>2") == "runs.filter='a=1 b>2'"
    for typed in ("runs={sort: best}", "runs.filter='a=1'", 'runs.filter="a=1"', "runs.filter=null", "runs.sort=-best"):
        assert normalize_override(typed) == typed
    for typed in ("preflight={seconds:1}", "preflight.seconds=1", "trainer=default", "~preflight"):
        assert normalize_override(typed) == typed


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


# Each example composes once.
@settings(max_examples=50)
@given(VALUES, st.sampled_from(known_keys()))
def test_any_value_is_taken_or_refused_by_name(value: Any, key: str) -> None:
    said = key
    try:
        parse(raw_config({key: value}))
    except ConfigError as error:
        said = str(error)
    assert key in said


# The nearest name

KEYS = ["trainer", "trainer.gpus", "trainer.max_epochs", "topology.gpus_per_process", "optimizer.lr", "optimizer.betas"]
NAMES = st.text(alphabet="abcdef._", min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("name", "allowed", "guess"),
    [
        ("adm", ["adam", "sgd"], "adam"),
        ("ADAM", ["adam", "sgd"], "adam"),
        ("momentum", ["adam", "sgd_momentum"], "sgd_momentum"),
        ("zzz", ["adam"], None),
        ("", ["adam"], None),
        ("x", [], None),
    ],
)
def test_nearest_names(name: str, allowed: list[str], guess: str | None) -> None:
    assert nearest(name, allowed) == guess


@given(NAMES, st.lists(NAMES, max_size=5))
def test_a_suggestion_is_always_an_allowed_name(name: str, allowed: list[str]) -> None:
    for guess in (nearest(name, allowed), nearest_key(name, allowed)):
        assert guess is None or guess in allowed
    assert nearest_key(name, [*allowed, name]) == name


def test_a_right_section_makes_no_wrong_key_right() -> None:
    assert [nearest_key(key, KEYS) for key in ("optimizer.momentum", "trainer.zzz", "qqqq")] == [None] * 3


# Where configuration is found


def test_the_packaged_configuration_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets_module, "_PACKAGE", tmp_path / "framework")
    with pytest.raises(ConfigError, match="installation is incomplete"):
        assets_module.config_dir()
    for place in (tmp_path / "conf", tmp_path / "framework" / "conf"):
        place.mkdir(parents=True)
        (place / "config.yaml").touch()
        assert assets_module.config_dir() == place

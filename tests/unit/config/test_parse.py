"""Strict parsing: what is taken, what is refused, and what is said about it."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from framework.config.parse import known_keys, node_above, parse, schema_keys, spelled_out
from framework.config.schema import BackendName, Interval, Precision, RankLosses
from framework.errors import ConfigError
from tests.unit.config.raw import raw_config


def mistake(changes: dict[str, Any], *, without: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(raw_config(changes, without=without))
    return str(caught.value)


def test_types() -> None:
    config = parse(raw_config())
    assert config.backend.name is BackendName.AUTO
    assert config.trainer.precision is Precision.FP32
    assert config.scheduler.interval is Interval.EPOCH
    assert config.trainer.gpus is None
    assert config.topology.gpus_per_process is None
    assert (config.backend.init_timeout, config.backend.timeout, config.launcher.late_after) == (300.0, 600.0, 10.0)
    assert config.model == {"_target_": "recipes.some.Model", "width": 8}
    with pytest.raises(FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "value", "result"),
    [
        ("trainer.gradient_clip_val", 1, 1.0),
        ("trainer.limit_train_batches", 1, 1),
        ("trainer.limit_train_batches", 1.0, 1.0),
        ("trainer.fast_dev_run", True, True),
        ("trainer.fast_dev_run", 3, 3),
        ("trainer.benchmark", False, False),
        ("trainer.log_rank_losses", True, RankLosses.LOGS),
        ("trainer.log_rank_losses", "terminal", RankLosses.TERMINAL),
        ("checkpoint.save_top_k", -1, -1),
        ("seed", 2**32 - 1, 2**32 - 1),
        ("trainer.gpus", 0, 0),
        ("backend.timeout", 0.5, 0.5),
        ("backend.timeout", "1.5h", 5400.0),
        ("backend.timeout", "1d", 86400.0),
        ("backend.timeout", "90 s", 90.0),
        ("backend.timeout", "90", 90.0),
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
        ("trainer.max_epochs", 0, "whole number at least 1"),
        ("trainer.max_epochs", 1000.0, "Write trainer.max_epochs=1000."),
        ("trainer.max_epochs", "ten", "trainer.max_epochs=ten: must be"),
        ("trainer.max_epochs", "auto", "trainer.max_epochs=auto: must be"),
        ("trainer.gpus", "all", "trainer.gpus=all: must be a whole number at least 0, or auto, or null"),
        ("trainer.gpus", -1, "trainer.gpus=-1"),
        ("trainer.deterministic", 1, "trainer.deterministic=1: must be true or false"),
        ("trainer.deterministic", None, "trainer.deterministic=null: must be true or false"),
        ("trainer.fast_dev_run", -1, "must be true or false or a whole number at least 0"),
        ("trainer.gradient_clip_val", 0, "must be a number above 0, or null"),
        ("trainer.gradient_clip_val", float("inf"), "trainer.gradient_clip_val=Infinity"),
        ("trainer.gradient_clip_val", float("nan"), "trainer.gradient_clip_val=NaN"),
        ("trainer.limit_val_batches", "half", "must be a whole number or a fraction at least 0, or null"),
        ("trainer.precision", 32, "Did you mean trainer.precision=32-true?"),
        ("backend.name", "ncll", "Did you mean backend.name=nccl?"),
        (
            "trainer.log_rank_losses",
            "Terminal",
            "must be one of false, true, terminal. Did you mean trainer.log_rank_l",
        ),
        ("trainer.log_rank_losses", 1, "must be one of false, true, terminal."),
        ("backend.name", "zzz", "backend.name=zzz: must be one of auto, gloo, nccl, mpi."),
        ("backend.timeout", "-5s", "backend.timeout=-5s: must be a time such as 90s, 30m, 2h or 1d"),
        ("backend.timeout", "soon", "backend.timeout=soon: must be a time"),
        ("backend.timeout", 0, "backend.timeout=0: must be a time"),
        ("backend.timeout", float("inf"), "must be a time"),
        ("backend.timeout", "400d", "at most 365d"),
        ("backend.timeout", True, "must be a time"),
        ("seed", -1, "seed=-1: must be a whole number at least 0 and at most 4294967295."),
        ("job", "", "job=: must be text"),
        ("path.outputs", 12, "Quote it: path.outputs=\"'12'\"."),
        ("data.mirrors", "one", "must be a list of texts such as [one,two], or null. Write data.mirrors=[one]."),
        ("data.mirrors", ["one", 2], 'data.mirrors=["one", 2]: must be a list of texts'),
        ("data.mirrors", [""], 'data.mirrors=[""]: must be a list of texts'),
        ("data.mirrors", {"one": "two"}, "must be a list of texts"),
        ("data.root", [], "data.root=[]: must be text, or null."),
        ("trainer", None, "trainer=null: must be a mapping with the keys gpus, max_epochs"),
        ("trainer", 3, "trainer=3: must be a mapping"),
        ("model", {"width": 8}, "model has no `_target_`"),
        ("model", None, "model=null: must be a mapping with `_target_`"),
        ("model._target_", "Model", "model._target_=Model: must be a dotted name"),
        ("model._target_", "a..b", "model._target_=a..b: must be a dotted name"),
        ("task.loss._target_", "torch.nn.", "task.loss._target_=torch.nn.: must be a dotted name"),
        ("task.parts", [{"_target_": 3}], "task.parts.0._target_=3: must be a dotted name"),
        ("scheduler.schedule", {}, "scheduler.schedule has no `_target_`"),
        ("model.width", "???", "model.width has no value yet. Give it one: model.width=VALUE"),
        ("model", "???", "model has no value yet. It must be a mapping with `_target_`."),
        ("trainer.gpus", "???", "trainer.gpus has no value yet. It must be a whole number at least 0, or auto"),
        ("logger.jsonl", None, "logger.jsonl=null: must be a mapping with `_target_`. Remove it with ~logger.jsonl."),
        ("callbacks", [], "callbacks=[]: must be a mapping from names to mappings"),
    ],
)
def test_values_that_are_refused(key: str, value: object, said: str) -> None:
    text = mistake({key: value})
    assert said in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("key", "guess"),
    [
        ("trainer.gpsu", "trainer.gpus"),
        ("trainer.gpuss", "trainer.gpus"),
        ("gpus", "trainer.gpus"),
        ("optimizer_lr", "optimizer.lr"),
        ("lr", "optimizer.lr"),
        ("batch_size", "data.batch_size"),
        ("trainer.epochs", "trainer.max_epochs"),
        ("trainer.prec", "trainer.precision"),
        ("trainer.lr", "optimizer.lr"),
        ("recpie", "recipe"),
        ("backend.time_out", "backend.timeout"),
        ("TRAINER", "trainer"),
    ],
)
def test_unknown_keys_get_the_nearest_of_the_whole_tree(key: str, guess: str) -> None:
    text = mistake({key: 2})
    assert text == f"{key}=2: there is no such key. Did you mean {guess}?"


def test_an_unknown_key_like_no_other_gets_the_list() -> None:
    assert mistake({"topology.zzz": 1}) == (
        "topology.zzz=1: there is no such key. topology has nnodes, node_rank, procs_per_node, gpus_per_process, "
        "min_gpus_per_process, share_gpus, rdzv_endpoint."
    )


OPTIONAL = {
    *("resume", "init_from", "checkpoint.path", "checkpoint.monitor", "checkpoint.every_n_steps"),
    *("checkpoint.every_n_epochs", "data.global_batch_size", "data.eval_batch_size", "data.root", "data.mirrors"),
    *("parity.processes", "data.num_workers"),
    *("plan.train_samples", "export.output", "topology.rdzv_endpoint", "checkpoint.every_n_minutes"),
    # have defaults
    *("checkpoint.asynchronous", "checkpoint.save_last_k", "data.loader", "data.stream", "trainer.cpu_affinity"),
    *(
        "trainer.log_rank_losses",
        "trainer.num_sanity_val_steps",
        "trainer.channels_last",
        "trainer.compile",
        "trainer.profiler",
        "trainer.activation_checkpointing",
    ),
    *(key for key in schema_keys() if key.partition(".")[0] in ("preflight", "collectives", "tune")),
    *("topology.procs_per_node", "topology.gpus_per_process", "scheduler.schedule", "scheduler.monitor"),
    "scheduler.total_steps",
    *("trainer.gpus", "trainer.max_epochs", "trainer.max_steps", "trainer.gradient_clip_val", "trainer.num_threads"),
    *("trainer.val_check_interval", "trainer.check_val_every_n_epoch", "trainer.limit_train_batches"),
    *("trainer.limit_val_batches", "trainer.limit_test_batches", "trainer.overfit_batches", "trainer.benchmark"),
}


@pytest.mark.parametrize("key", schema_keys())
def test_only_a_key_that_may_be_null_may_be_left_out(key: str) -> None:
    if key in OPTIONAL:
        parse(raw_config({}, without=(key,)))
    else:
        assert f"{key} is missing. It must be " in mistake({}, without=(key,))


def test_all_mistakes_are_shown_together() -> None:
    lines = mistake({"seed": -1, "trainer.gpsu": 1, "backend.name": "x"}, without=("job",)).splitlines()
    assert lines[0] == "The configuration has 4 mistakes:"
    assert [line[:4] for line in lines[1:]] == ["  - "] * 4


def test_very_many_mistakes_are_cut() -> None:
    lines = mistake({f"zz{number}": 1 for number in range(50)}).splitlines()
    assert lines[-1] == "  … and 30 more"
    assert len(lines) == 22


def test_a_long_value_is_shortened() -> None:
    assert len(mistake({"seed": "x" * 1000})) < 200


def test_what_nodes_hold_is_left_as_it_is() -> None:
    node = {"_target_": "a.b", "lr": "1e-3", "betas": [1, 2], "inner": {"x": None}, "auto": "auto"}
    assert parse(raw_config({"optimizer": node})).optimizer == node


def test_known_keys_are_those_of_the_schema_and_inside_nodes() -> None:
    keys = known_keys(raw_config())
    assert {"trainer.gpus", "optimizer.lr", "task.loss._target_", "logger.jsonl._target_", "model.width"} <= set(keys)


@pytest.mark.parametrize(
    ("key", "node"),
    [
        ("optimizer.lr", "optimizer"),
        ("logger.jsonl.x", "logger.jsonl"),
        ("data.datasets.x.y", "data.datasets"),
        ("optimizer", None),
        ("logger.jsonl", None),
        ("trainer.gpus", None),
        ("trainer.gpus.x", None),
        ("nope.x", None),
    ],
)
def test_node_above(key: str, node: str | None) -> None:
    assert node_above(key) == node


def test_a_section_that_is_a_switch() -> None:
    written_out = parse(raw_config({"preflight": {"enabled": True}})).preflight
    assert parse(raw_config({"preflight": True})).preflight == written_out
    assert (written_out.enabled, written_out.max_clock_offset) == (True, 1.0)
    assert parse(raw_config({"preflight": False})).preflight == parse(raw_config(without=("preflight",))).preflight
    assert "preflight=3: must be true, false or a mapping with the keys enabled, seconds" in mistake({"preflight": 3})
    assert "trainer=true: must be a mapping" in mistake({"trainer": True})


@pytest.mark.parametrize(
    ("typed", "composed"),
    [
        ("preflight=true", "preflight.enabled=true"),
        ("+preflight=true,false", "+preflight.enabled=true,false"),
        ("preflight={seconds:1}", "preflight={seconds:1}"),
        ("preflight.seconds=1", "preflight.seconds=1"),
        ("trainer=default", "trainer=default"),
        ("~preflight", "~preflight"),
    ],
)
def test_a_switch_is_spelled_out(typed: str, composed: str) -> None:
    assert spelled_out(typed) == composed


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(VALUES, st.sampled_from(schema_keys()))
def test_any_value_anywhere_is_taken_or_refused_by_name(value: Any, key: str) -> None:
    said = key
    try:
        parse(raw_config({key: value}))
    except ConfigError as error:
        said = str(error)
    assert key in said


def test_the_result_survives_yaml() -> None:
    raw = raw_config({"optimizer.eps": 1e-8, "optimizer.name": "1e-3"})
    assert parse(yaml.safe_load(yaml.safe_dump(raw))) == parse(raw)

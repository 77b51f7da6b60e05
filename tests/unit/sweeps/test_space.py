"""Hydra's sweep syntax as the space of a search: what each override means, and what is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.errors import ConfigError
from tests.helpers.internals import (
    VERSION_BASE,
    Choice,
    FloatInterval,
    Integers,
    Space,
    Steps,
    current_hydra,
    hydra_for,
    split_space,
    value_text,
)
from tests.unit.config.raw import composed


def space_of(*overrides: str) -> Space:
    return split_space(overrides, loader=None)[1]


@pytest.mark.parametrize(
    ("value", "dimension"),
    [
        ("0.1,0.01", Choice(("0.1", "0.01"))),
        ("choice(a,b)", Choice(("a", "b"))),
        ("sort(b,a)", Choice(("a", "b"))),
        ("null,true,1,1.0,one", Choice(("null", "true", "1", "1.0", "one"))),
        ("a,b,a", Choice(("a", "b"))),
        ("[1,2],{x:[3]}", Choice(("[1,2]", "{x:[3]}"))),
        ("'a,b',\"it's\"", Choice(("'a,b'", '"it\'s"'))),
        ("str(1,2)", Choice(("'1'", "'2'"))),
        ("bool(0,1)", Choice(("false", "true"))),
        ("${seed},a${seed}", Choice(("${seed}", "a${seed}"))),
        ("range(1,10)", Integers(1, 9)),
        ("range(3)", Integers(0, 2)),
        ("range(1,10,3)", Integers(1, 7, step=3)),
        ("range(10,1,-3)", Integers(4, 10, step=3)),
        ("shuffle(range(1,4))", Integers(1, 3)),
        ("tag(log,range(1,9))", Integers(1, 8, log=True)),
        ("range(0,1,0.25)", Steps((0.0, 0.25, 0.5, 0.75))),
        ("range(1,0,-0.5)", Steps((0.5, 1.0))),
        ("float(range(1,3))", Steps((1.0, 2.0))),
        ("interval(0.1,1)", FloatInterval(0.1, 1.0)),
        ("tag(log,interval(1e-4,1))", FloatInterval(1e-4, 1.0, log=True)),
        ("int(interval(1,8))", Integers(1, 8)),
        ("tag(log,int(interval(1,1024)))", Integers(1, 1024, log=True)),
        ("int(tag(log,interval(1,1024)))", Integers(1, 1024, log=True)),
    ],
)
def test_each_sweep_is_a_dimension(value: str, dimension: Any) -> None:
    assert space_of(f"optimizer.lr={value}") == Space({"optimizer.lr": dimension})


def test_single_values_stay_as_they_were_typed() -> None:
    overrides = ["recipe=toy", "+model.depth=range(1,4)", "tags=[a,b]", "~scheduler", "optimizer=adam,sgd"]
    fixed, space = split_space(overrides, loader=None)
    assert fixed == ["recipe=toy", "tags=[a,b]", "~scheduler"]
    assert list(space.dimensions) == ["+model.depth", "optimizer"]
    values: dict[str, int | str] = {"optimizer": "sgd", "+model.depth": 2}
    assert space.overrides(values) == ("+model.depth=2", "optimizer=sgd")


def test_a_glob_is_a_choice_of_the_options() -> None:
    with hydra_for(None):
        _, space = split_space(["optimizer=glob([adam*,sgd])"], loader=current_hydra().config_loader)
        assert space.dimensions["optimizer"] == Choice(("adam", "adamw", "adamw_groups", "sgd"))
        with pytest.raises(ConfigError, match=r"optimizer=glob\(x\*\): optimizer has no option of such a name"):
            split_space(["optimizer=glob(x*)"], loader=current_hydra().config_loader)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("a=interval(1,0)", "this interval is empty"),
        ("a=interval(1,1)", "this interval is empty"),
        ("a=interval(0,inf)", "finite numbers"),
        ("a=interval(1)", r"interval\(1\)': missing a required argument: 'end'"),
        ("a=interval(0,one)", "a=interval.0,one.: .*mismatch type argument end"),
        ("a=range(5,5)", "this range is empty.* STOP isn't one of its values"),
        ("a=range(1,5,-1)", "this range is empty"),
        ("a=range(1,5,0)", "a step other than 0"),
        ("a=range(0,1,1e-9)", r"1000000000 values. Type a=interval\(0,1\)"),
        ("a=int(interval(0,1e17))", "whole numbers up to 9007199254740992"),
        ("a=tag(log,interval(0,1))", "the lower end must be above 0"),
        ("a=tag(log,range(0,4))", "must be at least 1"),
        ("a=tag(log,range(1,9,2))", r"Type a=tag\(log,range\(1,8\)\)"),
        ("a=tag(log,range(0.1,1,0.1))", r"Type a=tag\(log,interval\(0.1,1\)\)"),
        ("a=tag(log,choice(1,10))", r"Type a=tag\(log,interval\(LOW,HIGH\)\)|type a=tag\(log,interval\(LOW,HIGH\)\)"),
        ("a=tag(prior,interval(0,1))", "the tag prior means nothing to a search"),
        ("a=1,interval(0,1)", "Give the range or interval alone"),
        ("a=nothing(1)", "Unknown function 'nothing'"),
        ("~a=1,2", "Type ~a, or leave it out"),
        ("hydra.verbose=true,false", "Hydra's own settings are the same for all trials"),
        ("logger.wandb.api_key=0a1b2c3d,0a1b2c3e", "passwords or tokens. Give it one value"),
    ],
)
def test_what_a_search_cannot_choose_from_is_refused(override: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as raised:
        space_of(override)
    assert str(raised.value).startswith(f"{override}: ")
    assert "\n" not in str(raised.value)


def test_all_mistakes_of_a_space_come_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)has 3 mistakes:.* a=interval\(1,0\).* b=range\(0\).* a is there twice"):
        space_of("a=interval(1,0)", "b=range(0)", "c=1", "a=1,2", "a=3,4")


# Values


def parsed(text: str) -> Any:
    return OverridesParser.create().parse_override(f"key={text}").value()


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
KEYS = st.sampled_from(["a", "a b", "a:b", "{a,b}", "a\\b", "a=b"])
VALUES = st.recursive(LEAVES, lambda below: st.lists(below, max_size=3) | st.dictionaries(KEYS, below), max_leaves=4)


@given(VALUES)
@settings(max_examples=200, deadline=None)
def test_a_value_composes_to_itself(value: Any) -> None:
    text = value_text(value)
    assert parsed(text) == value
    # 1 isn't True.
    assert repr(parsed(text)) == repr(value)


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(-(2**53), 2**53))
def test_a_drawn_number_composes_to_itself(real: float, whole: int) -> None:
    space = Space({"a": FloatInterval(-math.inf, math.inf), "b": Integers(-(2**53), 2**53)})
    a, b = space.overrides({"a": real, "b": whole})
    assert parsed(a.removeprefix("a=")) == real
    assert parsed(b.removeprefix("b=")) == whole


def test_a_tag_inside_a_cast_is_never_lost() -> None:
    override = "a=int(tag(log,range(1,9)))"
    if VERSION_BASE:
        # Hydra 1.3 drops it.
        with pytest.raises(ConfigError, match=r"Put it outside, as tag\(log,int\(…\)\)"):
            space_of(override)
    else:
        assert space_of(override) == Space({"a": Integers(1, 8, log=True)})


def test_the_numbers_of_a_range_are_those_of_a_grid() -> None:
    override = OverridesParser.create().parse_override("a=range(0.1,2,0.1)")
    grid = [f"a={value}" for value in override.sweep_string_iterator()]
    space = space_of("a=range(0.1,2,0.1)")
    assert [space.overrides({"a": position})[0] for position in range(19)] == grid


def test_drawn_overrides_reach_the_configuration() -> None:
    space = space_of("optimizer.lr=interval(0,1)", "tags=[a],['b,c',d]", "optimizer=sgd,adam", "seed=range(9)")
    drawn: dict[str, int | float | str] = {
        "optimizer.lr": 0.1 + 0.2,
        "tags": "['b,c',d]",
        "optimizer": "adam",
        "seed": 7,
    }
    raw = composed("recipe=toy", *space.overrides(drawn))
    assert raw["optimizer"]["lr"] == 0.1 + 0.2
    assert raw["optimizer"]["_target_"] == "torch.optim.Adam"
    assert (raw["tags"], raw["seed"]) == (["b,c", "d"], 7)


# In sweep.json

OVERRIDES = ("a=1,2", "b=range(1,10,2)", "c=tag(log,interval(0.1,1))", "d=range(0,1,0.5)")


def test_a_space_survives_json() -> None:
    space = space_of(*OVERRIDES)
    stored = json.loads(json.dumps(space.as_json()))
    assert stored == space.as_json()
    assert stored["b"] == {"kind": "int", "low": 1, "high": 9, "step": 2, "log": False}
    assert space.changes(stored) == []
    # The order in which the keys are typed doesn't count.
    assert space_of(*reversed(OVERRIDES)).changes(stored) == []


def test_the_changes_of_a_space_are_named() -> None:
    stored = space_of(*OVERRIDES).as_json()
    present = space_of("a=1,3", "b=range(1,10)", "c=interval(0.1,1)", "e=1,2")
    assert present.changes(stored) == [
        "a: 1, 2 before, 1, 3 now",
        "b: 1 to 9 by 2 before, 1 to 9 now",
        "c: 0.1 to 1.0 (log) before, 0.1 to 1.0 now",
        "d: 0.0, 0.5 before, one value now",
        "e: one value before, 1, 2 now",
    ]

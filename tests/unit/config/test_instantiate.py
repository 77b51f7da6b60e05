"""`_target_` nodes are built as Hydra's `instantiate` builds them, which is the oracle here."""

from __future__ import annotations

import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate as hydra_instantiate
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from framework.errors import TargetError
from tests.helpers.internals import bind, check_node, get_object, instantiate
from tests.unit import fake_targets
from tests.unit.fake_targets import Called

FAKES = "tests.unit.fake_targets"
CALLED = f"{FAKES}.Called"


def by_hydra(node: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        # From 1.4 on, it warns of calls without a list of the targets that are allowed.
        warnings.simplefilter("ignore", UserWarning)
        return hydra_instantiate({"_convert_": "all", **node})


def described(value: Any) -> Any:
    """Return what a target got or what was built of it, with the type of each container."""
    if isinstance(value, partial):
        return ("partial", value.func, described(list(value.args)), described(dict(value.keywords)))
    if isinstance(value, Called):
        return ("called", described(list(value.args)), described(value.keywords))
    if OmegaConf.is_dict(value) or isinstance(value, dict):
        return (type(value).__name__, [(name, described(item)) for name, item in value.items()])
    if OmegaConf.is_list(value) or isinstance(value, list):
        return (type(value).__name__, [described(item) for item in value])
    return (type(value).__name__, value)


WORDS = st.sampled_from(["", "a", "1", "true", "null", "1e-3", "a.b", "_target_"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS
NAMES = st.sampled_from(["a", "b", "c", "size"])
MODES = {
    "_recursive_": st.booleans(),
    "_convert_": st.sampled_from(["none", "partial", "object", "all"]),
}


def containers(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mappings = st.dictionaries(NAMES, values, max_size=3)
    return st.lists(values, max_size=3) | mappings | nodes(values)


def nodes(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    settings = st.fixed_dictionaries(
        {"_target_": st.just(CALLED)},
        optional={"_partial_": st.booleans(), "_args_": st.lists(values, max_size=2), **MODES},
    )
    return st.builds(lambda keys, keywords: {**keys, **keywords}, settings, st.dictionaries(NAMES, values, max_size=3))


@given(node=nodes(st.recursive(SCALARS, containers, max_leaves=8)))
def test_nodes_are_built_as_hydra_builds_them(node: dict[str, Any]) -> None:
    assert described(instantiate(node, key="k")) == described(by_hydra(node))


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "builtins.complex", "_args_": [1, 2]},
        {"_target_": "builtins.tuple", "_args_": [[1, {"_target_": "builtins.dict", "a": 1}]]},
        {"_target_": "builtins.dict", "a": {"_convert_": "none", "c": {"_target_": CALLED, "d": {}}}},
        {"_target_": "fractions.Fraction.from_float", "_args_": [0.5]},
    ],
)
def test_single_nodes_are_built_as_hydra_builds_them(node: dict[str, Any]) -> None:
    assert described(instantiate(node, key="k")) == described(by_hydra(node))


def test_a_config_that_a_target_read_becomes_a_dict(tmp_path: Path) -> None:
    file = tmp_path / "sizes.yaml"
    file.write_text("sizes: [1, 2]\ntwice: ${sizes}")
    node = {"_target_": CALLED, "read": {"_target_": "omegaconf.OmegaConf.load", "_args_": [str(file)]}}
    assert described(instantiate(node, key="k")) == described(by_hydra(node))
    assert described(instantiate({**node, "_convert_": "none"}, key="k")) == described(
        by_hydra({**node, "_convert_": "none"})
    )


def test_a_text_with_a_dollar_stays_a_text() -> None:
    built = instantiate({"_target_": CALLED, "a": "${b}", "b": ["${oc.env:HOME}"]}, key="k")
    assert built.keywords == {"a": "${b}", "b": ["${oc.env:HOME}"]}


def test_a_target_cannot_change_the_configuration() -> None:
    for recursive in (True, False):
        node = {"_target_": CALLED, "sizes": [1], "more": {"a": [2]}, "_recursive_": recursive}
        built = instantiate(node, key="k")
        built.keywords["sizes"].append(3)
        built.keywords["more"]["a"].append(4)
        assert node == {"_target_": CALLED, "sizes": [1], "more": {"a": [2]}, "_recursive_": recursive}


def test_binding_calls_only_the_targets_inside() -> None:
    bound = bind({"_target_": CALLED, "_args_": [1], "inner": {"_target_": CALLED}}, key="k")
    assert type(bound) is partial
    assert bound.func is Called
    assert bound.args == (1,)
    assert isinstance(bound.keywords["inner"], Called)


@pytest.mark.parametrize(
    ("inside", "place"),
    [
        ({"_target_": f"{FAKES}.broken"}, "k.a"),
        ({"b": [0, {"_target_": f"{FAKES}.broken", "text": "y"}]}, "k.a.b.1"),
        ({"_target_": CALLED, "_args_": [{"_target_": f"{FAKES}.broken"}]}, "k.a._args_.0"),
    ],
)
def test_an_error_names_the_key_and_the_target(inside: Any, place: str) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        instantiate({"_target_": CALLED, "a": inside}, key="k")
    (line,) = getattr(caught.value, "__notes__", caught.value.args[-1:])
    assert line.endswith(f"While building {place} ({FAKES}.broken).")


def test_a_target_that_is_missing_is_named_with_its_key() -> None:
    with pytest.raises(TargetError, match=r"k\.a\._target_=builtins\.dictt: .* Did you mean builtins\.dict"):
        instantiate({"_target_": CALLED, "a": {"_target_": "builtins.dictt"}}, key="k")


@pytest.mark.parametrize(
    ("keys", "mistake"),
    [
        ({"_partial_": "yes"}, "k.a._partial_=yes: must be true or false."),
        ({"_recursive_": 0}, "k.a._recursive_=0: must be true or false."),
        ({"_convert_": "everything"}, "k.a._convert_=everything: must be one of none, partial, object, all."),
        ({"_args_": 3}, "k.a._args_=3: must be a list, the arguments by position."),
        ({"_args_": {"b": 1}}, "k.a._args_={'b': 1}: must be a list, the arguments by position."),
    ],
)
def test_a_wrong_key_of_a_node_is_refused(keys: dict[str, Any], mistake: str) -> None:
    node = {"_target_": CALLED, "a": {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1, **keys}}
    assert list(check_node(node, "k")) == [mistake]


def test_an_object_is_found_by_its_name() -> None:
    assert get_object(CALLED) is fake_targets.Called
    assert get_object("math.pi") == math.pi

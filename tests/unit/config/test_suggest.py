"""The nearest name: pure functions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from framework.config.suggest import did_you_mean, nearest, nearest_key

KEYS = ["trainer", "trainer.gpus", "trainer.max_epochs", "topology.gpus_per_process", "optimizer.lr", "optimizer.betas"]
NAMES = st.text(alphabet="abcdef._", min_size=1, max_size=12)


def test_nearest() -> None:
    assert nearest("adm", ["adam", "sgd"]) == "adam"
    assert nearest("ADAM", ["adam", "sgd"]) == "adam"
    assert nearest("momentum", ["adam", "sgd_momentum"]) == "sgd_momentum"
    assert nearest("zzz", ["adam"]) is None
    assert nearest("", ["adam"]) is None
    assert nearest("x", []) is None


def test_a_right_parent_makes_no_wrong_name_right() -> None:
    assert nearest_key("optimizer.momentum", KEYS) is None


def test_the_keys_above_are_not_offered() -> None:
    assert nearest_key("trainer.zzz", KEYS) is None


def test_nothing_is_near_to_nothing() -> None:
    assert nearest_key("qqqq", KEYS) is None
    assert nearest_key("x", []) is None


def test_did_you_mean() -> None:
    assert did_you_mean("a.b") == " Did you mean a.b?"
    assert did_you_mean(None) == ""


@given(NAMES, st.lists(NAMES, max_size=5))
def test_a_guess_is_one_of_those_allowed(given_name: str, allowed: list[str]) -> None:
    for guess in (nearest(given_name, allowed), nearest_key(given_name, allowed)):
        assert guess is None or guess in allowed


@given(st.lists(NAMES, min_size=1, max_size=5), st.data())
def test_a_name_is_nearest_to_itself(allowed: list[str], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(allowed))
    assert nearest_key(name, allowed) == name

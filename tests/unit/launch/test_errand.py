"""A question to a child that has torch: its answer, its errors, and that no child is left."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import pytest

from framework.errors import DataError, LaunchError, RunError
from framework.launch.errand import ask

HERE = "tests.unit.launch.test_errand"
LONG_S = 60.0
LARGE = 300_000  # more than a socket's buffer holds


def tell(arguments: Mapping[str, Any]) -> dict[str, Any]:
    print("printed by the child", flush=True)
    return {"pid": os.getpid(), **arguments}


def tell_much(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"text": "x" * LARGE}


def refuse(arguments: Mapping[str, Any]) -> dict[str, Any]:
    raise DataError("no data\nlook again")


def fall_over(arguments: Mapping[str, Any]) -> dict[str, Any]:
    raise ValueError("a mistake of its own")


def vanish(arguments: Mapping[str, Any]) -> dict[str, Any]:
    os._exit(0)


def dawdle(arguments: Mapping[str, Any]) -> dict[str, Any]:
    time.sleep(LONG_S)
    return {}


pytestmark = pytest.mark.multiproc


def test_a_server_is_started_where_there_is_none_and_its_childs_output_goes_to_stderr(own_state, capfd) -> None:
    answer = ask(None, f"{HERE}:tell", {"a": [1, None]}, timeout_s=LONG_S)
    assert answer.pop("pid") != os.getpid()
    assert answer == {"a": [1, None]}
    assert capfd.readouterr() == ("", "printed by the child\n")


def test_a_long_answer_comes_whole(warm) -> None:
    assert ask(warm, f"{HERE}:tell_much", {}, timeout_s=LONG_S) == {"text": "x" * LARGE}


def test_an_error_of_ours_is_raised_here_as_it_was_there(warm, capfd) -> None:
    with pytest.raises(DataError, match=r"^no data\nlook again$"):
        ask(warm, f"{HERE}:refuse", {}, timeout_s=LONG_S)
    assert capfd.readouterr() == ("", "")


def test_any_other_error_shows_its_traceback(own_state, capfd) -> None:
    with pytest.raises(RunError, match="ended without an answer"):
        ask(None, f"{HERE}:fall_over", {}, timeout_s=LONG_S)
    assert "ValueError: a mistake of its own" in capfd.readouterr().err


def test_a_child_that_vanishes_is_noticed(warm) -> None:
    with pytest.raises(RunError, match="ended without an answer"):
        ask(warm, f"{HERE}:vanish", {}, timeout_s=LONG_S)


def test_a_child_that_takes_too_long_is_ended(warm) -> None:
    began = time.monotonic()
    with pytest.raises(LaunchError, match=r"backend\.init_timeout=0\.5 s"):
        ask(warm, f"{HERE}:dawdle", {}, timeout_s=0.5)
    assert time.monotonic() - began < LONG_S / 2

"""Before a sweep's first trial starts: progress, the first mistake, and what further trials cost."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from importlib import invalidate_caches
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from framework.errors import ConfigError
from tests.helpers.internals import Request, check_request, check_trials, check_trials_module, parse
from tests.unit.config.raw import composed


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make standard error a terminal. Not in a fixture, after which pytest sets it again."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def request_of(_: int, overrides: Sequence[str]) -> Request:
    """Return the checked request of a trial."""
    raw = composed("recipe=toy", "trainer.gpus=0", *overrides)
    request = Request(parse(raw), raw, tuple(overrides))
    check_request(request)
    return request


def seeds(number: int) -> list[list[str]]:
    return [[f"seed={seed}"] for seed in range(number)]


@pytest.fixture
def trial_s(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Callable[[int, Sequence[str]], Request]]:
    """Return a `request_of` that takes this time by the clock of `check_trials`."""
    now_s = 0.0
    monkeypatch.setattr(check_trials_module, "monotonic", lambda: now_s)
    request = request_of(0, ["seed=1"])

    def make(duration_s: float) -> Callable[[int, Sequence[str]], Request]:
        def work(_: int, __: Sequence[str]) -> Request:
            nonlocal now_s
            now_s += duration_s
            return request

        return work

    return make


def test_requests_come_in_order() -> None:
    requests = check_trials(seeds(5), request_of=request_of)
    assert [request.config.seed for request in requests] == [0, 1, 2, 3, 4]
    assert check_trials([], request_of=request_of) == []


def test_a_mistake_names_its_trial() -> None:
    combinations = [["seed=1", "optimizer.lr=1"], ["seed=1", "optimizer.lr=-2"], ["seed=1", "optimizer.lr=-3"]]
    with pytest.raises(ConfigError) as raised:
        check_trials(combinations, request_of=request_of)
    assert str(raised.value).splitlines() == [
        "optimizer.lr=-2: must be at least 0 for torch.optim.SGD.",
        "Found in the trial optimizer.lr=-2. No trial was started.",
    ]


def test_a_mistake_of_the_only_trial_is_told_alone() -> None:
    with pytest.raises(ConfigError, match=r"SGD\.$"):
        check_trials([["seed=1", "optimizer.lr=-2"]], request_of=request_of)


def test_what_takes_less_than_a_second_is_silent(trial_s: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    check_trials(seeds(9), request_of=trial_s(0.1))
    assert terminal.getvalue() == ""


def test_a_terminal_has_a_line_that_is_replaced(trial_s: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    check_trials(seeds(4), request_of=trial_s(0.6))
    assert terminal.getvalue() == ("\rChecking 4 trials: 2 done\x1b[K\rChecking 4 trials: 3 done\x1b[K\r\x1b[K")


def test_elsewhere_one_line_is_printed_once(trial_s: Any, capsys: pytest.CaptureFixture[str]) -> None:
    check_trials(seeds(200), request_of=trial_s(0.5))
    assert capsys.readouterr() == ("", "Checking 200 trials\n")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ConfigError("wrong"), ZeroDivisionError()])
def test_the_line_is_taken_off_whatever_ends_it(
    error: BaseException, trial_s: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = on_terminal(monkeypatch)
    work = trial_s(2.0)

    def end_third(position: int, overrides: Sequence[str]) -> Request:
        if position == 2:
            raise error
        return work(position, overrides)

    with pytest.raises(type(error)):
        check_trials(seeds(5), request_of=end_third)
    assert terminal.getvalue().endswith("2 done\x1b[K\r\x1b[K")


def test_further_trials_look_for_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    num_searches = 0
    find_spec = PathFinder.find_spec

    def counting(*arguments: Any, **keywords: Any) -> Any:
        nonlocal num_searches
        num_searches += 1
        return find_spec(*arguments, **keywords)

    def searches(num_trials: int) -> int:
        nonlocal num_searches
        num_searches = 0
        check_trials(seeds(num_trials), request_of=request_of)
        return num_searches

    monkeypatch.setattr(PathFinder, "find_spec", counting)
    assert searches(1) > 10
    assert searches(20) == searches(1)


def test_a_later_check_finds_new_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    combinations = [["+callbacks.own={_target_:written_later.Own}"]]
    with pytest.raises(ConfigError, match="there is no module written_later"):
        check_trials(combinations, request_of=request_of)
    (tmp_path / "written_later.py").write_text("import framework\nclass Own(framework.Callback): ...\n")
    invalidate_caches()
    check_trials(combinations, request_of=request_of)

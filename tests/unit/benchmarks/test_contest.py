"""How contestants are run, compared and written to the table of results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gpt
from benchmarks.contest import Asked, Contest, Contestant, ContestError, Target, Unit, compare, run, take_turns

SECONDS = Unit("s", decimals=1)


def python(name: str, code: str, *, needs: str | None = None) -> Contestant:
    return Contestant(name, ("-c", code), needs)


def test_a_contestant_leaves_figures_in_an_empty_folder() -> None:
    code = "import os, sys; from benchmarks.marks import report; here = os.listdir('.'); open('file', 'w').close()"
    # Leave out the file of reports.
    code += "; report(terminal=sys.stdout.isatty(), files=len(here) - 1, folder=os.getcwd())"
    outcome = run(python("one", code))
    (found,) = outcome.reports
    assert (found["terminal"], found["files"], outcome.seconds > 0) == (True, 0, True)
    assert not Path(found["folder"]).exists()


def test_a_failing_contestant_is_shown_with_its_output() -> None:
    with pytest.raises(ContestError, match="no luck"):
        run(python("one", "raise SystemExit('no luck')"))


def test_figures_of_a_contestant_that_may_abort_count() -> None:
    code = "import os; from benchmarks.marks import report; report(first_step=1.5); os.abort()"
    aborting = Contestant("one", ("-c", code), may_abort=True)
    assert run(aborting).worst("first_step") == 1.5
    with pytest.raises(ContestError, match="exit status"):
        run(Contestant("one", ("-c", "import os; os.abort()"), may_abort=True))


def test_gpt_is_refused_without_the_text(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"tinyshakespeare/input.txt isn't there.*--data-root"):
        gpt.rows(Asked(rounds=1, data_root=tmp_path))


def test_rounds_rotate_who_begins() -> None:
    order: list[str] = []

    def measure(each: Contestant) -> dict[str, float]:
        order.append(each.name)
        return {"wall": float(len(order))}

    contests = take_turns([python(name, "") for name in "abc"], 3, measure)
    assert "".join(order) == "abcbcacab"
    assert contests["wall"].figures == {"a": [1.0, 6.0, 8.0], "b": [2.0, 4.0, 9.0], "c": [3.0, 5.0, 7.0]}


def test_a_missing_or_failing_contestant_is_named() -> None:
    measured: list[str] = []

    def measure(each: Contestant) -> dict[str, float]:
        measured.append(each.name)
        if each.name == "weak" and measured.count("weak") == 2:
            raise ContestError("it broke")
        return {"wall": 1.0}

    strange = python("strange", "", needs="no_such_package_here")
    wall = take_turns([python("ours", ""), python("weak", ""), strange], 3, measure)["wall"]
    assert (wall.absent, measured.count("weak")) == ({"strange": "not installed", "weak": "failed"}, 2)
    rows = [compare("part", "claim", wall, ("ours", name), unit=SECONDS, target=Target(1.0)) for name in wall.absent]
    assert {(row.theirs, row.ours, row.ratio, row.reached) for row in rows} == {
        (why, "1.0 (1.0–1.0) s", "–", "–") for why in ("not installed", "failed")
    }
    row = compare("part", "claim", None, ("ours", "raw"), unit=SECONDS)
    assert (row.ours, row.theirs, row.reached) == ("failed", "failed", "–")


def test_the_median_of_round_ratios_decides() -> None:
    contest = Contest({"ours": [1.0, 4.0, 3.0], "raw": [2.0, 2.0, 2.0]})
    row = compare("part", "claim", contest, ("ours", "raw"), unit=SECONDS, target=Target(1.4))
    assert str(row) == "| part | claim | 3.0 (1.0–4.0) s | 2.0 (2.0–2.0) s | 1.50 (0.50–2.00) | ≤ 1.40 | no |"
    more = compare("part", "claim", contest, ("ours", "raw"), unit=SECONDS, target=Target(1.5, at_least=True))
    assert (more.target, more.reached) == ("≥ 1.50", "yes")

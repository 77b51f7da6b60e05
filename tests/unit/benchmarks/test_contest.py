from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.contest import Contest, Contestant, ContestError, Target, Unit, compare, run, take_turns

SECONDS = Unit("s", decimals=1)


def python(name: str, code: str, *, needs: str | None = None) -> Contestant:
    return Contestant(name, ("-c", code), needs)


def test_a_contestant_leaves_its_figures_and_sees_a_terminal_and_an_empty_folder() -> None:
    code = "import os, sys; from benchmarks.marks import report"
    code += "; report(terminal=sys.stdout.isatty(), files=len(os.listdir('.')) - 1)"  # less the folder of reports
    outcome = run(python("one", code))
    assert outcome.reports == ({"terminal": True, "files": 0},)
    assert outcome.seconds > 0


def test_of_several_processes_the_slowest_counts() -> None:
    code = "import os; from benchmarks.marks import report; child = os.fork(); report(wall_s=1 if child else 2)"
    assert run(python("two", f"{code}; child and os.wait()")).worst("wall_s") == 2


@pytest.mark.parametrize(("code", "said"), [("raise SystemExit('no luck')", "no luck"), ("print('done')", "0 reports")])
def test_one_that_fails_or_leaves_no_report_is_told_with_what_it_printed(code: str, said: str) -> None:
    with pytest.raises(ContestError, match=said):
        run(python("one", code))


def test_processes_that_hold_still_are_looked_at_before_they_go_on() -> None:
    code = "from benchmarks import marks; marks.hold(); marks.report(went_on=True)"
    seen: list[tuple[int, list[int]]] = []
    outcome = run(python("one", code), at_hold=lambda command, held: seen.append((command, held)), holding=1)
    ((command, held),) = seen
    assert held == [command]
    assert outcome.reports == ({"went_on": True},)


def test_each_runs_once_a_round_and_another_one_begins() -> None:
    order: list[str] = []

    def measure(each: Contestant) -> dict[str, float]:
        order.append(each.name)
        return {"wall": float(len(order))}

    contests = take_turns([python(name, "") for name in "abc"], 3, measure)
    assert "".join(order) == "abcbcacab"
    assert contests["wall"].figures == {"a": [1.0, 6.0, 8.0], "b": [2.0, 4.0, 9.0], "c": [3.0, 5.0, 7.0]}


def test_one_that_is_not_installed_and_one_that_fails_are_left_out_and_named() -> None:
    measured: list[str] = []

    def measure(each: Contestant) -> dict[str, float]:
        measured.append(each.name)
        if each.name == "weak" and measured.count("weak") == 2:
            raise ContestError("it broke")
        return {"wall": 1.0}

    strange = python("strange", "", needs="no_such_package_here")
    wall = take_turns([python("ours", ""), python("weak", ""), strange], 3, measure)["wall"]
    assert wall.figures.keys() | wall.absent.keys() == {"ours", "weak", "strange"}
    assert wall.absent["strange"] == "not installed"
    assert wall.absent["weak"] == "failed"
    assert measured.count("weak") == 2
    rows = [compare("part", "claim", wall, ("ours", name), unit=SECONDS, target=Target(1.0)) for name in wall.absent]
    assert {row.theirs for row in rows} == {"not installed", "failed"}
    assert {(row.ours, row.ratio, row.reached) for row in rows} == {("1.0 (1.0–1.0) s", "–", "–")}


def test_ratios_are_of_each_round_and_the_median_decides() -> None:
    contest = Contest({"ours": [1.0, 4.0, 3.0], "raw": [2.0, 2.0, 2.0]})
    row = compare("part", "claim", contest, ("ours", "raw"), unit=SECONDS, target=Target(1.4))
    assert str(row) == "| part | claim | 3.0 (1.0–4.0) s | 2.0 (2.0–2.0) s | 1.50 (0.50–2.00) | ≤ 1.40 | no |"
    more = compare("part", "claim", contest, ("ours", "raw"), unit=SECONDS, target=Target(1.5, at_least=True))
    assert (more.target, more.reached) == ("≥ 1.50", "yes")


def test_where_everyone_failed_the_row_says_so() -> None:
    row = compare("part", "claim", None, ("ours", "raw"), unit=SECONDS)
    assert (row.ours, row.theirs, row.reached) == ("failed", "failed", "–")


def test_nothing_of_a_contestant_is_left_in_the_folder_it_ran_in() -> None:
    code = "import os; from benchmarks.marks import report; open('file', 'w').close(); report(folder=os.getcwd())"
    (found,) = run(python("one", code)).reports
    assert not Path(found["folder"]).exists()

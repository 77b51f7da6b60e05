"""How contestants are run, compared and written to the table of results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import PARTS, main
from benchmarks.contest import Contest, Contestant, ContestError, Row, Target, Unit, compare, run, take_turns
from benchmarks.record import BEGIN, END, RESULTS, Part, with_parts

SECONDS = Unit("s", decimals=1)
EMPTY = f"# Measured\n\n{BEGIN}\n{END}\n\nMore.\n"


def python(name: str, code: str, *, needs: str | None = None) -> Contestant:
    return Contestant(name, ("-c", code), needs)


def test_a_contestant_leaves_its_figures_and_sees_a_terminal_and_an_empty_folder() -> None:
    code = "import os, sys; from benchmarks.marks import report; here = os.listdir('.'); open('file', 'w').close()"
    code += "; report(terminal=sys.stdout.isatty(), files=len(here) - 1, folder=os.getcwd())"  # less that of reports
    outcome = run(python("one", code))
    (found,) = outcome.reports
    assert (found["terminal"], found["files"], outcome.seconds > 0) == (True, 0, True)
    assert not Path(found["folder"]).exists()


def test_of_several_processes_the_slowest_counts() -> None:
    code = "import os; from benchmarks.marks import report; child = os.fork(); report(wall_s=1 if child else 2)"
    assert run(python("two", f"{code}; child and os.wait()")).worst("wall_s") == 2


@pytest.mark.parametrize(("code", "said"), [("raise SystemExit('no luck')", "no luck"), ("print('done')", "0 reports")])
def test_a_contestant_that_fails_or_leaves_no_report_is_shown_with_its_output(code: str, said: str) -> None:
    with pytest.raises(ContestError, match=said):
        run(python("one", code))


def test_processes_that_hold_still_are_looked_at_before_they_continue() -> None:
    code = "from benchmarks import marks; marks.hold(); marks.report(continued=True)"
    seen: list[tuple[int, list[int]]] = []
    outcome = run(python("one", code), at_hold=lambda command, held: seen.append((command, held)), holding=1)
    ((command, held),) = seen
    assert held == [command]
    assert outcome.reports == ({"continued": True},)


def test_each_runs_once_a_round_and_another_one_begins() -> None:
    order: list[str] = []

    def measure(each: Contestant) -> dict[str, float]:
        order.append(each.name)
        return {"wall": float(len(order))}

    contests = take_turns([python(name, "") for name in "abc"], 3, measure)
    assert "".join(order) == "abcbcacab"
    assert contests["wall"].figures == {"a": [1.0, 6.0, 8.0], "b": [2.0, 4.0, 9.0], "c": [3.0, 5.0, 7.0]}


def test_a_contestant_that_is_not_installed_or_fails_is_left_out_and_named() -> None:
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


def test_ratios_are_of_each_round_and_the_median_decides() -> None:
    contest = Contest({"ours": [1.0, 4.0, 3.0], "raw": [2.0, 2.0, 2.0]})
    row = compare("part", "claim", contest, ("ours", "raw"), unit=SECONDS, target=Target(1.4))
    assert str(row) == "| part | claim | 3.0 (1.0–4.0) s | 2.0 (2.0–2.0) s | 1.50 (0.50–2.00) | ≤ 1.40 | no |"
    more = compare("part", "claim", contest, ("ours", "raw"), unit=SECONDS, target=Target(1.5, at_least=True))
    assert (more.target, more.reached) == ("≥ 1.50", "yes")


def test_a_part_that_is_run_replaces_its_lines_and_the_rest_of_the_file_stays() -> None:
    def part(name: str, figure: str) -> Part:
        return Part(name, (Row(name, "a claim", figure, "2 s"),), f"- **{name}**: measured {figure}")

    once = with_parts(EMPTY, [part("memory", "3 s"), part("steps", "1 s")], order=PARTS)
    assert once.startswith(f"# Measured\n\n{BEGIN}\n")
    assert once.endswith(f"{END}\n\nMore.\n")
    assert once.index("| steps |") < once.index("| memory |") < once.index("- **steps**") < once.index("- **memory**")
    again = with_parts(once, [part("steps", "7 s")], order=PARTS)
    assert again == with_parts(EMPTY, [part("steps", "7 s"), part("memory", "3 s")], order=PARTS)
    assert "| steps | a claim | 1 s | 2 s |" in with_parts(RESULTS.read_text(), [part("steps", "1 s")], order=PARTS)
    with pytest.raises(ValueError, match="to write between"):
        with_parts("# Measured\n", [], order=PARTS)


@pytest.mark.parametrize("arguments", [["--only", "stepz"], ["--rounds", "0"]])
def test_a_wrong_request_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--print"])
    assert ended.value.code == 2
    assert arguments[1] in capsys.readouterr().err

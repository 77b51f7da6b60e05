from __future__ import annotations

import pytest

from benchmarks.__main__ import PARTS, main
from benchmarks.contest import Row
from benchmarks.record import BEGIN, END, RESULTS, Part, with_parts

EMPTY = f"# Measured\n\n{BEGIN}\n{END}\n\nMore.\n"


def part(name: str, figure: str) -> Part:
    return Part(name, (Row(name, "a claim", figure, "2 s"),), f"- **{name}**: measured {figure}")


def test_parts_come_in_their_order_and_the_rest_of_the_file_stays() -> None:
    text = with_parts(EMPTY, [part("steps", "1 s"), part("memory", "3 s")], order=PARTS)
    assert text.startswith(f"# Measured\n\n{BEGIN}\n")
    assert text.endswith(f"{END}\n\nMore.\n")
    assert text.index("| steps |") < text.index("| memory |") < text.index("- **steps**") < text.index("- **memory**")


def test_a_part_that_was_not_run_keeps_its_lines_and_one_that_was_has_only_the_new_ones() -> None:
    once = with_parts(EMPTY, [part("steps", "1 s"), part("memory", "3 s")], order=PARTS)
    again = with_parts(once, [part("steps", "7 s")], order=PARTS)
    assert again == with_parts(EMPTY, [part("steps", "7 s"), part("memory", "3 s")], order=PARTS)
    assert with_parts(again, [], order=PARTS) == again


def test_without_the_comments_there_is_nowhere_to_write() -> None:
    with pytest.raises(ValueError, match="to write between"):
        with_parts("# Measured\n", [], order=PARTS)


def test_the_file_in_the_repository_can_be_written_to() -> None:
    text = with_parts(RESULTS.read_text(), [part("steps", "1 s")], order=PARTS)
    assert "| steps | a claim | 1 s | 2 s | – | – | – |" in text


@pytest.mark.parametrize("arguments", [["--only", "stepz"], ["--rounds", "0"]])
def test_a_wrong_request_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--print"])
    assert ended.value.code == 2
    assert arguments[1] in capsys.readouterr().err

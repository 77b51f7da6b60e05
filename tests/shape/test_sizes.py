"""Files, functions and parameter lists stay small. Raising a limit is a reviewed line here."""

from __future__ import annotations

import pytest

from tests.helpers.source import Module, modules_in, num_lines, num_parameters

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8

MODULES = {**modules_in("framework"), **modules_in("recipes")}


def too_big(module: Module) -> list[str]:
    """One line for everything in a module that is over a limit."""
    found = []
    if (lines := len(module.text.splitlines())) > MAX_FILE_LINES:
        found.append(f"{module.name} has {lines} lines; {MAX_FILE_LINES} at most")
    for function in module.functions():
        where = f"{module.name}:{function.lineno} {function.name}"
        if (lines := num_lines(function)) > MAX_FUNCTION_LINES:
            found.append(f"{where} has {lines} lines; {MAX_FUNCTION_LINES} at most")
        if (parameters := num_parameters(function)) > MAX_PARAMETERS:
            found.append(f"{where} has {parameters} parameters; {MAX_PARAMETERS} at most")
    return found


def test_there_is_something_to_measure() -> None:
    assert {"framework.trainer", "framework.engine", "recipes.digits"} <= MODULES.keys()


@pytest.mark.parametrize("name", MODULES)
def test_sizes(name: str) -> None:
    assert too_big(MODULES[name]) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x = 1\n" * 401, "has 401 lines"),
        ("def f():\n" + "    x = 1\n" * 60, "f has 61 lines"),
        ("class C:\n    async def f(self):\n" + "        x = 1\n" * 60, "f has 61 lines"),
        ("def f(a, b, /, c, d, *e, g, h, i, **j): ...", "f has 9 parameters"),
    ],
)
def test_what_is_too_big_is_named(text: str, complaint: str) -> None:
    assert [line for line in too_big(Module("m", text)) if complaint in line]


@pytest.mark.parametrize(
    "text",
    [
        "x = 1\n" * 400,
        "def f():\n" + "    x = 1\n" * 59,
        "class C:\n    def f(self, a, b, c, d, e, f, g, h): ...",
    ],
)
def test_what_is_just_small_enough_passes(text: str) -> None:
    assert too_big(Module("m", text)) == []

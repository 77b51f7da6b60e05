"""Code that is read once: one thought in a statement, nothing packed into literals, no circle of folders."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

import pytest

from tests.helpers.source import Module, cycles, imported_modules, modules_in

FOLDERS = ("framework", "recipes", "examples", "benchmarks", "docs", "tests")


def is_packed(node: ast.AST) -> bool:
    """If `a, b = x, y` assigns different things. A swap, such as `a, b = b, a`, has the same ones on both sides."""
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
        return False
    targets = [target for target in node.targets if isinstance(target, ast.Tuple)]
    return any(_texts(target.elts) != _texts(node.value.elts) for target in targets)


def _texts(nodes: Sequence[ast.expr]) -> set[str]:
    return {ast.unparse(node) for node in nodes}


def has_nested_conditional(node: ast.AST) -> bool:
    """If a conditional expression holds another one."""
    if not isinstance(node, ast.IfExp):
        return False
    return any(isinstance(inner, ast.IfExp) for inner in ast.walk(node) if inner is not node)


def has_starred_literal(node: ast.AST) -> bool:
    """If a literal is unpacked where its elements could be written: `*("a", "b")`, `{**{"a": 1}}`."""
    if isinstance(node, ast.Starred):
        return isinstance(node.value, ast.Tuple | ast.List | ast.Set)
    if isinstance(node, ast.Dict):
        unpacked = [value for key, value in zip(node.keys, node.values, strict=True) if key is None]
        return any(isinstance(value, ast.Dict) for value in unpacked)
    return False


RULES = {
    "assigns several things at once": is_packed,
    "nests conditional expressions": has_nested_conditional,
    "unpacks a literal": has_starred_literal,
}


def faults(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        for fault, is_broken in RULES.items():
            if is_broken(node):
                yield f"{module.name}:{node.lineno} {fault}: {ast.unparse(node)}"  # type: ignore[attr-defined]


def room(name: str) -> str:
    """Return the folder of a module: `framework.data.order` → `data`; the package itself is `__init__`."""
    return name.split(".")[1] if "." in name else "__init__"


def rooms_graph(known: dict[str, Module]) -> dict[str, set[str]]:
    """Return the rooms that each room of the framework imports, also for type checkers."""
    graph: dict[str, set[str]] = {room(name): set() for name in known}
    for name, module in known.items():
        graph[room(name)] |= {room(target) for target in imported_modules(module, known)}
    for name, others in graph.items():
        others.discard(name)
    return graph


@pytest.mark.parametrize("folder", FOLDERS)
def test_code_is_read_once(folder: str) -> None:
    for module in modules_in(folder).values():
        assert list(faults(module)) == []


def test_the_graph_of_folders_has_no_circle() -> None:
    assert cycles(rooms_graph(modules_in("framework"))) == []


@pytest.mark.parametrize(
    "text",
    [
        "a, b = x, y",
        "a, b = b, c",
        "x = (a, b) = 1, 2",
        "x = 1 if a else 2 if b else 3",
        "x = 1 if (2 if a else b) else 3",
        "x = [1 if a else [2 if b else c]]",
        'x = (*("a", "b"), c)',
        'f(*["a", "b"])',
        'x = {**{"a": 1}, **y}',
    ],
)
def test_the_rules_see_what_breaks_them(text: str) -> None:
    assert len(list(faults(Module("module", text)))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "a, b = b, a",
        "a, b = pair",
        "a, *b = f(x)",
        "x = a, b",
        "x = 1 if a else 2\ny = 1 if b else 2",
        "x = (*names, c)",
        "x = {**y, 'a': {'b': 1}}",
        "f(**{'a-b': 1})",
    ],
)
def test_the_rules_accept_plain_code(text: str) -> None:
    assert list(faults(Module("module", text))) == []


def test_a_circle_of_folders_is_found() -> None:
    known = {
        "framework.data.order": Module("framework.data.order", "import framework.data.batching"),
        "framework.data.batching": Module("framework.data.batching", "import framework.launch.plan"),
        "framework.launch.plan": Module(
            "framework.launch.plan", "if TYPE_CHECKING:\n    from framework.data import order"
        ),
        "framework.errors": Module("framework.errors", ""),
    }
    assert cycles(rooms_graph(known)) == [["data", "launch"]]

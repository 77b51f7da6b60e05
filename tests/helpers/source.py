"""Read the project's own source: its modules and what they import."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple, final

ROOT = Path(__file__).resolve().parents[2]


@final
@dataclass(frozen=True)
class Module:
    """One source file; `name` is what it is imported as."""

    name: str
    text: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def package(self) -> str:
        """What `from .` means in it."""
        return self.name if self.is_package else self.name.rpartition(".")[0]


class Import(NamedTuple):
    """`from module import name`, absolute; `name` is None for `import module`."""

    module: str
    name: str | None
    line: int


def modules_in(folder: str) -> dict[str, Module]:
    """Return all Python files under a folder of the repository by their module's name."""
    modules = {}
    for file in sorted((ROOT / folder).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules[name] = Module(name, file.read_text(), is_package=is_package)
    return modules


@cache
def imports(module: Module) -> list[Import]:
    """Return every import of a module, also those in functions and for type checkers."""
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, None, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            found += [Import(base, alias.name, node.lineno) for alias in node.names]
    return found


def imported_modules(module: Module, known: Mapping[str, Module]) -> dict[str, int]:
    """Return the known modules that a module imports, with the line. `from a import b` may mean the module a.b."""
    found = {}
    for entry in imports(module):
        submodule = f"{entry.module}.{entry.name}"
        target = submodule if submodule in known else entry.module
        if target in known:
            found[target] = entry.line
    return found


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of nodes that can all reach each other, each sorted."""
    reachable = {node: _reachable(graph, node) for node in graph}
    groups = set()
    for node in graph:
        if node in reachable[node]:
            group = [other for other in reachable[node] if node in reachable.get(other, ())]
            groups.add(tuple(sorted(group)))
    return [list(group) for group in sorted(groups)]


def string_literals(module: Module) -> Iterator[tuple[str, int]]:
    """Yield every string constant and its line."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, node.lineno


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.package.split(".")
    base = parts[: len(parts) - (node.level - 1)]
    return ".".join([*base, *filter(None, [node.module])])


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += graph.get(node, ())
    return seen

"""Modules that aren't imported: where their files are, and which names their source binds."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

FUNCTION_NODES = (ast.FunctionDef, ast.AsyncFunctionDef)

# Source that makes names which no statement binds.
_DYNAMIC = re.compile(r"\b__getattr__\b|\bglobals\(|\blocals\(|\bvars\(|\bexec\(|\bsetattr\(|sys\.modules|__dict__")
_GLOBAL = re.compile(r"^[ \t]+global[ \t]+(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class SourceModule:
    """A module, which has source unless it is compiled or a namespace package."""

    name: str
    spec: ModuleSpec

    @property
    def folders(self) -> list[str]:
        """Where its submodules are; none for a plain module."""
        return list(self.spec.submodule_search_locations or ())

    @property
    def is_namespace(self) -> bool:
        """True for a folder without `__init__.py`: it has nothing but its submodules."""
        return self.spec.origin is None and bool(self.folders)

    @property
    def package(self) -> str:
        """The package that relative imports in it start from."""
        if self.folders:
            return self.name
        return self.name.rpartition(".")[0]

    @property
    def file(self) -> str | None:
        """Its source file, if it has one."""
        origin = self.spec.origin
        if origin is None or not origin.endswith(".py"):
            return None
        return origin

    @cached_property
    def contents(self) -> ModuleContents | None:
        """What its source binds; None without readable source."""
        if self.file is None:
            return None
        try:
            path = Path(self.file)
            stat = path.stat()
            return _read_contents(path, (stat.st_mtime_ns, stat.st_size))
        except (OSError, SyntaxError, ValueError):
            return None


# The modules that have been looked up, by name, while `files_unchanged` is entered.
_MODULES: ContextVar[dict[str, SourceModule | None] | None] = ContextVar("modules", default=None)


@contextmanager
def files_unchanged() -> Iterator[None]:
    """Look up each module once while this is entered, as the trials of a sweep name the same ones again and again."""
    token = _MODULES.set({})
    try:
        yield
    finally:
        _MODULES.reset(token)


def find_module(name: str) -> SourceModule | None:
    """Return the module of a dotted name; None if Python would find none, or made it by hand."""
    modules = _MODULES.get()
    if modules is None:
        return _find_module(name)
    if name not in modules:
        modules[name] = _find_module(name)
    return modules[name]


def _find_module(name: str) -> SourceModule | None:
    try:
        spec = _find_spec(name)
    except (ImportError, AttributeError, ValueError):
        # Python says so of modules that were made by hand.
        return None
    if spec is None:
        return None
    return SourceModule(name, spec)


def _find_spec(name: str) -> ModuleSpec | None:
    package_name, _, last = name.rpartition(".")
    if not package_name:
        return importlib.util.find_spec(name)
    # Not by `importlib.util.find_spec`, which would import the package.
    package = find_module(package_name)
    if package is None or not package.folders:
        return None
    try:
        return PathFinder.find_spec(name, package.folders)
    except KeyError:
        # A folder without __init__.py: Python looks for its parent among the imported modules.
        return _namespace_package(name, [Path(folder, last) for folder in package.folders])


def _namespace_package(name: str, folders: list[Path]) -> ModuleSpec:
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(folder) for folder in folders if folder.is_dir()]
    return spec


# Names


@dataclass(frozen=True)
class ImportedName:
    """One name of an import statement."""

    statement: ast.Import | ast.ImportFrom
    alias: ast.alias

    @property
    def lineno(self) -> int:
        return self.statement.lineno


Binding = ast.stmt | ImportedName
"""What binds a name."""


class ModuleContents:
    """What the source of a module binds at its top level, branches included."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        # What binds each name, in the order of the source.
        self.bindings: dict[str, list[Binding]] = {}
        # `from MODULE import *`.
        self.stars: list[ast.ImportFrom] = []
        # It may have names that no statement binds.
        self.is_dynamic = _DYNAMIC.search(text) is not None
        # Names that a function binds by `global`.
        self.set_by_functions: set[str] = set()
        for names in _GLOBAL.findall(text):
            self.set_by_functions.update(re.findall(r"\w+", names))
        self._exported = _exported_names(self.tree)
        self._read(self.tree.body)

    def exports(self, name: str) -> bool:
        """Return True if `from MODULE import *` brings this name."""
        if self._exported is not None:
            return name in self._exported
        return not name.startswith("_")

    def _read(self, body: list[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, (*FUNCTION_NODES, ast.ClassDef)):
                if not is_overload(statement):
                    self._bind(statement.name, statement)
            elif isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                self.stars.append(statement)
            elif isinstance(statement, (ast.Import, ast.ImportFrom)):
                for alias in statement.names:
                    # `import a.b` binds `a`.
                    name = alias.asname or alias.name.partition(".")[0]
                    self._bind(name, ImportedName(statement, alias))
            else:
                for name in names_bound(statement):
                    self._bind(name, statement)
                self._read_branches(statement)

    def _read_branches(self, statement: ast.stmt) -> None:
        """Read what is inside an `if`, a `try`, a loop and so on."""
        for field in ("body", "orelse", "finalbody"):
            self._read(getattr(statement, field, []))
        for handler in getattr(statement, "handlers", []):
            self._read(handler.body)

    def _bind(self, name: str, binding: Binding) -> None:
        self.bindings.setdefault(name, []).append(binding)


@lru_cache(maxsize=256)
def _read_contents(path: Path, _version: tuple[int, int]) -> ModuleContents:
    """Return the contents of a file, read again if its version (time of change, size) is another one."""
    return ModuleContents(path.read_text(encoding="utf-8"))


def _exported_names(tree: ast.Module) -> set[str] | None:
    """Return the names in a module's `__all__`; None if it has none, or one that isn't a plain list."""
    names: set[str] | None = None
    for statement in tree.body:
        if "__all__" not in names_bound(statement):
            continue
        try:
            value = ast.literal_eval(statement.value)  # type: ignore[attr-defined]
        except (AttributeError, ValueError):
            return None
        if names is not None or not isinstance(value, (list, tuple)):
            return None
        names = set(value)
    return names


def is_overload(node: ast.stmt) -> bool:
    """Return True for one of several signatures that `typing.overload` declares."""
    decorators = getattr(node, "decorator_list", [])
    return any(dotted_name(decorator) in ("overload", "typing.overload") for decorator in decorators)


def names_bound(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement assigns or deletes, without those in its branches."""
    targets: list[ast.AST] = list(getattr(statement, "targets", []))
    target = getattr(statement, "target", None)
    if target is not None:
        targets.append(target)
    for item in getattr(statement, "items", []):
        if item.optional_vars is not None:
            targets.append(item.optional_vars)
    for target in targets:
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                yield node.id


def dotted_name(node: ast.AST) -> str | None:
    """Return `a.b.c` of an expression that is a dotted name; None of any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted_name(node.value)
        if base is not None:
            return f"{base}.{node.attr}"
    return None

"""From a dotted name to the class or function that it stands for, through imports."""

from __future__ import annotations

import ast
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from framework.config.source.modules import (
    FUNCTION_NODES,
    Binding,
    ImportedName,
    ModuleContents,
    SourceModule,
    dotted_name,
    find_module,
)

# How many imports are followed from one name, at most.
_MAX_DEPTH = 12
# Star imports of one module that are followed, at most.
_MAX_STARS = 30


@dataclass(frozen=True)
class SourceFunction:
    """A function at the top level of a module."""

    module: SourceModule
    node: ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class SourceClass:
    """A class at the top level of a module."""

    module: SourceModule
    node: ast.ClassDef

    @property
    def name(self) -> str:
        return f"{self.module.name}.{self.node.name}"


@dataclass(frozen=True)
class Missing:
    """A dotted name that certainly doesn't exist. parent: the module that should have it; None: there is no module."""

    path: str
    parent: SourceModule | None


Found = SourceModule | SourceFunction | SourceClass | Missing | None
"""What a name stands for; None if that isn't certain."""


def look_up(name: str) -> Found:
    """Return what a dotted name stands for."""
    first, *others = name.split(".")
    module = find_module(first)
    if module is not None:
        return _follow(module, others)
    if first in sys.modules:
        # Made by hand, so it has no source.
        return None
    return Missing(first, None)


def resolve(module: SourceModule, expression: ast.AST) -> Found:
    """Return what an expression at the top level of a module stands for; None if it is no dotted name."""
    name = dotted_name(expression)
    if name is None:
        return None
    first, *others = name.split(".")
    return _follow(_attribute(module, first), others)


def _follow(found: Found, names: Sequence[str]) -> Found:
    """Return what is found by these names, each an attribute of what was found before."""
    for position, name in enumerate(names, start=1):
        if isinstance(found, Missing):
            return found
        if not isinstance(found, SourceModule):
            # An attribute of a class, or of what isn't known.
            return None
        submodule = None
        if position < len(names):
            # Most packages bind no other object to the name of a submodule, and reading a large package takes 0.1 s.
            submodule = find_module(f"{found.name}.{name}")
        found = submodule or _attribute(found, name)
    return found


# A name in a module


def _attribute(module: SourceModule, name: str, *, depth: int = 0) -> Found:
    """Return what a name in a module stands for, followed through imports. depth: how many were followed before."""
    submodule = find_module(f"{module.name}.{name}")
    missing = Missing(f"{module.name}.{name}", module)
    contents = module.contents
    if contents is None:
        if module.is_namespace:
            return submodule or missing
        return submodule
    if depth > _MAX_DEPTH or name in contents.set_by_functions:
        return None

    is_bound = name in contents.bindings
    # Star imports may lead through thousands of files, as those of transformers do, which makes its names lazily.
    if not is_bound and contents.stars and (contents.is_dynamic or len(contents.stars) > _MAX_STARS):
        return submodule
    candidates = _candidates(module, contents, name, depth=depth + 1)
    different = {_identity(candidate) for candidate in candidates}
    if len(different) == 1:
        return candidates[0]
    if different:
        return None
    if submodule is not None:
        return submodule
    return None if contents.is_dynamic else missing


def _candidates(module: SourceModule, contents: ModuleContents, name: str, *, depth: int) -> list[Found]:
    """Return what each binding of a name, and each star import, says that it stands for."""
    bindings = contents.bindings.get(name, [])
    candidates = [_bound(module, binding, name, depth=depth) for binding in bindings]
    last_line = max((binding.lineno for binding in bindings), default=0)
    for star in contents.stars:
        # Names that are bound after it hide what it brings.
        if not bindings or star.lineno > last_line:
            candidates += _from_star(module, star, name, depth=depth)
    return candidates


def _identity(found: Found) -> object:
    """Return what is the same for the same object that was found on two ways; something new if it isn't certain."""
    if isinstance(found, (SourceClass, SourceFunction)):
        return (found.module.name, id(found.node))
    if isinstance(found, SourceModule):
        return found.name
    return object()


def _bound(module: SourceModule, binding: Binding, name: str, *, depth: int) -> Found:
    """Return what a binding in a module binds to a name."""
    if isinstance(binding, ast.ClassDef):
        return SourceClass(module, binding)
    if isinstance(binding, FUNCTION_NODES):
        return SourceFunction(module, binding)
    found: Found = None
    if isinstance(binding, ImportedName):
        found = _imported(module, binding, depth=depth)
    else:
        other = _other_name(binding)
        if other is not None and other != name:
            found = _attribute(module, other, depth=depth)
    # The statement itself would fail.
    return None if isinstance(found, Missing) else found


def _imported(module: SourceModule, binding: ImportedName, *, depth: int) -> Found:
    source_name, name = _import_of(module, binding)
    if source_name is None:
        return None
    source = find_module(source_name)
    if name is None:
        return source
    # As in `_follow`; a package may also import its own submodule.
    submodule = find_module(f"{source_name}.{name}")
    if submodule is not None or source is None:
        return submodule
    return _attribute(source, name, depth=depth)


def _other_name(statement: ast.stmt) -> str | None:
    """Return OTHER of `NAME = OTHER`, two names for the same object; None of any other statement."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) > 1:
        return None
    if isinstance(statement.targets[0], ast.Name) and isinstance(statement.value, ast.Name):
        return statement.value.id
    return None


def _from_star(module: SourceModule, star: ast.ImportFrom, name: str, *, depth: int) -> list[Found]:
    """Return what a star import brings under this name: nothing, one thing, or what isn't certain (None)."""
    source = _source_of(module, star)
    if source is None or source.contents is None:
        return [None]
    if not source.contents.exports(name):
        return []
    found = _attribute(source, name, depth=depth)
    if isinstance(found, Missing):
        return []
    # A submodule is no name of its package until somebody imports it.
    if isinstance(found, SourceModule) and name not in source.contents.bindings:
        return []
    return [found]


# Imports


def _import_of(module: SourceModule, binding: ImportedName) -> tuple[str | None, str | None]:
    """Return the module that an import names, and the name that is taken from it, None for the module itself."""
    alias = binding.alias
    if isinstance(binding.statement, ast.ImportFrom):
        return _absolute(module, binding.statement), alias.name
    if alias.asname is not None:
        return alias.name, None
    # `import a.b` binds `a`.
    return alias.name.partition(".")[0], None


def _source_of(module: SourceModule, statement: ast.ImportFrom) -> SourceModule | None:
    """Return MODULE of `from MODULE import …`."""
    name = _absolute(module, statement)
    if name is None:
        return None
    return find_module(name)


def _absolute(module: SourceModule, statement: ast.ImportFrom) -> str | None:
    """Return the absolute name of MODULE of `from MODULE import …`; None if it leaves the top package."""
    if not statement.level:
        return statement.module
    parts = module.package.split(".")
    if statement.level > len(parts):
        return None
    parts = parts[: len(parts) - statement.level + 1]
    if statement.module is not None:
        parts.append(statement.module)
    return ".".join(parts)


def full_name(module: SourceModule, expression: ast.AST) -> str | None:
    """Return the full dotted name that an expression in a module stands for, as its imports say; None if unknown.

    `nn.Module` is `torch.nn.Module` after `from torch import nn`. A name that the module doesn't bind is a builtin.
    """
    name = dotted_name(expression)
    if name is None or module.contents is None:
        return None
    first, _, others = name.partition(".")
    bindings = module.contents.bindings.get(first, [])
    if not bindings:
        return name
    if len(bindings) > 1:
        return None
    place: str | None = f"{module.name}.{first}"
    if isinstance(bindings[0], ImportedName):
        source, imported = _import_of(module, bindings[0])
        place = source if imported is None else f"{source}.{imported}"
    return f"{place}.{others}".rstrip(".")


# All names, for suggestions


def names_in(module: SourceModule) -> list[str]:
    """Return the public names of a module, submodules included."""
    names = {submodule.name for submodule in pkgutil.iter_modules(module.folders)}
    names |= _names_bound_in(module)
    return sorted(name for name in names if not name.startswith("_"))


def _names_bound_in(module: SourceModule) -> set[str]:
    """Return the names that the source of a module binds, by star imports too."""
    contents = module.contents
    if contents is None:
        return set()
    names = set(contents.bindings)
    for star in contents.stars:
        source = _source_of(module, star)
        if source is None or source.name == module.name or source.contents is None:
            continue
        names.update(filter(source.contents.exports, _names_bound_in(source)))
    return names

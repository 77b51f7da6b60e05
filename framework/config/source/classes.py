"""Classes that aren't imported: their bases, attributes and methods."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from framework.config.source.lookup import Found, SourceClass, SourceFunction, full_name, resolve
from framework.config.source.modules import FUNCTION_NODES, SourceModule, dotted_name, is_overload, names_bound

DATACLASS = "dataclasses.dataclass"
# Decorators that leave a function's or class's signature as it is.
_TRANSPARENT = frozenset({"final", "typing.final", "staticmethod"})
# Bases without a constructor of their own.
_PLAIN_BASES = frozenset({"object", "typing.Generic", "abc.ABC"})
_METACLASSES = frozenset({"abc.ABCMeta"})
# What decides how objects of a class are made, beside its constructor.
_MAKE_OBJECTS = ("__new__", "__init_subclass__", "__signature__")


# Bases


def lineage(found: SourceClass) -> list[SourceClass] | None:
    """Return the class and its bases, in the order in which Python looks for attributes; None if it isn't certain."""
    classes = []
    for owner in walk_lineage(found):
        if owner is None:
            return None
        classes.append(owner)
    return classes


def walk_lineage(found: SourceClass) -> Iterator[SourceClass | None]:
    """Yield what `lineage` returns one by one; None where it isn't certain, and nothing after it."""
    seen = set()
    owner = found
    while True:
        yield owner
        seen.add(id(owner.node))
        bases = _bases(owner)
        if not bases:
            return
        following = resolve(owner.module, bases[0])
        if not isinstance(following, SourceClass) or id(following.node) in seen:
            yield None
            return
        if len(bases) > 1:
            # The first comes next; what comes after it depends on all of them.
            yield following
            yield None
            return
        owner = following


def _bases(owner: SourceClass) -> list[ast.expr]:
    """Return the expressions of the bases, without those that have no constructor."""
    bases = []
    for base in owner.node.bases:
        # `Dataset[int]` is the class `Dataset`.
        expression = base.value if isinstance(base, ast.Subscript) else base
        if full_name(owner.module, expression) not in _PLAIN_BASES:
            bases.append(expression)
    return bases


# Attributes


def defines(found: SourceClass, name: str) -> bool:
    """Return True if the class itself, not only a base, binds this attribute."""
    return bool(definitions(found.node, name))


def constant(classes: Sequence[SourceClass], name: str) -> Any:
    """Return the constant that a class attribute is set to, given what `lineage` returns; None if it isn't one."""
    for owner in classes:
        for statement in definitions(owner.node, name):
            value = getattr(statement, "value", None)
            return value.value if isinstance(value, ast.Constant) else None
    return None


def declared(found: Found, name: str) -> str | None:
    """Return the dotted name that an attribute of a class or function is set to, if it is set by a plain assignment."""
    if isinstance(found, SourceFunction):
        values = assigned_later(found, name)
        return full_name(found.module, values[0]) if len(values) == 1 else None
    if not isinstance(found, SourceClass):
        return None
    for owner in walk_lineage(found):
        if owner is None:
            return None
        for statement in definitions(owner.node, name):
            if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
                return full_name(owner.module, statement.value)
            return None
    return None


def methods(node: ast.ClassDef) -> list[str]:
    """Return the names of the functions that a class's body defines, without decorated ones."""
    functions = [statement for statement in node.body if isinstance(statement, FUNCTION_NODES)]
    return [function.name for function in functions if not function.decorator_list]


def definitions(node: ast.ClassDef, name: str) -> list[ast.stmt]:
    """Return the statements in a class's body, branches included, that bind a name."""
    found: list[ast.stmt] = []
    for statement in _statements(node):
        if isinstance(statement, (*FUNCTION_NODES, ast.ClassDef)):
            if statement.name == name and not is_overload(statement):
                found.append(statement)
        elif name in names_bound(statement):
            found.append(statement)
    return found


def _statements(node: ast.ClassDef) -> Iterator[ast.stmt]:
    has_branches = any(isinstance(statement, (ast.If, ast.Try, ast.With, ast.For)) for statement in node.body)
    if not has_branches:
        yield from node.body
        return
    for inner in ast.walk(ast.Module([*node.body], [])):
        if isinstance(inner, ast.stmt):
            yield inner


def assigned_later(found: SourceClass | SourceFunction, attribute: str) -> list[ast.expr]:
    """Return what the module sets this attribute to after the definition: `NAME.ATTRIBUTE = VALUE`."""
    contents = found.module.contents
    name = f"{found.node.name}.{attribute}"
    values: list[ast.expr] = []
    # Faster than a look at all statements, which most modules don't need.
    if contents is None or name not in contents.text:
        return values
    for statement in contents.tree.body:
        if isinstance(statement, ast.Assign) and any(dotted_name(target) == name for target in statement.targets):
            values.append(statement.value)
    return values


# How objects are made


def is_ordinary(found: Found) -> bool:
    """Return True if nothing along a class's bases, down to `object`, can change how its objects are made.

    It reads the files of all bases, so ask only if something seems to be wrong. A function is ordinary.
    """
    if isinstance(found, SourceFunction):
        return True
    if not isinstance(found, SourceClass):
        return False
    classes = lineage(found)
    return classes is not None and all(map(_makes_objects_plainly, classes))


def _makes_objects_plainly(owner: SourceClass) -> bool:
    """Return True if the class itself, apart from its bases, doesn't change how its objects are made."""
    if not keeps_signature(owner.module, owner.node.decorator_list, also=DATACLASS):
        return False
    for keyword in owner.node.keywords:
        if keyword.arg != "metaclass" or full_name(owner.module, keyword.value) not in _METACLASSES:
            return False
    if any(definitions(owner.node, name) for name in _MAKE_OBJECTS):
        return False
    return not any(assigned_later(owner, name) for name in ("__init__", "__new__", "__signature__"))


def keeps_signature(module: SourceModule, decorators: Sequence[ast.expr], *, also: str = "") -> bool:
    """Return True if no decorator changes a signature. also: another that doesn't, with keywords or without."""
    for decorator in decorators:
        function = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = full_name(module, function)
        if name == also:
            continue
        if name not in _TRANSPARENT or isinstance(decorator, ast.Call):
            return False
    return True

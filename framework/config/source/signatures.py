"""The parameters of functions and classes that aren't imported, as `inspect.signature` would show them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from inspect import Parameter

from framework.config.source.classes import (
    DATACLASS,
    assigned_later,
    definitions,
    keeps_signature,
    lineage,
    walk_lineage,
)
from framework.config.source.lookup import Found, SourceClass, SourceFunction, full_name
from framework.config.source.modules import FUNCTION_NODES

_ANYTHING = object()
"""Stands for a default value, which isn't evaluated."""


def signature(found: Found) -> Mapping[str, Parameter] | None:
    """Return the parameters of a function or class, whose `self` is left out; None if they aren't certain."""
    if isinstance(found, SourceFunction):
        is_plain = keeps_signature(found.module, found.node.decorator_list)
        if not is_plain or assigned_later(found, "__signature__"):
            return None
        return _parameters(found.node)
    if isinstance(found, SourceClass):
        return _constructor_parameters(found)
    return None


def _constructor_parameters(found: SourceClass) -> Mapping[str, Parameter] | None:
    """Return the parameters of the first constructor among a class and its bases; none if there is no constructor."""
    for owner in walk_lineage(found):
        if owner is None:
            return None
        constructors = definitions(owner.node, "__init__")
        if not constructors and _dataclass_options(owner) is not None:
            return _dataclass_parameters(owner)
        if not constructors:
            continue
        constructor = constructors[0]
        if len(constructors) > 1 or not isinstance(constructor, FUNCTION_NODES) or constructor.decorator_list:
            return None
        parameters = _parameters(constructor)
        self_name = next(iter(parameters), None)
        return {name: parameter for name, parameter in parameters.items() if name != self_name}
    return {}


# Functions


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, Parameter]:
    """Return the parameters of a function, their annotations as text."""
    arguments = function.args
    by_position = [*arguments.posonlyargs, *arguments.args]
    # Defaults belong to the last ones.
    first_default = len(by_position) - len(arguments.defaults)
    parameters = []
    for number, argument in enumerate(by_position):
        is_positional_only = number < len(arguments.posonlyargs)
        kind = Parameter.POSITIONAL_ONLY if is_positional_only else Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(_parameter(argument, kind, has_default=number >= first_default))
    if arguments.vararg is not None:
        parameters.append(_parameter(arguments.vararg, Parameter.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(_parameter(argument, Parameter.KEYWORD_ONLY, has_default=default is not None))
    if arguments.kwarg is not None:
        parameters.append(_parameter(arguments.kwarg, Parameter.VAR_KEYWORD))
    return {parameter.name: parameter for parameter in parameters}


def _parameter(argument: ast.arg, kind: inspect._ParameterKind, *, has_default: bool = False) -> Parameter:
    annotation: object = Parameter.empty
    if argument.annotation is not None:
        annotation = ast.unparse(argument.annotation)
    return Parameter(argument.arg, kind, default=_default(has_default=has_default), annotation=annotation)


def _default(*, has_default: bool) -> object:
    return _ANYTHING if has_default else Parameter.empty


# Dataclasses


def _dataclass_options(owner: SourceClass) -> dict[str, ast.expr] | None:
    """Return the keywords of a class's decorator `dataclass`; None if it has no such decorator."""
    for decorator in owner.node.decorator_list:
        function = decorator.func if isinstance(decorator, ast.Call) else decorator
        if full_name(owner.module, function) == DATACLASS:
            return _keywords(decorator)
    return None


def _dataclass_parameters(found: SourceClass) -> dict[str, Parameter] | None:
    """Return the parameters of the constructor that `dataclass` makes; None if they aren't certain."""
    options = _dataclass_options(found) or {}
    classes = lineage(found)
    if classes is None or not _is_literal(options.get("init"), True):
        return None
    # A subclass may declare a field again, and keeps its place.
    fields: dict[str, Parameter | None] = {}
    for owner in reversed(classes):
        fields |= _fields(owner)
    parameters = [field for field in fields.values() if field is not None]
    parameters.sort(key=lambda parameter: parameter.kind)
    return {parameter.name: parameter for parameter in parameters}


def _fields(owner: SourceClass) -> dict[str, Parameter | None]:
    """Return the fields that a class itself declares; None for one that the constructor doesn't take.

    A class that is no dataclass has none.
    """
    options = _dataclass_options(owner)
    fields: dict[str, Parameter | None] = {}
    if options is None:
        return fields
    is_keyword_only = "kw_only" in options and _is_literal(options["kw_only"], True)
    for statement in owner.node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        annotation = ast.unparse(statement.annotation)
        if annotation.rpartition(".")[2] == "KW_ONLY":
            # All fields after it.
            is_keyword_only = True
        elif "ClassVar" not in annotation:
            name = statement.target.id
            fields[name] = _field(owner, name, statement.value, annotation, is_keyword_only=is_keyword_only)
    return fields


def _field(
    owner: SourceClass, name: str, value: ast.expr | None, annotation: str, *, is_keyword_only: bool
) -> Parameter | None:
    """Return the parameter of a field; None for one that the constructor doesn't take. value: what it is set to."""
    has_default = value is not None
    if isinstance(value, ast.Call) and full_name(owner.module, value.func) == "dataclasses.field":
        options = _keywords(value)
        if not _is_literal(options.get("init"), True):
            return None
        has_default = "default" in options or "default_factory" in options
        if "kw_only" in options:
            is_keyword_only = _is_literal(options["kw_only"], True)
    kind = Parameter.KEYWORD_ONLY if is_keyword_only else Parameter.POSITIONAL_OR_KEYWORD
    return Parameter(name, kind, default=_default(has_default=has_default), annotation=annotation)


def _keywords(node: ast.expr) -> dict[str, ast.expr]:
    keywords = node.keywords if isinstance(node, ast.Call) else []
    return {keyword.arg or "": keyword.value for keyword in keywords}


def _is_literal(node: ast.expr | None, value: bool) -> bool:
    """Return True if an expression is this constant, or isn't there."""
    return node is None or (isinstance(node, ast.Constant) and node.value is value)

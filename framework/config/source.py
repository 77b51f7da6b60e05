"""Signatures and class bodies of dotted names, read from source files: nothing is imported, so it needs no torch.

An answer is certain or it is None. What Python decides while it runs is left to the ranks, which import the target:
decorators, metaclasses, `__getattr__` of a module, names bound in several places, compiled modules.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from inspect import Parameter
from pathlib import Path
from typing import Any

# Decorators that leave a function's or class's signature as it is.
_TRANSPARENT = frozenset({"final", "typing.final", "staticmethod"})
# Bases without a constructor of their own.
_PLAIN_BASES = frozenset({"object", "typing.Generic", "abc.ABC"})
_METACLASSES = frozenset({"abc.ABCMeta"})
_DATACLASS = "dataclasses.dataclass"
# Source that makes names which no statement binds.
_DYNAMIC = re.compile(r"\b__getattr__\b|\bglobals\(|\blocals\(|\bvars\(|\bexec\(|\bsetattr\(|sys\.modules|__dict__")
_GLOBAL = re.compile(r"^[ \t]+global[ \t]+(.*)$", re.MULTILINE)
# How many imports are followed from one name, at most.
_MAX_DEPTH = 12
# Star imports of one module that are followed, at most.
_MAX_STARS = 30
_ANYTHING = object()
"""Stands for a default value, which isn't evaluated."""

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


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
    def package(self) -> str:
        """The package that relative imports in it start from."""
        return self.name if self.folders else self.name.rpartition(".")[0]

    @property
    def file(self) -> str | None:
        """Its source file, if it has one."""
        origin = self.spec.origin
        return origin if origin is not None and origin.endswith(".py") else None

    @property
    def contents(self) -> _Contents | None:
        """What its source binds; None without readable source."""
        if self.file is None:
            return None
        try:
            path = Path(self.file)
            stat = path.stat()
            return _contents(path, (stat.st_mtime_ns, stat.st_size))
        except (OSError, SyntaxError, ValueError):
            return None

    def names(self) -> list[str]:
        """Return its public names, submodules included, for suggestions."""
        names = {module.name for module in pkgutil.iter_modules(self.folders)}
        names.update(_names_in(self))
        return sorted(name for name in names if not name.startswith("_"))


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
    found: Found = _find_module(first)
    if found is None:
        return None if first in sys.modules else Missing(first, None)
    for number, part in enumerate(others):
        if not isinstance(found, SourceModule):
            # An attribute of a class, or of what isn't known.
            return found if isinstance(found, Missing) else None
        is_last = number == len(others) - 1
        submodule = None if is_last else _find_module(f"{found.name}.{part}")
        # Most packages bind no other object to the name of a submodule, and reading a large package takes 0.1 s.
        found = submodule or _attribute(found, part)
    return found


def signature(found: Found) -> Mapping[str, Parameter] | None:
    """Return the parameters of a function or class, whose `self` is left out; None if they aren't certain."""
    if isinstance(found, SourceFunction):
        if not _is_plain(found.module, found.node.decorator_list) or _is_changed(found, "__signature__"):
            return None
        return _parameters(found.node)
    if not isinstance(found, SourceClass):
        return None
    for owner in _lineage(found):
        if owner is None:
            return None
        functions = _definitions(owner.node, "__init__")
        if not functions and _dataclass_options(owner) is not None:
            return _dataclass_parameters(owner)
        if not functions:
            continue
        function = functions[0]
        if len(functions) > 1 or not isinstance(function, _Function) or function.decorator_list:
            return None
        parameters = _parameters(function)
        first = next(iter(parameters), None)
        return {name: parameter for name, parameter in parameters.items() if name != first}
    return {}


def is_ordinary(found: Found) -> bool:
    """Return True if nothing along a class's bases, down to `object`, can change how its objects are made.

    It reads the files of all bases, so ask only if something seems to be wrong. A function is ordinary.
    """
    if isinstance(found, SourceFunction):
        return True
    if not isinstance(found, SourceClass):
        return False
    for owner in _lineage(found):
        if owner is None or not _is_plain(owner.module, owner.node.decorator_list, also=_DATACLASS):
            return False
        for keyword in owner.node.keywords:
            metaclass = _origin(owner.module, keyword.value)
            if keyword.arg != "metaclass" or metaclass not in _METACLASSES:
                return False
        for special in ("__new__", "__init_subclass__", "__signature__"):
            if _definitions(owner.node, special):
                return False
        if _is_changed(owner, "__init__") or _is_changed(owner, "__new__") or _is_changed(owner, "__signature__"):
            return False
    return True


def lineage(found: SourceClass) -> list[SourceClass] | None:
    """Return the class and its bases, in the order in which Python looks for attributes; None if it isn't certain."""
    classes = []
    for owner in _lineage(found):
        if owner is None:
            return None
        classes.append(owner)
    return classes


def declared(found: Found, name: str) -> str | None:
    """Return the dotted name that an attribute of a class or function is set to, if it is set by a plain assignment."""
    if isinstance(found, SourceFunction):
        values = _changes(found, name)
        return _origin(found.module, values[0]) if len(values) == 1 else None
    if not isinstance(found, SourceClass):
        return None
    for owner in _lineage(found):
        if owner is None:
            return None
        for statement in _definitions(owner.node, name):
            if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
                return _origin(owner.module, statement.value)
            return None
    return None


def defines(found: SourceClass, name: str) -> bool:
    """Return True if the class itself, not only a base, binds this attribute."""
    return bool(_definitions(found.node, name))


def constant(classes: list[SourceClass], name: str) -> Any:
    """Return the constant that a class attribute is set to, given what `lineage` returns; None if it isn't one."""
    for owner in classes:
        for statement in _definitions(owner.node, name):
            value = getattr(statement, "value", None)
            return value.value if isinstance(value, ast.Constant) else None
    return None


def methods(node: ast.ClassDef) -> list[str]:
    """Return the names of the functions that a class's body defines, without decorated ones."""
    functions = [statement for statement in node.body if isinstance(statement, _Function)]
    return [function.name for function in functions if not function.decorator_list]


# Modules


def _find_module(name: str) -> SourceModule | None:
    parent, _, last = name.rpartition(".")
    try:
        if not parent:
            spec = importlib.util.find_spec(name)
        else:
            package = _find_module(parent)
            if package is None or not package.folders:
                return None
            try:
                spec = PathFinder.find_spec(name, package.folders)
            except KeyError:
                # A folder without __init__.py: Python looks for its parent among the imported modules.
                spec = _namespace_package(name, [Path(folder, last) for folder in package.folders])
    except (ImportError, AttributeError, ValueError):
        # Python says so of modules that were made by hand.
        return None
    return None if spec is None else SourceModule(name, spec)


def _namespace_package(name: str, folders: list[Path]) -> ModuleSpec:
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(folder) for folder in folders if folder.is_dir()]
    return spec


class _Contents:
    """What the source of a module binds at its top level, branches included."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        # The statements or aliases that bind a name, in their order.
        self.bindings: dict[str, list[ast.AST]] = {}
        # `from MODULE import *`.
        self.stars: list[ast.ImportFrom] = []
        self.is_dynamic = _DYNAMIC.search(text) is not None
        self.set_by_functions: set[str] = set()
        for names in _GLOBAL.findall(text):
            self.set_by_functions.update(re.findall(r"\w+", names))
        self._exported = _exported(self.tree)
        self._read(self.tree.body)

    def exports(self, name: str) -> bool:
        """Return True if `from MODULE import *` brings this name."""
        if self._exported is not None:
            return name in self._exported
        return not name.startswith("_")

    def _read(self, body: list[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, (*_Function, ast.ClassDef)):
                if not _is_overload(statement):
                    self._bind(statement.name, statement)
            elif isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                self.stars.append(statement)
            elif isinstance(statement, (ast.Import, ast.ImportFrom)):
                for alias in statement.names:
                    self._bind(alias.asname or alias.name.partition(".")[0], _Imported(statement, alias))
            else:
                for name in _names_bound(statement):
                    self._bind(name, statement)
                for field in ("body", "orelse", "finalbody"):
                    self._read(getattr(statement, field, []))
                for handler in getattr(statement, "handlers", []):
                    self._read(handler.body)

    def _bind(self, name: str, node: ast.AST) -> None:
        self.bindings.setdefault(name, []).append(node)


class _Imported(ast.AST):
    """One name of an import statement."""

    def __init__(self, statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> None:
        super().__init__()
        self.statement = statement
        self.alias = alias


@lru_cache(maxsize=256)
def _contents(path: Path, _version: tuple[int, int]) -> _Contents:
    """Return the contents of a file, read again if its version (time of change, size) is another one."""
    return _Contents(path.read_text(encoding="utf-8"))


def _exported(tree: ast.Module) -> set[str] | None:
    """Return the names in a module's `__all__`; None if it has none, or one that isn't a plain list."""
    names: set[str] | None = None
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if not any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            continue
        try:
            value = ast.literal_eval(statement.value)  # type: ignore[attr-defined]
        except ValueError:
            return None
        if names is not None or not isinstance(value, (list, tuple)):
            return None
        names = set(value)
    return names


def _is_overload(node: ast.stmt) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any(_dotted(decorator) in ("overload", "typing.overload") for decorator in decorators)


def _names_bound(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement assigns or deletes, without those in its branches."""
    targets: list[ast.AST] = list(getattr(statement, "targets", []))
    targets.append(getattr(statement, "target", None) or ast.Pass())
    targets += [item.optional_vars for item in getattr(statement, "items", []) if item.optional_vars is not None]
    for target in targets:
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                yield node.id


# Names


def _attribute(module: SourceModule, name: str, *, depth: int = 0) -> Found:
    """Return what a name in a module stands for, followed through imports."""
    submodule = _find_module(f"{module.name}.{name}")
    contents = module.contents
    if contents is None:
        # A namespace package has nothing but its submodules.
        if module.spec.origin is None and module.folders:
            return submodule or Missing(f"{module.name}.{name}", module)
        return submodule
    if depth > _MAX_DEPTH or name in contents.set_by_functions:
        return None

    nodes = contents.bindings.get(name, [])
    # Star imports may lead through thousands of files, as those of transformers do, which makes its names lazily.
    if not nodes and contents.stars and (contents.is_dynamic or len(contents.stars) > _MAX_STARS):
        return submodule
    candidates = [_bound(module, node, name, depth=depth + 1) for node in nodes]
    last_line = max((_line(node) for node in nodes), default=0)
    for star in contents.stars:
        # Names that are bound after it hide what it brings.
        if not nodes or star.lineno > last_line:
            candidates += _from_star(module, star, name, depth=depth + 1)
    different = list(dict.fromkeys(_identity(candidate) for candidate in candidates))
    if len(different) == 1:
        return candidates[0]
    if different:
        return None
    if submodule is not None:
        return submodule
    return None if contents.is_dynamic else Missing(f"{module.name}.{name}", module)


def _names_in(module: SourceModule) -> set[str]:
    """Return the names that the source of a module binds, by star imports too."""
    names: set[str] = set()
    contents = module.contents
    if contents is None:
        return names
    names.update(contents.bindings)
    for star in contents.stars:
        name = _absolute(module, star)
        origin = None if name is None or name == module.name else _find_module(name)
        if origin is not None and origin.contents is not None:
            names.update(filter(origin.contents.exports, _names_in(origin)))
    return names


def _identity(found: Found) -> object:
    """Return what is the same for the same object that was found on two ways; something new if it isn't certain."""
    if isinstance(found, (SourceClass, SourceFunction)):
        return (found.module.name, id(found.node))
    if isinstance(found, SourceModule):
        return found.name
    return object()


def _bound(module: SourceModule, node: ast.AST, name: str, *, depth: int) -> Found:
    if isinstance(node, ast.ClassDef):
        return SourceClass(module, node)
    if isinstance(node, _Function):
        return SourceFunction(module, node)
    if isinstance(node, _Imported):
        source, imported = _import_of(module, node)
        if source is None:
            return None
        if imported is None:
            return _find_module(source)
        # As in `look_up`; a package may also import its own submodule.
        found: Found = _find_module(f"{source}.{imported}")
        origin = _find_module(source)
        if found is None and origin is not None:
            found = _attribute(origin, imported, depth=depth)
        # The import itself would fail.
        return None if isinstance(found, Missing) else found
    other = _other_name(node)
    if other is None or other == name:
        return None
    found = _attribute(module, other, depth=depth)
    return None if isinstance(found, Missing) else found


def _other_name(node: ast.AST) -> str | None:
    """Return OTHER of `NAME = OTHER`, two names for the same object; None of any other statement."""
    if not isinstance(node, ast.Assign) or len(node.targets) > 1:
        return None
    if isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Name):
        return node.value.id
    return None


def _from_star(module: SourceModule, star: ast.ImportFrom, name: str, *, depth: int) -> list[Found]:
    """Return what a star import brings under this name: nothing, one thing, or what isn't certain (None)."""
    source = _absolute(module, star)
    origin = None if source is None else _find_module(source)
    if origin is None or origin.contents is None:
        return [None]
    if not origin.contents.exports(name):
        return []
    found = _attribute(origin, name, depth=depth)
    if isinstance(found, Missing):
        return []
    # A submodule is no name of its package until somebody imports it.
    if isinstance(found, SourceModule) and name not in origin.contents.bindings:
        return []
    return [found]


def _import_of(module: SourceModule, node: _Imported) -> tuple[str | None, str | None]:
    """Return the module that an import names, and the name that is taken from it, None for the module itself."""
    alias = node.alias
    if isinstance(node.statement, ast.ImportFrom):
        return _absolute(module, node.statement), alias.name
    # `import a.b` binds `a`.
    return (alias.name if alias.asname else alias.name.partition(".")[0]), None


def _absolute(module: SourceModule, statement: ast.ImportFrom) -> str | None:
    """Return the absolute name of the module of `from MODULE import …`; None if it leaves the top package."""
    if not statement.level:
        return statement.module
    parts = module.package.split(".")
    if statement.level > len(parts):
        return None
    base = parts[: len(parts) - statement.level + 1]
    return ".".join([*base, *filter(None, [statement.module])])


def _line(node: ast.AST) -> int:
    statement = node.statement if isinstance(node, _Imported) else node
    return getattr(statement, "lineno", 0)


def _dotted(node: ast.AST) -> str | None:
    """Return `a.b.c` of an expression that is a dotted name; None of any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return None if base is None else f"{base}.{node.attr}"
    return None


def _origin(module: SourceModule, node: ast.AST) -> str | None:
    """Return the full dotted name that an expression in a module stands for, imports taken apart; None if unknown."""
    name = _dotted(node)
    if name is None or module.contents is None:
        return None
    first, _, others = name.partition(".")
    nodes = module.contents.bindings.get(first, [])
    if not nodes:
        return name
    if len(nodes) > 1:
        return None
    place: str | None = f"{module.name}.{first}"
    if isinstance(nodes[0], _Imported):
        source, imported = _import_of(module, nodes[0])
        place = source if imported is None else f"{source}.{imported}"
    return f"{place}.{others}".rstrip(".")


# Classes


def _lineage(found: SourceClass) -> Iterator[SourceClass | None]:
    """Yield a class and its bases in the order of attributes; None where that isn't certain, and nothing after it."""
    seen = set()
    owner: SourceClass | None = found
    while owner is not None:
        yield owner
        seen.add(id(owner.node))
        bases = []
        for base in owner.node.bases:
            node = base.value if isinstance(base, ast.Subscript) else base
            if _origin(owner.module, node) not in _PLAIN_BASES:
                bases.append(node)
        if not bases:
            return
        following = _resolved(owner.module, bases[0])
        # Of several bases, the first comes next; what comes after it depends on all of them.
        if len(bases) > 1 or not isinstance(following, SourceClass) or id(following.node) in seen:
            if len(bases) > 1 and isinstance(following, SourceClass):
                yield following
            yield None
            return
        owner = following


def _resolved(module: SourceModule, node: ast.AST) -> Found:
    name = _dotted(node)
    if name is None:
        return None
    first, *others = name.split(".")
    found = _attribute(module, first)
    for part in others:
        if not isinstance(found, SourceModule):
            return None
        found = _find_module(f"{found.name}.{part}") or _attribute(found, part)
    return found


def _definitions(node: ast.ClassDef, name: str) -> list[ast.stmt]:
    """Return the statements in a class's body, branches included, that bind a name."""
    definitions: list[ast.stmt] = []
    for statement in ast.walk(ast.Module([*node.body], [])) if _has_branches(node) else node.body:
        if isinstance(statement, (*_Function, ast.ClassDef)):
            if statement.name == name and not _is_overload(statement):
                definitions.append(statement)
        elif isinstance(statement, ast.stmt) and name in _names_bound(statement):
            definitions.append(statement)
    return definitions


def _has_branches(node: ast.ClassDef) -> bool:
    return any(isinstance(statement, (ast.If, ast.Try, ast.With, ast.For)) for statement in node.body)


def _is_plain(module: SourceModule, decorators: list[ast.expr], *, also: str = "") -> bool:
    """Return True if no decorator changes a signature. also: another decorator, with keywords or without."""
    for decorator in decorators:
        function = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = _origin(module, function)
        if name != also and (name not in _TRANSPARENT or isinstance(decorator, ast.Call)):
            return False
    return True


def _is_changed(found: SourceClass | SourceFunction, attribute: str) -> bool:
    """Return True if the module sets this attribute after the definition."""
    return bool(_changes(found, attribute))


def _changes(found: SourceClass | SourceFunction, attribute: str) -> list[ast.expr]:
    contents = found.module.contents
    name = f"{found.node.name}.{attribute}"
    values: list[ast.expr] = []
    # Faster than a look at all statements, which most modules don't need.
    if contents is None or name not in contents.text:
        return values
    for statement in contents.tree.body:
        if isinstance(statement, ast.Assign) and any(_dotted(target) == name for target in statement.targets):
            values.append(statement.value)
    return values


# Dataclasses


def _dataclass_options(owner: SourceClass) -> dict[str, ast.expr] | None:
    """Return the keywords of a class's decorator `dataclass`; None if it has no such decorator."""
    for decorator in owner.node.decorator_list:
        function = decorator.func if isinstance(decorator, ast.Call) else decorator
        if _origin(owner.module, function) == _DATACLASS:
            return _keywords(decorator)
    return None


def _dataclass_parameters(found: SourceClass) -> dict[str, Parameter] | None:
    """Return the parameters of the constructor that `dataclass` makes; None if they aren't certain."""
    classes = lineage(found)
    if classes is None:
        return None
    parameters: dict[str, Parameter] = {}
    for owner in reversed(classes):
        options = _dataclass_options(owner)
        if options is None:
            continue
        # Of the class itself, the constructor; of its bases, the fields.
        if owner is found and not _is_literal(options.get("init"), True):
            return None
        is_keyword_only = "kw_only" in options and _is_literal(options["kw_only"], True)
        for statement in owner.node.body:
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            annotation = ast.unparse(statement.annotation)
            if "ClassVar" in annotation:
                continue
            if annotation.rpartition(".")[2] == "KW_ONLY":
                is_keyword_only = True
                continue
            field = _field_parameter(owner, statement, annotation, is_keyword_only=is_keyword_only)
            if field is not None:
                parameters[field.name] = field
            else:
                parameters.pop(statement.target.id, None)
    by_kind = sorted(parameters.values(), key=lambda parameter: parameter.kind)
    return {parameter.name: parameter for parameter in by_kind}


def _field_parameter(
    owner: SourceClass, statement: ast.AnnAssign, annotation: str, *, is_keyword_only: bool
) -> Parameter | None:
    """Return the parameter of a field; None for one that the constructor doesn't take."""
    assert isinstance(statement.target, ast.Name)
    has_default = statement.value is not None
    value = statement.value
    if isinstance(value, ast.Call) and _origin(owner.module, value.func) == "dataclasses.field":
        options = _keywords(value)
        if not _is_literal(options.get("init"), True):
            return None
        has_default = "default" in options or "default_factory" in options
        if "kw_only" in options:
            is_keyword_only = _is_literal(options["kw_only"], True)
    kind = Parameter.KEYWORD_ONLY if is_keyword_only else Parameter.POSITIONAL_OR_KEYWORD
    default = _ANYTHING if has_default else Parameter.empty
    return Parameter(statement.target.id, kind, default=default, annotation=annotation)


def _keywords(node: ast.expr) -> dict[str, ast.expr]:
    keywords = node.keywords if isinstance(node, ast.Call) else []
    return {keyword.arg or "": keyword.value for keyword in keywords}


def _is_literal(node: ast.expr | None, value: bool) -> bool:
    """Return True if an expression is this constant, or isn't there."""
    return node is None or (isinstance(node, ast.Constant) and node.value is value)


# Parameters


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, Parameter]:
    """Return the parameters of a function, their annotations as text."""
    arguments = function.args
    by_position = [*arguments.posonlyargs, *arguments.args]
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
    annotation = Parameter.empty if argument.annotation is None else ast.unparse(argument.annotation)
    return Parameter(argument.arg, kind, default=_ANYTHING if has_default else Parameter.empty, annotation=annotation)

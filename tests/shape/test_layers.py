"""No module imports from a higher layer; the engine knows no recipe."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

import framework
from tests.helpers import internals
from tests.helpers.source import (
    ROOT,
    Module,
    cycles,
    imported_modules,
    imports,
    modules_in,
    string_literals,
)

# Lowest first. A module imports from its own layer and from those below it.
LAYERS: tuple[set[str], ...] = (
    {"errors", "media"},
    {"types"},
    {"system"},
    {"config"},
    {"distributed"},
    {"monitoring"},
    {"launch"},
    {"strategies", "data", "checkpoint", "loggers", "callbacks"},
    {"tasks", "optim", "remote"},
    {"training"},
    {"runs", "sweeps", "engine"},
    {"command"},
    {"jobs"},
    {"api"},
    {"__main__", "__init__"},
)
HEIGHT: dict[str, int] = {}
for _height, _rooms in enumerate(LAYERS):
    HEIGHT |= dict.fromkeys(_rooms, _height)
FRAMEWORK = modules_in("framework")
RECIPES = modules_in("recipes")
TESTS = modules_in("tests")
OWN_RECIPES = {"blank"}
"""Recipes with nothing in them, which the framework may name."""
RECIPE_NAMES = {path.stem for path in (ROOT / "conf" / "recipe").glob("*.yaml")} - OWN_RECIPES
RECIPE_NAMES |= {name.rpartition(".")[2] for name in RECIPES}


def room(name: str) -> str:
    """`framework.data.order` → `data`; the package itself is `__init__`."""
    return name.split(".")[1] if "." in name else "__init__"


def upward(module: Module, known: Mapping[str, Module]) -> Iterator[str]:
    """Yield the imports from a higher layer."""
    own = room(module.name)
    for target, line in imported_modules(module, known).items():
        other = room(target)
        if HEIGHT[other] > HEIGHT[own]:
            yield f"{module.name}:{line} imports {target}, which is in a higher layer"


def names_a_recipe(module: Module) -> Iterator[str]:
    for entry in imports(module):
        if entry.module.split(".")[0] == "recipes":
            yield f"{module.name}:{entry.line} imports {entry.module}"
    for text, line in string_literals(module):
        if text in RECIPE_NAMES or text == "recipes" or text.startswith("recipes."):
            yield f"{module.name}:{line} names {text!r}"


def beyond_hydras_public_names(module: Module) -> Iterator[str]:
    """Yield the imports of Hydra's private modules, and of those for its plugins, which change with its versions."""
    if module.name == "framework.config.hydra_compose":
        return
    for entry in imports(module):
        if f"{entry.module}.".startswith(("hydra._internal.", "hydra.core.")) or entry.module == "hydra":
            yield f"{module.name}:{entry.line} imports {entry.module}. Take it from framework.config.hydra_compose."


def beyond_the_public_names(module: Module) -> Iterator[str]:
    for entry in imports(module):
        if entry.module.split(".")[0] != "framework":
            continue
        if entry.module != "framework" or entry.name not in framework.__all__:
            what = entry.module if entry.name is None else f"{entry.name} from {entry.module}"
            yield f"{module.name}:{entry.line} imports {what}, which isn't public"


def beyond_the_doors(module: Module) -> Iterator[str]:
    """Yield the imports of the framework that name a module inside one of its rooms."""
    for entry in imports(module):
        names = [entry.module] if entry.name is None else [entry.module, f"{entry.module}.{entry.name}"]
        for name in names:
            if name.startswith("framework.") and name.count(".") > 1 and name in FRAMEWORK:
                yield f"{module.name}:{entry.line} imports {name}. Take it from tests.helpers.internals."


def patched_by_name(module: Module) -> Iterator[str]:
    """Yield what is replaced in a module of the framework that a string names."""
    for node in ast.walk(module.tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        replaces = node.func.attr in ("setattr", "delattr", "patch")
        # An f-string that begins with the name, too.
        if replaces and ast.unparse(node.args[0]).lstrip("f").startswith(("'framework.", '"framework.')):
            yield f"{module.name}:{node.lineno} names a module. Take it from tests.helpers.internals."


def test_every_module_has_a_layer() -> None:
    assert {room(name) for name in FRAMEWORK} == HEIGHT.keys()


def test_imports_point_down() -> None:
    for module in FRAMEWORK.values():
        assert list(upward(module, FRAMEWORK)) == []


def test_no_import_cycles() -> None:
    graph = {name: set(imported_modules(module, FRAMEWORK)) for name, module in FRAMEWORK.items()}
    assert cycles(graph) == []


def test_the_framework_names_no_recipe() -> None:
    for module in FRAMEWORK.values():
        assert list(names_a_recipe(module)) == []


def test_one_module_uses_hydras_private_parts() -> None:
    for module in FRAMEWORK.values():
        assert list(beyond_hydras_public_names(module)) == []


def test_recipes_use_public_names_only() -> None:
    for module in RECIPES.values():
        assert list(beyond_the_public_names(module)) == []


def test_tests_import_only_rooms() -> None:
    """Moving a module or a function within the framework then changes one file of the tests."""
    for name, module in TESTS.items():
        if name != internals.__name__:
            assert [*beyond_the_doors(module), *patched_by_name(module)] == []


def test_each_internal_name_of_the_tests_exists() -> None:
    assert [name for name in internals.NAMES if not hasattr(internals, name)] == []


def test_public_names_exist() -> None:
    assert [name for name in framework.__all__ if not hasattr(framework, name)] == []


def modules(**texts: str) -> dict[str, Module]:
    """Return modules with these texts; `__` in a keyword is a dot in the module's name."""
    named = {key.replace("__", "."): text for key, text in texts.items()}
    return {name: Module(name, text) for name, text in named.items()}


def test_the_rules_see_what_breaks_them() -> None:
    known = modules(
        framework="", framework__engine__train="", framework__distributed__seed="", framework__data__order=""
    )
    for text, num_faults in {
        "import framework.engine.train": 1,
        "from ..engine.train import run": 1,
        "def f():\n    from framework.engine import train": 1,
        "from . import order": 0,
        "import framework.distributed.seed": 0,
    }.items():
        loader = Module("framework.data.loader", text)
        assert len(imported_modules(loader, known)) == 1
        assert len(list(upward(loader, known))) == num_faults, text
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == [["b", "c"]]
    for text in ("import recipes.toy", "x = name == 'digits'", "x = 'recipes.toy.Net'"):
        assert list(names_a_recipe(Module("framework.engine", text)))
    for text in ("from hydra._internal import utils", "import hydra.core.plugins", "from hydra import compose"):
        assert len(list(beyond_hydras_public_names(Module("framework.command.sweep", text)))) == 1
    assert list(beyond_hydras_public_names(Module("framework.command.sweep", "from hydra.types import RunMode"))) == []
    for text in ("import framework.data", "from framework.types import Task", "import framework"):
        assert len(list(beyond_the_public_names(Module("recipes.mine", text)))) == 1
    for text in (
        "import framework.data.order",
        "from framework.data.order import GlobalOrder",
        "from framework.data import order",
        "def f():\n    from framework.data import order as sample_order",
    ):
        assert len(list(beyond_the_doors(Module("tests.some", text)))) >= 1
    for text in (
        "import framework.data",
        "from framework.checkpoint import find",
        "from framework.errors import DataError",
    ):
        assert list(beyond_the_doors(Module("tests.some", text))) == []
    for text in ("patch.setattr('framework.data.order.x', 1)", "patch.setattr(f'framework.data.order.{x}', 1)"):
        assert len(list(patched_by_name(Module("tests.some", text)))) == 1
    assert list(patched_by_name(Module("tests.some", "patch.setattr('os.fsync', 1)"))) == []

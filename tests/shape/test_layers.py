"""Imports point to a lower layer or stay within one sub-folder; the engine knows no recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

import framework
from tests.helpers.source import (
    ROOT,
    Module,
    cycles,
    imported_modules,
    imports,
    modules_in,
    string_literals,
)

# Lowest first. A sub-folder is one room: its modules may import each other. A new module has to be put here. Where a
# layer has several lines, each may import those above it.
LAYERS: tuple[tuple[str, set[str]], ...] = (
    ("L0", {"errors", "types"}),
    ("L1", {"run_dir", "output_file", "hardware", "pulse", "versions", "appending", "late_dynamo", "allocator"}),
    ("L1", {"config", "rows"}),
    ("L1", {"topology", "slow_ranks"}),
    ("L2", {"launch", "distributed", "seed"}),
    ("L3", {"rank_log"}),
    ("L3", {"strategies", "data", "tasks", "checkpoint", "loggers", "callbacks", "precision", "optim"}),
    ("L3", {"progress", "meter", "targets", "stopwatch", "activations", "device_usage"}),
    ("L3", {"timing"}),
    (
        "L4",
        {
            "evaluator",
            "finite",
            "limits",
            "misfit",
            "parts",
            "predictions",
            "footprint",
            "causes",
            "agreement",
            "ending",
        },
    ),
    ("L4", {"streams", "drift", "trainable"}),
    ("L4", {"trainer"}),
    ("L5", {"build"}),
    ("L6", {"session"}),
    ("L6", {"restoring", "headroom", "preflight"}),
    ("L6", {"engine", "inference", "collectives_demo"}),
    ("L6", {"planning", "tracing", "parity", "tune"}),
    ("L6", {"onnx_file"}),
    ("L6", {"exporting"}),
    ("L7", {"jobs"}),
    ("L7", {"cli"}),
    ("L8", {"__main__", "__init__"}),
)
HEIGHT = {room: height for height, (_, rooms) in enumerate(LAYERS) for room in rooms}
LABEL = {room: label for label, rooms in LAYERS for room in rooms}
FRAMEWORK = modules_in("framework")
RECIPES = modules_in("recipes")
RECIPE_NAMES = {path.stem for path in (ROOT / "conf" / "recipe").glob("*.yaml")} | {
    name.rpartition(".")[2] for name in RECIPES
}


def room(name: str) -> str:
    """`framework.data.sampler` → `data`; the package itself is `__init__`."""
    return name.split(".")[1] if "." in name else "__init__"


def upward(module: Module, known: Mapping[str, Module]) -> Iterator[str]:
    """Imports that neither point down nor stay in the room."""
    own = room(module.name)
    for target, line in imported_modules(module, known).items():
        other = room(target)
        if other != own and HEIGHT[other] >= HEIGHT[own]:
            yield f"{module.name}:{line} ({LABEL[own]}) imports {target} ({LABEL[other]})"


def names_a_recipe(module: Module) -> Iterator[str]:
    for entry in imports(module):
        if entry.module.split(".")[0] == "recipes":
            yield f"{module.name}:{entry.line} imports {entry.module}"
    for text, line in string_literals(module):
        if text in RECIPE_NAMES or text == "recipes" or text.startswith("recipes."):
            yield f"{module.name}:{line} names {text!r}"


def beyond_the_public_names(module: Module) -> Iterator[str]:
    for entry in imports(module):
        if entry.module.split(".")[0] != "framework":
            continue
        if entry.module != "framework" or entry.name not in framework.__all__:
            what = entry.module if entry.name is None else f"{entry.name} from {entry.module}"
            yield f"{module.name}:{entry.line} imports {what}, which isn't public"


def test_every_module_has_a_layer() -> None:
    assert {room(name) for name in FRAMEWORK} == HEIGHT.keys()


def test_imports_point_down() -> None:
    assert [fault for module in FRAMEWORK.values() for fault in upward(module, FRAMEWORK)] == []


def test_no_import_cycles() -> None:
    graph = {name: set(imported_modules(module, FRAMEWORK)) for name, module in FRAMEWORK.items()}
    assert cycles(graph) == []


def test_the_framework_names_no_recipe() -> None:
    assert [fault for module in FRAMEWORK.values() for fault in names_a_recipe(module)] == []


def test_there_are_recipes() -> None:
    assert {"toy", "toy_model_parallel", "digits"} <= RECIPE_NAMES
    assert RECIPES


def test_recipes_are_no_package() -> None:
    assert not any(module.is_package for module in RECIPES.values())


def test_recipes_use_public_names_only() -> None:
    assert [fault for module in RECIPES.values() for fault in beyond_the_public_names(module)] == []


def test_public_names_exist() -> None:
    assert [name for name in framework.__all__ if not hasattr(framework, name)] == []


def modules(**texts: str) -> dict[str, Module]:
    return {name: Module(name, text) for name, text in ((key.replace("__", "."), text) for key, text in texts.items())}


@pytest.mark.parametrize(
    "text",
    [
        "import framework.engine",
        "from framework import engine",
        "from framework.engine import run",
        "from ..engine import run",
        "def f():\n    from framework import engine",
        "from framework.loggers import x",
    ],
)
def test_an_import_upwards_is_named(text: str) -> None:
    known = modules(framework="", framework__data__loader=text, framework__engine="", framework__loggers="")
    assert len(list(upward(known["framework.data.loader"], known))) == 1


@pytest.mark.parametrize(
    "text", ["from framework.data import sampler", "from . import sampler", "import framework.seed"]
)
def test_an_import_downwards_or_within_the_room_passes(text: str) -> None:
    known = modules(framework="", framework__data__loader=text, framework__data__sampler="", framework__seed="")
    assert len(imported_modules(known["framework.data.loader"], known)) == 1
    assert list(upward(known["framework.data.loader"], known)) == []


def test_a_cycle_is_named() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == [["b", "c"]]
    assert cycles({"a": {"a"}}) == [["a"]]
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize(
    "text", ["import recipes.toy", "from recipes import toy", "x = name == 'digits'", "x = 'recipes.toy.Net'"]
)
def test_a_named_recipe_is_seen(text: str) -> None:
    assert list(names_a_recipe(Module("framework.engine", text)))


@pytest.mark.parametrize(
    "text",
    ["import framework.data", "from framework.types import Task", "from framework import build", "import framework"],
)
def test_what_isnt_public_is_named(text: str) -> None:
    assert len(list(beyond_the_public_names(Module("recipes.mine", text)))) == 1

"""Signatures read from source files are those that Python has, or unknown: no correct request is refused."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import Any

import pytest

from framework.errors import TargetError
from tests.helpers.internals import ImportedSignatures, SourceSignatures, check_node, source_module

LIBRARIES = (
    "torch.optim",
    "torch.optim.lr_scheduler",
    "torchvision.models",
    "torch.nn",
    # Its import takes seconds.
    pytest.param("torchmetrics", marks=pytest.mark.exhaustive),
)
OWN = (
    "framework",
    "framework.callbacks",
    "framework.loggers",
    "framework.optim",
    "framework.data.samplers",
    "framework.strategies",
    "framework.tasks",
    "framework.data.transforms",
    "recipes.digits",
    "recipes.gan",
    "recipes.gpt",
    "recipes.mnist",
    "recipes.tagging",
    "recipes.toy",
)
# Of each, the share of names whose signature is known without an import is at least this.
KNOWN = {"torch.optim": 0.9, "torch.optim.lr_scheduler": 0.6, "framework.callbacks": 0.9, "recipes.toy": 0.5}


def callables(module: str) -> Iterator[str]:
    imported = import_module(module)
    for name in dir(imported):
        if not name.startswith("_") and callable(getattr(imported, name)):
            yield f"{module}.{name}"


def described(parameters: Any) -> list[tuple[str, Any, bool]]:
    return [(each.name, each.kind, each.default is each.empty) for each in parameters.values()]


@pytest.mark.parametrize("module", [*OWN, *LIBRARIES])
def test_a_signature_is_pythons_or_unknown(module: str) -> None:
    known = 0
    names = list(callables(module))
    for name in names:
        found = source_module.look_up(name)
        assert not isinstance(found, source_module.Missing), name
        parameters = source_module.signature(found)
        if parameters is not None and source_module.is_ordinary(found):
            known += 1
            assert described(parameters) == described(ImportedSignatures().parameters(name)), name
    assert known >= KNOWN.get(module, 0) * len(names)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that modules can be imported from."""
    monkeypatch.syspath_prepend(str(tmp_path))
    invalidate_caches()
    return tmp_path


# In each, `Target(width=1)` is a correct call that the plain signature doesn't show.
DECIDED_BY_PYTHON = {
    "decorated function": "@decorate\ndef Target(): ...",
    "decorated constructor": "class Target:\n    @decorate\n    def __init__(self): ...",
    "decorated class": "@decorate\nclass Target: ...",
    "metaclass": "class Meta(type):\n    def __call__(cls, width): ...\nclass Target(metaclass=Meta): ...",
    "new": "class Target:\n    def __new__(cls, width): ...",
    "new of a base": (
        "class Base:\n    def __new__(cls, width): return object()\nclass Target(Base):\n    def __init__(self): ..."
    ),
    "changed by a base": (
        "class Base:\n    def __init_subclass__(cls): cls.__init__ = lambda self, width: None\n"
        "class Target(Base):\n    def __init__(self): ..."
    ),
    "replaced constructor": "class Target:\n    def __init__(self): ...\nTarget.__init__ = lambda self, width: None",
    "chosen by a condition": "if 1:\n    def Target(width): ...\nelse:\n    def Target(): ...",
    "bound again": "def Target(): ...\nTarget = lambda width: None",
    "bound by a function": "def Target(): ...\ndef f():\n    global Target\n    Target = lambda width: None\nf()",
    "made when asked for": "def __getattr__(name): return lambda width: None",
    "made in a loop": "globals()['Target'] = lambda width: None",
    "several bases": "class A: ...\nclass B:\n    def __init__(self, width): ...\nclass Target(A, B): ...",
    "base made by a call": "Target = type('Target', (), {'__init__': lambda self, width: None})",
    "base that is an expression": (
        "from collections import namedtuple\nclass Target(namedtuple('Target', 'width')): ..."
    ),
    "named tuple": "from typing import NamedTuple\nclass Target(NamedTuple):\n    width: int",
    "dictionary": "class Target(dict): ...",
    "constructor in a branch": (
        "class Target:\n    if 1:\n        def __init__(self, width): ...\n    else:\n        def __init__(self): ..."
    ),
    "star import that hides": "def Target(): ...\nfrom hidden import *",
    "dataclass fields of a base": (
        "from dataclasses import dataclass\n@dataclass\nclass Base:\n    width: int\n"
        "@dataclass\nclass Target(Base):\n    depth: int = 1"
    ),
    "keywords of any name": "def Target(**options): ...",
}


@pytest.mark.parametrize("kind", DECIDED_BY_PYTHON)
def test_what_python_decides_is_not_refused(kind: str, package: Path) -> None:
    name = f"decided_{kind.replace(' ', '_')}"
    decorate = "def decorate(target): return lambda width: None\n"
    (package / f"{name}.py").write_text(decorate + DECIDED_BY_PYTHON[kind])
    (package / "hidden.py").write_text("def Target(width): ...")
    node = {"_target_": f"{name}.Target", "width": 1}
    assert list(check_node(node, "k", signatures=SourceSignatures())) == []


SHOWN = {
    "function": "def Target(depth, *, wide=1): ...",
    "class": "class Target:\n    def __init__(self, depth, *, wide=1): ...",
    "inherited": (
        "from torch import nn\nclass Base(nn.Module):\n    def __init__(self, depth, *, wide=1): ...\n"
        "class Target(Base):\n    def forward(self, x): ..."
    ),
    "generic": (
        "from torch.utils.data import Dataset\nclass Target(Dataset[int]):\n"
        "    def __init__(self, depth, *, wide=1): ..."
    ),
    "dataclass": (
        "from dataclasses import KW_ONLY, dataclass, field\nfrom typing import ClassVar\n"
        "@dataclass(eq=False)\nclass Target:\n    depth: int\n    _: KW_ONLY\n    wide: int = field(default=1)\n"
        "    width: ClassVar[int] = 3\n    other: int = field(init=False)"
    ),
    "imported": "from shown_elsewhere import Real as Target",
    "star": "from shown_elsewhere import *\nTarget = Real",
}


@pytest.mark.parametrize("kind", SHOWN)
def test_what_the_source_shows_is_checked(kind: str, package: Path) -> None:
    name = f"shown_{kind}"
    (package / f"{name}.py").write_text(SHOWN[kind])
    (package / "shown_elsewhere.py").write_text("def Real(depth, *, wide=1): ...")
    node = {"_target_": f"{name}.Target", "widee": 1}
    mistakes = list(check_node(node, "k", signatures=SourceSignatures()))
    assert mistakes == list(check_node(node, "k"))
    assert "Did you mean k.wide? It takes depth, wide." in mistakes[0]
    assert "k.depth is required by" in mistakes[1]


@pytest.mark.parametrize(
    "target",
    ["torch.optim.SDG", "torch.nn.Lineer", "torch.optim.sdg.SGD", "recipes.toy.ToyModl", "recipies.toy.ToyModel"],
)
def test_a_wrong_name_has_the_same_answer(target: str) -> None:
    answers = []
    for signatures in (SourceSignatures(), ImportedSignatures()):
        with pytest.raises(TargetError) as caught:
            signatures.parameters(target)
        answers.append(str(caught.value))
    assert answers[0] == answers[1]


def test_a_changed_file_is_read_again(package: Path) -> None:
    file = package / "edited.py"
    for keyword in ("one", "another"):
        file.write_text(f"def make({keyword}): ...")
        assert list(source_module.signature(source_module.look_up("edited.make")) or ()) == [keyword]


def test_folders_without_init_are_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outer_package" / "inner").mkdir(parents=True)
    (tmp_path / "outer_package" / "__init__.py").touch()
    (tmp_path / "outer_package" / "inner" / "data.py").write_text("def texts(size): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = source_module.look_up("outer_package.inner.data.texts")
    assert list(source_module.signature(found) or ()) == ["size"]
    assert isinstance(source_module.look_up("outer_package.inner.dataa.texts"), source_module.Missing)
    assert "outer_package" not in sys.modules


def test_names_that_are_made_lazily_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    parse = ast.parse

    def counted(text: str) -> ast.Module:
        parsed.append(text)
        return parse(text)

    monkeypatch.setattr(ast, "parse", counted)
    assert source_module.look_up("transformers.AutoModelForCausalLM.from_config") is None
    assert source_module.look_up("transformers.GPT2Config") is None
    assert len(parsed) < 10

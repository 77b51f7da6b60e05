"""The user's modules that a process has imported, by their content."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.internals import hashes_of_loaded_modules


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with a package, whose module is imported."""
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("x = 1\n")
    (tmp_path / "own_unused.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("own_package.part")
    yield tmp_path
    for name in ("own_package", "own_package.part"):
        del sys.modules[name]


def test_only_imported_modules_of_the_user_are_hashed(own_modules: Path) -> None:
    hashes = hashes_of_loaded_modules()
    assert hashes["own_package.part"] == hashlib.sha256(b"x = 1\n").hexdigest()
    assert hashes["own_package"] == hashlib.sha256(b"").hexdigest()
    assert "own_unused" not in hashes
    assert __name__ in hashes
    roots = {name.partition(".")[0] for name in hashes}
    assert roots.isdisjoint({"framework", "pytest", "_pytest", "hashlib", "importlib", "omegaconf", "sys"})


def test_a_changed_module_has_another_hash(own_modules: Path) -> None:
    before = hashes_of_loaded_modules()["own_package.part"]
    (own_modules / "own_package" / "part.py").write_text("x = 2\n")
    assert hashes_of_loaded_modules()["own_package.part"] != before


def test_odd_modules_are_left_out(own_modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own_modules / "own_package" / "part.py").unlink()
    without_file = ModuleType("own_without_file")
    archived = ModuleType("own_archived")
    archived.__file__ = str(own_modules / "archive.zip" / "own_archived.py")

    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise ImportError(f"{name} is imported only when it is asked for")

    for module in (without_file, archived, Lazy("own_lazy")):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "own_object", None)
    names = [name for name in hashes_of_loaded_modules() if name.startswith("own_")]
    assert names == ["own_package"]

"""Every mutation has one place in the code, compiles with its bug, and names a test that exists."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation, MutationError, definitions, framework_sources, mutated

SOURCES = framework_sources()


def mutation(*, within: str, old: str, new: str) -> Mutation:
    return Mutation("a-bug", caught_by="", within=within, old=old, new=new, what="")


def mutated_text(source: str, *, within: str, old: str, new: str) -> str:
    _, text = mutated(mutation(within=within, old=old, new=new), {Path("module.py"): source})
    return text


@pytest.mark.parametrize("bug", MUTATIONS, ids=lambda bug: bug.name)
def test_each_mutation_applies_and_compiles(bug: Mutation) -> None:
    path, source = mutated(bug, SOURCES)
    assert ast.dump(ast.parse(source)) != ast.dump(ast.parse(SOURCES[path]))


@pytest.mark.parametrize("bug", MUTATIONS, ids=lambda bug: bug.name)
def test_each_mutation_names_an_existing_test(bug: Mutation) -> None:
    file, _, function = bug.caught_by.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert function in {name for name, _ in definitions(tree)}


def test_mutation_names_are_unique() -> None:
    assert len({bug.name for bug in MUTATIONS}) == len(MUTATIONS)


def test_an_expression_is_found_in_any_layout() -> None:
    source = """
class Trainer:
    def step(self):
        return max(
            self.a,  # the first
            self.b,
        )
"""
    text = mutated_text(source, within="Trainer.step", old="max(self.a, self.b)", new="self.a")
    assert text == "class Trainer:\n\n    def step(self):\n        return self.a"


def test_a_statement_can_be_dropped() -> None:
    text = mutated_text("def f(x):\n    x.flush()\n    return x\n", within="f", old="x.flush()", new="pass")
    assert text == "def f(x):\n    pass\n    return x"


def test_a_value_in_a_table_can_change() -> None:
    assert mutated_text("SECONDS = {'h': 3600}\n", within="SECONDS", old="3600", new="360") == "SECONDS = {'h': 360}"


def test_a_missing_or_ambiguous_place_is_an_error() -> None:
    source = "def f(x):\n    return x + 1\n\ndef g(x):\n    return x + 1, x + 1\n"
    for within, problem in {"h": "has no h", "f.x": "has no f.x", "g": "is 2 times in g"}.items():
        with pytest.raises(MutationError, match=problem):
            mutated_text(source, within=within, old="x + 1", new="x")
    with pytest.raises(MutationError, match="is 0 times in f"):
        mutated_text(source, within="f", old="x + 2", new="x")
    sources = {Path("a.py"): source, Path("b.py"): source}
    with pytest.raises(MutationError, match="is 2 times in f"):
        mutated(mutation(within="f", old="x + 1", new="x"), sources)

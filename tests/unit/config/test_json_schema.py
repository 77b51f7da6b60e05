"""The JSON Schema by which editors complete and check recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from tests.helpers.command import run_framework
from tests.helpers.internals import JOBS, json_schema
from tests.helpers.source import ROOT

CONF = ROOT / "conf"
SHIPPED: dict[str, Any] = json.loads((CONF / "schema.json").read_text())


def mistakes(recipe: Any, schema: dict[str, Any] = SHIPPED) -> list[str]:
    """Return the dotted keys at which a recipe isn't as the schema says."""
    errors = Draft7Validator(schema).iter_errors(recipe)
    return [".".join(map(str, error.absolute_path)) for error in errors]


def test_the_shipped_schema_is_what_the_job_writes() -> None:
    Draft7Validator.check_schema(SHIPPED)
    present = json.loads(json_schema([CONF]))
    # The keywords of targets are those of the installed versions.
    del present["definitions"]["node"]["allOf"]
    shipped = {**SHIPPED, "definitions": {"node": {**SHIPPED["definitions"]["node"]}}}
    del shipped["definitions"]["node"]["allOf"]
    assert shipped == present, "run python -m framework job=schema in the repository"


@pytest.mark.parametrize("recipe", sorted((CONF / "recipe").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_of_the_framework_fits_and_names_it(recipe: Path) -> None:
    assert "# yaml-language-server: $schema=../schema.json" in recipe.read_text().splitlines()
    assert mistakes(yaml.safe_load(recipe.read_text())) == []


@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        ("trainer: {max_epoch: 3}", "trainer"),
        ("trainer: {max_epochs: 0}", "trainer.max_epochs"),
        ("trainer: {precision: bf16}", "trainer.precision"),
        ("data: {batch_size: many}", "data.batch_size"),
        ("optimiser: {lr: 0.1}", ""),
        ("backend: {timeout: 3 minutes}", "backend.timeout"),
        ("defaults: [override /optimizer: adamm]", "defaults.0"),
        ("callbacks: {ema: 3}", "callbacks"),
        ("job: tain", "job"),
    ],
)
def test_a_mistake_is_marked(recipe: str, key: str) -> None:
    assert mistakes(yaml.safe_load(recipe)) == [key]


@pytest.mark.parametrize(
    "recipe",
    [
        "seed: ${oc.env:SEED}",
        "trainer: {val_check_interval: 0.5, max_epochs: null}",
        "trainer: {gpus: auto}",
        "backend: {timeout: 90s}",
        "optimizer: {lr: 0.1, anything: [1, {_target_: torch.nn.ReLU}]}",
        "defaults: [override /callbacks: [ema, early_stopping], /task: classification, _self_]",
        *(f"job: {job}" for job in JOBS),
        "job: recipes.gpt.sample",
    ],
)
def test_what_the_framework_takes_is_not_marked(recipe: str) -> None:
    assert mistakes(yaml.safe_load(recipe)) == []


def test_keys_have_the_descriptions_of_the_schema() -> None:
    batch_size = SHIPPED["properties"]["data"]["properties"]["batch_size"]
    assert batch_size["description"].startswith("Samples of a process in one batch")


def test_the_job_adds_the_users_own_options_and_targets(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/mine.py").write_text("class Net:\n    def __init__(self, width, *, depth=2): ...\n")
    for folder in ("recipe", "optimizer"):
        (tmp_path / "conf" / folder).mkdir(parents=True)
    (tmp_path / "conf/recipe/mine.yaml").write_text("# @package _global_\nmodel: {_target_: recipes.mine.Net}\n")
    (tmp_path / "conf/optimizer/slow.yaml").write_text("_target_: torch.optim.SGD\nlr: 0.0001\n")

    written = run_framework("job=schema", cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    schema = json.loads((tmp_path / "conf/schema.json").read_text())
    assert mistakes({"defaults": [{"override /optimizer": "slow"}]}, schema) == []
    assert mistakes({"defaults": [{"override /optimizer": "slow"}]}) == ["defaults.0"]
    [net] = [case for case in schema["definitions"]["node"]["allOf"] if "recipes.mine.Net" in json.dumps(case["if"])]
    assert net["then"]["properties"] == {"width": {}, "depth": {}}

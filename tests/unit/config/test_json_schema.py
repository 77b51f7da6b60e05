"""The JSON Schema by which editors complete and check the YAML files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from tests.helpers.command import run_framework
from tests.helpers.internals import JOBS, json_schema, walk_nested
from tests.helpers.source import ROOT

CONF = ROOT / "conf"
SHIPPED: dict[str, Any] = json.loads((CONF / "schema.json").read_text())


def mistakes(content: Any, schema: dict[str, Any] = SHIPPED, *, part: str = "") -> list[str]:
    """Return the dotted keys at which a file isn't as the schema, or a part of it such as `/definitions/data`, says."""
    if part:
        schema = {"definitions": schema["definitions"], "$ref": f"#{part}"}
    errors = Draft7Validator(schema).iter_errors(content)
    return [".".join(map(str, error.absolute_path)) for error in errors]


def test_the_shipped_schema_is_what_the_job_writes() -> None:
    Draft7Validator.check_schema(SHIPPED)
    present = json.loads(json_schema([CONF]))
    # The keywords of targets are those of the installed versions.
    del present["definitions"]["node"]["allOf"]
    shipped = deepcopy(SHIPPED)
    del shipped["definitions"]["node"]["allOf"]
    assert shipped == present, "run python -m framework job=schema in the repository"


@pytest.mark.parametrize("file", sorted(CONF.rglob("*.yaml")), ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_a_file_of_the_framework_names_the_schema_and_fits(file: Path) -> None:
    text = file.read_text()
    [place] = re.findall(r"^# yaml-language-server: \$schema=(\S+)$", text, re.MULTILINE)
    path, _, part = place.partition("#")
    assert file.parent.joinpath(path).resolve() == CONF / "schema.json"
    is_recipe = file.parent.name == "recipe" or file.name == "config.yaml" or "@package _global_" in text
    assert part == ("" if is_recipe else f"/definitions/{file.parent.name}")
    assert mistakes(yaml.safe_load(text), part=part) == []


def recipes_with_misspelt_keywords() -> Iterator[Any]:
    """Yield each shipped recipe, once for each of its targets, with a keyword that the target doesn't take."""
    for file in sorted((CONF / "recipe").glob("*.yaml")):
        recipe = yaml.safe_load(file.read_text()) or {}
        for key, _ in walk_nested(recipe):
            if key.endswith("._target_"):
                *names, _ = key.split(".")
                yield pytest.param(file, names, id=f"{file.stem}-{'.'.join(names)}")


@pytest.mark.parametrize(("file", "names"), list(recipes_with_misspelt_keywords()))
def test_a_misspelt_keyword_of_a_recipes_target_is_marked(file: Path, names: list[str]) -> None:
    recipe = yaml.safe_load(file.read_text())
    node: Any = recipe
    for name in names:
        node = node[int(name) if isinstance(node, list) else name]
    node["mispelt"] = 3
    # What holds it may have several forms, and is then marked as a whole.
    [marked] = mistakes(recipe)
    assert ".".join(names).startswith(marked)
    assert marked


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
        ("model: {_target_: recipes.gpt.GPT, layer: 4}", "model"),
        ("model: {_target_: torch.nn.Sequential, _args_: [{_target_: recipes.gpt.GPT, layer: 4}]}", "model"),
        ("optimizer: {matrices: {_target_: torch.optim.Muon, learning_rate: 0.1}}", "optimizer"),
        ("task: {_target_: framework.tasks.Supervised, metric: {}}", "task"),
        (
            "task: {_target_: framework.tasks.Supervised, metrics: {f1: {_target_: framework.tasks.Perplexity, k: 1}}}",
            "task",
        ),
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
        "optimizer: {_target_: torch.optim.AdamW, lr: '${oc.env:LR}', groups: [{params: ndim<2, weight_decay: 0}]}",
        "model: {_target_: recipes.gpt.GPT, _partial_: false, _convert_: all, layers: '${seed}', freeze: [head]}",
        "model: {_target_: torch.nn.Sequential, _args_: [{_target_: torch.nn.ReLU, _recursive_: false}]}",
        "model: {_target_: torchvision.models.no_such_model, anything: 1}",
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
    assert mistakes({"_target_": "torch.optim.SGD", "lrr": 0.1}, schema, part="/definitions/optimizer") == [""]
    net = {"_target_": "recipes.mine.Net", "width": 3}
    assert mistakes({"model": {**net, "depth": 1}}, schema) == []
    assert mistakes({"model": {**net, "dept": 1}}, schema) == ["model"]

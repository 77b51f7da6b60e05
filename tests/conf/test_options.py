"""Every option of every group composes with every recipe, parses, and passes the cross checks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from framework.config.assets import config_dir
from framework.config.checks import check
from framework.config.parse import parse, schema_keys
from framework.config.schema import Config
from framework.errors import ConfigError

CONF = config_dir()
# A part that others complete.
UNFINISHED = "data=default"
# What an option leaves to be typed.
TYPED = {"topology=multi_node": ["topology.rdzv_endpoint=node0:29400"]}
OPTIONS = sorted({f"{file.parent.name}={file.stem}" for file in CONF.glob("*/*.yaml")} - {UNFINISHED})
RECIPES = sorted(file.stem for file in (CONF / "recipe").glob("*.yaml"))
GROUPS = sorted(folder.name for folder in CONF.iterdir() if folder.is_dir())


def composed(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", overrides=list(overrides), return_hydra_config=True)
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)  # what ${hydra:...} looks in
    try:
        raw: Any = OmegaConf.to_container(config, resolve=True)
    finally:
        HydraConfig.instance().cfg = before
    del raw["hydra"]
    return raw


def read(*overrides: str) -> Config:
    config = parse(composed(*overrides))
    check(config)
    return config


def pairs(options: list[str]) -> list[Any]:
    """Every option with every recipe; by default with two: the first, and of the others each in turn."""
    return [
        (recipe, option)
        if recipe in (RECIPES[0], RECIPES[1 + turn % (len(RECIPES) - 1)])
        else pytest.param(recipe, option, marks=pytest.mark.exhaustive)
        for turn, option in enumerate(options)
        for recipe in RECIPES
    ]


@pytest.mark.parametrize(
    ("recipe", "option"), pairs([option for option in OPTIONS if not option.startswith("recipe=")])
)
def test_every_option_goes_with_every_recipe(recipe: str, option: str) -> None:
    assert read(f"recipe={recipe}", option, *TYPED.get(option, [])).recipe == recipe


@pytest.mark.parametrize(
    ("recipe", "option"),
    pairs([option for option in OPTIONS if option.startswith(("optimizer=", "model=", "strategy="))]),
)
def test_a_recipe_leaves_no_keywords_behind_that_another_option_does_not_take(recipe: str, option: str) -> None:
    group, _, name = option.partition("=")
    assert composed(f"recipe={recipe}", option)[group].keys() == keys_of_file(group, name)


def keys_of_file(group: str, name: str) -> set[str]:
    content = yaml.safe_load((CONF / group / f"{name}.yaml").read_text())
    below = [keys_of_file(group, parent) for parent in content.pop("defaults", [])]
    return set(content).union(*below)


def test_what_the_unfinished_part_needs_is_said() -> None:
    with pytest.raises(ConfigError, match=r"data\.datasets has no value yet\. It must be a mapping with `_target_`"):
        read(UNFINISHED)


def test_there_is_a_group_for_every_part_that_can_be_chosen() -> None:
    assert set(GROUPS) == {
        *("recipe", "model", "data", "task", "backend", "topology", "trainer", "strategy", "optimizer", "scheduler"),
        *("checkpoint", "logger", "callbacks", "launcher"),
    }


def test_yaml_and_schema_have_the_same_keys() -> None:
    def keys(raw: Any, path: str = "") -> Iterator[str]:
        for name, value in raw.items():
            yield f"{path}{name}"
            if isinstance(value, dict) and f"{path}{name}." in sections:
                yield from keys(value, f"{path}{name}.")

    sections = {f"{key.rpartition('.')[0]}." for key in schema_keys() if "." in key}
    assert sorted(keys(composed())) == sorted(schema_keys())


def test_several_options_of_a_group() -> None:
    config = read("callbacks=[early_stopping,ema]", "logger=[jsonl,console]")
    assert list(config.callbacks) == ["early_stopping", "ema"]
    assert list(config.logger) == ["jsonl", "console"]
    assert read("callbacks=[]", "logger=none").callbacks == {}


def test_the_name_of_the_recipe_is_in_the_configuration() -> None:
    assert read().recipe == "digits"
    assert read("recipe=toy").recipe == "toy"


def test_what_the_recipes_are() -> None:
    toy = read("recipe=toy")
    assert (toy.optimizer["lr"], toy.optimizer["momentum"], toy.data.batch_size) == (0.001, 0, 20)
    digits = read("recipe=digits")
    assert (digits.optimizer["lr"], digits.optimizer["momentum"], digits.data.batch_size) == (0.02, 0.9, 32)
    assert digits.checkpoint.monitor == "val/accuracy"
    assert read("recipe=toy_model_parallel").topology.min_gpus_per_process == 2


@pytest.mark.parametrize("option", ["one_cycle"])
def test_the_peak_of_a_schedule_follows_the_optimizer(option: str) -> None:
    schedule = read(f"scheduler={option}", "optimizer.lr=0.5").scheduler.schedule
    assert schedule is not None
    assert schedule["max_lr"] == 0.5


@pytest.mark.parametrize("file", sorted(CONF.glob("**/*.yaml")), ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_file_is_mapping(file: Path) -> None:
    assert isinstance(yaml.safe_load(file.read_text()), dict)

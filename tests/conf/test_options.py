"""Options of all groups compose with the recipes, parse, and pass the checks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from framework.errors import ConfigError
from tests.helpers.internals import (
    Config,
    Request,
    check_request,
    compose_config,
    config_dir,
    hydra_for,
    known_keys,
    parse,
    refuse_replaced,
)
from tests.unit.config.raw import composed

CONF = config_dir()
UNFINISHED = {"data=default", "recipe=blank"}
"""Parts that other options or a call complete."""
TYPED = {"topology=multi_node": ["topology.rdzv_endpoint=node0:29400"]}
"""What an option leaves to be typed."""
OPTIONS = sorted({f"{file.parent.name}={file.stem}" for file in CONF.glob("*/*.yaml")} - UNFINISHED)
RECIPES = sorted({file.stem for file in (CONF / "recipe").glob("*.yaml")} - {"blank"})


def read(*overrides: str) -> Config:
    config = parse(composed(*overrides))
    check_request(Request(config, {}, ()))
    return config


GROUPS = sorted({option.partition("=")[0] for option in OPTIONS})
LARGEST_GROUP = max(Counter(option.partition("=")[0] for option in OPTIONS).values())


@pytest.mark.parametrize("turn", range(LARGEST_GROUP))
def test_every_option_composes(turn: int) -> None:
    """One option of each group at a time. A recipe leaves no keywords behind that an option's target doesn't take."""
    chosen = {}
    for group in GROUPS:
        options = [option.partition("=")[2] for option in OPTIONS if option.startswith(f"{group}=")]
        chosen[group] = options[turn % len(options)]
    if chosen["optimizer"] == "lightning":
        # one_cycle takes optimizer.lr, which only the module knows.
        chosen["scheduler"] = "lightning"
    typed = [f"{group}={option}" for group, option in chosen.items()]
    for option in list(typed):
        typed += TYPED.get(option, [])
    config = parse(composed(*typed))
    assert config.recipe == chosen["recipe"]
    # The recipe's own sections add to what the options say.
    own = sections_of_recipe(chosen["recipe"])
    for group in {"optimizer", "model", "strategy"} - own:
        assert getattr(config, group).keys() == keys_of_file(group, chosen[group])


def sections_of_recipe(name: str) -> set[str]:
    """Return the sections that a recipe, or one that it builds on, sets itself."""
    content = yaml.safe_load((CONF / f"recipe/{name}.yaml").read_text())
    bases = [each for each in content.pop("defaults", []) if isinstance(each, str)]
    return set(content).union(*map(sections_of_recipe, bases))


def options_that_meet(recipe: str) -> list[str]:
    """Return all options of the sections that a recipe sets itself, and one of each other group, in turn."""
    own = sections_of_recipe(recipe)
    chosen = []
    for group in GROUPS:
        options = [option for option in OPTIONS if option.startswith(f"{group}=")]
        if group in own:
            chosen += options
        elif group != "recipe":
            chosen.append(options[RECIPES.index(recipe) % len(options)])
    return chosen


PAIRS = [(recipe, option) for recipe in RECIPES for option in options_that_meet(recipe)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("recipe", "option"), PAIRS)
def test_options_go_with_recipes(recipe: str, option: str) -> None:
    several = recipe in ("gan_digits", "gpt_muon")
    if option == "scheduler=one_cycle" and several:
        pytest.skip("it takes optimizer.lr, and there are several optimizers")
    if option in ("optimizer=muon", "optimizer=lightning") and (
        recipe == "mnist_fast" or "optimizer" in sections_of_recipe(recipe)
    ):
        pytest.skip("the recipe sets or reads keys of a single optimizer")
    group = option.partition("=")[0]
    refusal = None
    try:
        read(f"recipe={recipe}", option, *TYPED.get(option, []))
    except ConfigError as error:
        refusal = str(error)
    if refusal is not None:
        # The recipe's own keys of the section stay, and the command names those that the option's target doesn't take.
        assert group in sections_of_recipe(recipe)
        assert re.search(rf"{group}\.\S+( is required by|: \S+ has no such keyword)", refusal)


def keys_of_file(group: str, name: str) -> set[str]:
    content = yaml.safe_load((CONF / group / f"{name}.yaml").read_text())
    below = [keys_of_file(group, parent) for parent in content.pop("defaults", [])]
    return set(content).union(*below)


def test_no_option_is_replaced_by_a_recipe_without_its_section() -> None:
    with hydra_for(None):
        for option in OPTIONS:
            if not option.startswith("recipe="):
                typed = ["recipe=toy", option, *TYPED.get(option, [])]
                refuse_replaced(typed, compose_config("config", typed))


def test_yaml_and_schema_have_the_same_keys() -> None:
    def keys(raw: Any, path: str = "") -> Iterator[str]:
        for name, value in raw.items():
            yield f"{path}{name}"
            if isinstance(value, dict) and f"{path}{name}." in sections:
                yield from keys(value, f"{path}{name}.")

    sections = {f"{key.rpartition('.')[0]}." for key in known_keys() if "." in key}
    assert sorted(keys(composed())) == sorted(known_keys())


def test_values_of_the_recipes() -> None:
    toy = read("recipe=toy")
    digits = read()
    assert (toy.recipe, digits.recipe) == ("toy", "digits")
    assert (toy.optimizer["lr"], toy.optimizer["momentum"], toy.data.batch_size) == (0.001, 0, 20)
    assert (digits.optimizer["lr"], digits.optimizer["momentum"], digits.data.batch_size) == (0.02, 0.9, 32)
    assert digits.checkpoint.monitor == "val/accuracy"
    assert read("recipe=toy_model_parallel").topology.min_gpus_per_process == 2
    schedule = read("scheduler=one_cycle", "optimizer.lr=0.5").scheduler.schedule
    assert schedule is not None
    # The schedule follows the optimizer.
    assert schedule["max_lr"] == 0.5
    with pytest.raises(ConfigError, match=r"data\.datasets has no value\. It must be a mapping with `_target_`"):
        read("data=default")

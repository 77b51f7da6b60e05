"""Options of all groups compose with the recipes, parse, and pass the checks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig

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
    resolved,
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
    with hydra_for(None):
        return checked(compose_config("config", list(overrides)))


def checked(composed_config: DictConfig) -> Config:
    raw, _ = resolved(composed_config)
    config = parse(raw)
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


def options_that_meet(recipe: str) -> dict[str, list[str]]:
    """Return all options of each section that a recipe sets itself."""
    met = {}
    for group in sections_of_recipe(recipe) & set(GROUPS):
        options = [option for option in OPTIONS if option.startswith(f"{group}=")]
        if group == "optimizer":
            # The recipe sets or reads keys of a single optimizer.
            options = [option for option in options if option not in ("optimizer=muon", "optimizer=lightning")]
        met[group] = options
    return met


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", RECIPES)
def test_options_go_with_a_recipe_that_sets_their_sections(recipe: str) -> None:
    """One option of each of its sections at a time: a refusal lists the mistakes of all."""
    met = options_that_meet(recipe)
    # The recipe's own keys of a section stay, and the command names those that the option's target doesn't take.
    of_keywords = re.compile(rf"({'|'.join(met)})\.\S+( is required by|: \S+ has no such keyword)")
    with hydra_for(None):
        for turn in range(max(map(len, met.values()))):
            typed = [options[turn % len(options)] for options in met.values()]
            mistakes = []
            try:
                checked(compose_config("config", [f"recipe={recipe}", *typed]))
            except ConfigError as error:
                mistakes = re.findall(r"^  - (.*)", str(error), re.MULTILINE) or [str(error)]
            assert [mistake for mistake in mistakes if not of_keywords.match(mistake)] == [], typed


def keys_of_file(group: str, name: str) -> set[str]:
    content = yaml.safe_load((CONF / group / f"{name}.yaml").read_text())
    below = [keys_of_file(group, parent) for parent in content.pop("defaults", [])]
    return set(content).union(*below)


def test_a_recipe_without_a_section_goes_with_its_options_and_replaces_none() -> None:
    with hydra_for(None):
        for option in OPTIONS:
            if not option.startswith("recipe="):
                typed = ["recipe=toy", option, *TYPED.get(option, [])]
                config = compose_config("config", typed)
                refuse_replaced(typed, config)
                checked(config)


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

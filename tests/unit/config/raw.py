"""A whole configuration as plain values, to change in tests of what reads it."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from tests.helpers.internals import VERSION_BASE, config_dir

_SOME: dict[str, Any] = {
    "recipe": "some",
    "preflight.max_bytes": 1024,
    "model": {"_target_": "recipes.some.Model", "width": 8},
    "data.datasets": {"_target_": "recipes.some.data"},
    "data.batch_size": 4,
    "data.eval_batch_size": None,
    "topology.gpus_per_process": None,
    "trainer.max_epochs": 2,
    "trainer.log_every_n_steps": 10,
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
    "checkpoint.monitor": None,
    "logger": {"jsonl": {"_target_": "framework.loggers.JsonlLogger"}},
}
"""How it differs from that of `recipe=toy`: nothing in it is imported, and every value differs from the defaults."""


def composed(*overrides: str) -> dict[str, Any]:
    """Return what the command composes of `overrides`, resolved.

    Hydra takes 0.3 s to compose options, so each set of options is composed once; keys are set in a copy of it.
    """
    return deepcopy(_composed(overrides))


@cache
def _composed(overrides: tuple[str, ...]) -> dict[str, Any]:
    keys = [text for text in overrides if _sets_a_key(text)]
    with_hydra = _options(tuple(text for text in overrides if text not in keys))
    config = OmegaConf.masked_copy(with_hydra, [str(name) for name in with_hydra if name != "hydra"])
    OmegaConf.set_struct(config, True)
    for override in OverridesParser.create().parse_overrides(keys):
        OmegaConf.update(config, override.key_or_group, override.value(), force_add=override.is_add())
    before = HydraConfig.instance().cfg
    # ${hydra:...} is looked up there.
    HydraConfig.instance().set_config(with_hydra)
    try:
        raw: Any = OmegaConf.to_container(config, resolve=True)
    finally:
        HydraConfig.instance().cfg = before
    return dict(raw)


def _sets_a_key(override: str) -> bool:
    return "." in override.partition("=")[0] and not override.startswith("~")


@cache
def _options(overrides: tuple[str, ...]) -> DictConfig:
    with initialize_config_dir(str(config_dir()), **VERSION_BASE):
        return compose("config", overrides=list(overrides), return_hydra_config=True)


def raw_config(changes: Mapping[str, Any] | None = None, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a valid configuration with values put at dotted keys and keys taken out."""
    raw = composed("recipe=toy")
    for key, value in {**_SOME, **(changes or {})}.items():
        parent, name = _find(raw, key)
        parent[name] = deepcopy(value)
    for key in without:
        parent, name = _find(raw, key)
        del parent[name]
    return raw


def _find(raw: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    *above, name = key.split(".")
    for part in above:
        raw = raw.setdefault(part, {})
    return raw, name

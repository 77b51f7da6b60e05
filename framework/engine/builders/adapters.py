"""Add the adapters of the package peft, such as LoRA, to a model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import device, nn

from framework.config.schema import Node
from framework.engine.builders.objects import build_object, wrong_result
from framework.errors import ConfigError

_SHOWN = 12


def add_adapters(model: nn.Module, node: Node, *, place: device, trained_too: Sequence[nn.Parameter] = ()) -> nn.Module:
    """Return the model as a PeftModel, in which only the adapters, and what `modules_to_save` names, are trained.

    Args:
        node: builds a configuration of peft, such as a LoraConfig.
        place: where the model is; on the meta device adapters have no values, either.
        trained_too: parameters of the model that stay as they are, trained or not.

    Raises:
        ConfigError: a module that is named doesn't exist, or can't have an adapter.
    """
    # Takes some seconds to import.
    from peft import PeftConfig, get_peft_model

    settings = build_object("peft", node)
    if not isinstance(settings, PeftConfig):
        raise wrong_result("peft", node, settings, expected="a configuration of peft, such as a LoraConfig")
    for key in ("target_modules", "modules_to_save"):
        _check_names(model, getattr(settings, key, None), key=key)
    are_trained = [parameter.requires_grad for parameter in trained_too]
    try:
        if place.type == "meta":
            with place:
                adapted = get_peft_model(model, settings)
        else:
            adapted = get_peft_model(model, settings)
    except ValueError as error:
        raise ConfigError(f"peft: {error}\n{_linear_modules(model)}") from error
    for parameter, is_trained in zip(trained_too, are_trained, strict=True):
        parameter.requires_grad_(is_trained)
    return adapted


def is_adapted(model: nn.Module) -> bool:
    """Return True for what `add_adapters` returns."""
    # Without importing peft, which takes some seconds.
    return hasattr(model, "peft_config") and hasattr(model, "merge_and_unload")


def merge_adapters(model: nn.Module) -> nn.Module:
    """Return the model that adapters were added to, with its weights changed as the adapters change its output.

    Raises ConfigError for adapters that can't be merged.
    """
    merge: Any = getattr(model, "merge_and_unload", None)
    try:
        merged: nn.Module = merge()
    except (AttributeError, NotImplementedError, TypeError) as error:
        raise ConfigError(f"export.merge=true: these adapters can't be merged: {error}") from error
    return merged


def _check_names(model: nn.Module, names: Any, *, key: str) -> None:
    """Raise ConfigError for a name that no module has. Peft only refuses names if none of them matches."""
    if names is None or isinstance(names, str):
        # A regular expression, or peft's word for all.
        return
    modules = [name for name, _ in model.named_modules()]
    for wanted in sorted(names):
        if not any(name == wanted or name.endswith(f".{wanted}") for name in modules):
            raise ConfigError(
                f"peft.{key}: no module of {type(model).__name__} is named {wanted}.\n{_linear_modules(model)}"
            )


def _linear_modules(model: nn.Module) -> str:
    """Return a sentence with the names by which the model's linear modules can be chosen."""
    names = []
    for name, module in model.named_modules():
        # Conv1D is what GPT-2 of transformers calls its linear layers.
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            names.append(_short_name(name))
    distinct = [*dict.fromkeys(names)]
    if not distinct:
        return f"{type(model).__name__} has no linear modules."
    text = ", ".join(distinct[:_SHOWN])
    if len(distinct) > _SHOWN:
        text += f" and {len(distinct) - _SHOWN} more"
    return f"Its linear modules are: {text}."


def _short_name(name: str) -> str:
    """Return the end of a module's name by which it is chosen: `c_attn` of h.0.attn.c_attn, `net.0` of model.net.0."""
    match = re.search(r"[^.]+(\.\d+)*$", re.sub(r"^\d+(\.\d+)*\.(?=\D)", "", name))
    if match is None:
        return name
    return match[0]

"""Values that torch's optimizers refuse are refused before any rank starts, and no others are."""

from __future__ import annotations

from inspect import signature
from itertools import product
from typing import Any

import pytest
import torch

from framework.errors import ConfigError
from tests.helpers.internals import Request, check_request, parse
from tests.unit.config.raw import composed

OPTIMIZERS = [
    name
    for name in torch.optim.__all__
    if name not in ("LBFGS", "Optimizer") and isinstance(getattr(torch.optim, name, None), type)
]
NUMBERS = (-1.0, -1e-9, 0.0, 0.5, 1.0, 1.5, float("inf"))
PAIRS = [*((number, 0.5) for number in NUMBERS), *((0.5, number) for number in NUMBERS)]
# SparseAdam takes no 0.
LEFT_TO_THE_RANKS = [("SparseAdam", "lr", 0.0), ("SparseAdam", "eps", 0.0)]
REFUSED_HERE_ALONE = [("Muon", "eps", -1.0), ("Muon", "eps", -1e-9)]
# Keywords with a range in one optimizer alone.
PARTICULAR = {"alpha", "beta2_decay", "d", "etas"}


def check(section: dict[str, Any]) -> None:
    raw = composed("recipe=toy", "trainer.gpus=0")
    raw["optimizer"] = section
    check_request(Request(parse(raw), raw, ()))


def is_refused(section: dict[str, Any]) -> bool:
    try:
        check(section)
    except ConfigError:
        return True
    return False


def torch_refuses(name: str, keywords: dict[str, Any]) -> bool:
    try:
        getattr(torch.optim, name)([torch.zeros(2, 2)], **keywords)
    except ValueError:
        return True
    return False


def values_of(name: str) -> list[tuple[str, Any]]:
    """Each keyword that is a number or a pair of numbers, with values in and out of any range."""
    values: list[tuple[str, Any]] = []
    for keyword, parameter in signature(getattr(torch.optim, name)).parameters.items():
        if keyword in PARTICULAR:
            continue
        if isinstance(parameter.default, tuple) and len(parameter.default) == 2:
            values += [(keyword, list(pair)) for pair in PAIRS]
        elif type(parameter.default) in (int, float) or keyword == "lr":
            values += [(keyword, number) for number in NUMBERS]
    return values


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_number_is_refused_if_torch_refuses_it(name: str) -> None:
    left_to_the_ranks = []
    refused_here_alone = []
    num_refused = 0
    for keyword, value in values_of(name):
        is_refused_here = is_refused({"_target_": f"torch.optim.{name}", keyword: value})
        is_refused_by_torch = torch_refuses(name, {keyword: value})
        if is_refused_here and not is_refused_by_torch:
            refused_here_alone.append((name, keyword, value))
        if is_refused_by_torch and not is_refused_here:
            left_to_the_ranks.append((name, keyword, value))
        num_refused += is_refused_here
    assert left_to_the_ranks == [case for case in LEFT_TO_THE_RANKS if case[0] == name]
    assert refused_here_alone == [case for case in REFUSED_HERE_ALONE if case[0] == name]
    assert num_refused > 0


@pytest.mark.parametrize("keywords", list(product((0, 0.9), (0, 0.1), (True, False))))
def test_nesterov_needs_momentum_alone(keywords: tuple[float, float, bool]) -> None:
    settings = dict(zip(("momentum", "dampening", "nesterov"), keywords, strict=True))
    assert is_refused({"_target_": "torch.optim.SGD", **settings}) == torch_refuses("SGD", settings)


def test_each_of_several_optimizers_is_checked() -> None:
    matrices = {"_target_": "torch.optim.Muon", "params": "weight", "lr": 0.1}
    others = {"_target_": "torch.optim.adamw.AdamW", "lr": 0.1, "betas": [0.9, 1.0]}
    with pytest.raises(ConfigError, match=r"^optimizer\.others\.betas\.1=1\.0: must be at least 0 and below 1 for "):
        check({"matrices": matrices, "others": others})


def test_what_is_no_number_in_range_is_left_to_the_ranks() -> None:
    for value in (float("nan"), None, True, [[0.9]]):
        check({"_target_": "torch.optim.SGD", "lr": value})
    check({"_target_": "builtins.dict", "lr": -1})

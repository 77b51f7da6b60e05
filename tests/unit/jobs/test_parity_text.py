from __future__ import annotations

from typing import Any

import pytest

from framework.jobs.parity_text import _REASONS, failed, render
from framework.parity.reasons import Reason

WORST = {"name": "fc.weight", "rank": 0, "difference": 0.4, "allowed": 2e-5, "rounding": 3e-6}
SMALL = {**WORST, "difference": 3e-7, "step": 2}
LAYER = {
    **{"name": "norm", "type": "BatchNorm1d", "kind": "left", "inside": "", "call": 1, "own": True, "drew": False},
    **{"before": {"name": "fc", "type": "Linear", "kind": "left"}, "rank": 0},
    **{"difference": 0.31, "allowed": 2e-5, "rounding": 3e-6},
}


def answer(**changes: Any) -> dict[str, Any]:
    parts: dict[str, Any] = {part: {"compared": 4, "greatest": SMALL} for part in ("layers", "gradients", "weights")}
    parts["buffers"] = {"compared": 0, "greatest": None}
    same = {"same": True, "processes": 4, "steps": 3, "left_out": [], "model": "Net", "dropouts": 0, "parts": parts}
    return {**same, "unsure": [], "layer_alone": None, "departure": None, **changes}


def departed(reason: str = "batch_norm", **changes: Any) -> dict[str, Any]:
    counted = {"number": 3, "first": WORST, "worst": {**WORST, "name": "out.bias", "difference": 0.9}}
    departure = {"step": 1, "layer": LAYER, "parts": {"gradients": counted}, "shares": [6, 5, 5], "reason": reason}
    departure |= {"module": "norm", "factor": 0.25, "names": ["a", "b", "c", "d"], **changes}
    return answer(same=False, departure=departure)


def test_the_same() -> None:
    lines = render(answer()).splitlines()
    assert lines[-1] == "The same: Net gets the same weights from 1 process and from 4 in 3 steps, but for rounding."
    assert lines[1].split() == ["compared", "off", "by", "allowed", "rounding", "where"]
    assert lines[2].split() == ["layers", "4", "3.0e-07", "2.0e-05", "3.0e-06", "fc.weight,", "step", "2"]
    assert lines[5].split() == ["buffers", "0"]


def test_what_was_left_out_is_said() -> None:
    printed = render(answer(dropouts=2, left_out=[1, 2], unsure=["k.bias"]))
    assert "Dropout was switched off in 2 modules." in printed
    assert "skipped the optimizer in step 1, 2" in printed
    assert "Of 1 parameter nothing can be said, since the gradient is rounding and nothing else: k.bias" in printed


def test_the_first_layer_and_the_reason() -> None:
    printed = render(departed())
    assert "Not the same: Net departs in step 1." in printed
    assert "first      the output of norm (BatchNorm1d): 0.31 off (2.0e-05 allowed)" in printed
    assert "3 of 4 depart; first fc.weight, 0.4 off" in printed
    assert "most out.bias, 0.9 off" in printed
    assert (
        "In training, norm (BatchNorm1d) takes mean and variance over the samples of its own process, 5 or 6" in printed
    )
    assert "of 16. With" in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 120


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kind": "entered"}, "the input of norm (BatchNorm1d), made in the forward of the model after fc: 0.31 off"),
        (
            {"kind": "entered", "inside": "block", "call": 2},
            "the input of norm (BatchNorm1d), call 2, made in the forward of block",
        ),
        ({"own": False}, "the output of norm (BatchNorm1d), in its own forward after fc: 0.31 off"),
        ({"name": "", "type": "Net", "kind": "entered", "inside": None, "before": None}, "the input of Net: 0.31 off"),
        ({"difference": None}, "the output of norm (BatchNorm1d): another size for each sample"),
        ({"rank": 2}, "0.31 off on rank 2"),
    ],
)
def test_places_in_the_forward(changes: dict[str, Any], text: str) -> None:
    assert text in render(departed(layer={**LAYER, **changes}))


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_words(reason: Reason) -> None:
    printed = render(departed(reason.value, layer=None, step=int(reason is not Reason.START)))
    assert "Probably:" in printed
    assert not {"{", "}"} & set(printed)
    assert len(printed.partition("Probably:")[2]) > 100


def test_no_words_without_a_reason() -> None:
    assert _REASONS.keys() == {reason.value for reason in Reason}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"steps": 0}, "the training ended before its first step"),
        ({"left_out": [1, 2, 3]}, "Use more: parity.steps=20"),
        ({}, "rounding is as large as the gradients"),
    ],
)
def test_nothing_to_say_is_said(changes: dict[str, Any], text: str) -> None:
    assert text in render(answer(same=False, **changes))


def test_a_verdict_says_no_more_than_was_sure() -> None:
    found = answer()
    found["parts"]["weights"] = {"compared": 4, "greatest": {**SMALL, "allowed": 0.7}}
    printed = render(found)
    assert "The same: Net gets the same gradients from 1 process and from 4" in printed
    assert "Of the weights nothing can be said" in printed
    assert "trainer.precision=32-true" in printed


def test_a_layer_that_departs_alone_is_mentioned() -> None:
    printed = render(answer(layer_alone={"step": 2, **LAYER}))
    assert "The same: Net" in printed
    assert printed.endswith("in step 2, which changes no weight.")


def test_a_failed_training_is_named() -> None:
    assert "the training with 1 process failed" in failed(1, 64, "run")
    assert "smaller data.global_batch_size" in failed(1, 64, "run")
    assert "data.global_batch_size" not in failed(2, 64, "run")

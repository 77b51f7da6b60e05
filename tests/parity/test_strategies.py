"""Every strategy on two to four ranks ends at the weights of a plain loop in one process with the same global batches.

Computed in 64 bits, where any mistake is larger than rounding. Strategies that send or compute in shorter formats are
compared with a loop that rounds as they do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from tests.helpers.internals import Precision
from tests.helpers.rank_pool import RankPool
from tests.parity.training import Exchange, How, Trained, expect, mean, train

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_state")]

FULL = How(channels_last=True, recomputed=("Linear", "Conv2d"))
"""Convolutions with the channels last, recomputed activations, accumulation, clipping, a rank without samples."""
NORMED = How("normed", size=79, clip=None)
"""With running statistics; no batch of a single sample."""
COPIES = {"1f1b copies": 2, "gpipe copies": 2, "interleaved copies": 2}
CUTS = {"gpipe": 3, "1f1b": 3, "1f1b copies": 2, "interleaved": 2, "interleaved copies": 2}


def exhaustive(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def check(ends: list[Trained], wanted: Trained, *, tolerance: float, norms: bool = True) -> None:
    """All ranks together have every weight and statistic, and each knows the norm and the validation loss."""
    assert set().union(*(end.weights for end in ends)) == wanted.weights.keys()
    for end in ends:
        for name, value in end.weights.items():
            torch.testing.assert_close(value, wanted.weights[name], rtol=0.0, atol=tolerance)
            holders = [other.weights[name] for other in ends if name in other.weights]
            assert all(torch.equal(value, other) for other in holders), "replicas differ"
        assert end.val_loss == pytest.approx(wanted.val_loss, rel=max(10 * tolerance, 1e-6))
        if norms:
            assert end.norms == pytest.approx(wanted.norms, rel=max(100 * tolerance, 1e-6), nan_ok=True)


def end_as_a_loop(pool: RankPool, strategy: str, how: How, *, ranks: int, tolerance: float) -> None:
    pipelined = "gpipe" in strategy or "1f1b" in strategy or "interleaved" in strategy
    copies = COPIES.get(strategy, 1 if pipelined else ranks)
    wanted = expect(how, ranks=copies, cuts=CUTS.get(strategy, 1))
    norms = how.algorithm == "norm"
    if norms and how.clip is not None:
        assert max(filter(math.isfinite, wanted.norms)) > how.clip
    check(pool.run(train, strategy, how, ranks=ranks), wanted, tolerance=tolerance, norms=norms)


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (2, "1f1b"),
        (2, "interleaved"),
        exhaustive(2, "fsdp classes"),
        (3, "ddp"),
        (3, "ddp unused"),
        (3, "allreduce"),
        (3, "butterfly"),
        (3, "fsdp"),
        (3, "gpipe"),
        exhaustive(4, "hsdp"),
        exhaustive(4, "1f1b copies"),
        *(exhaustive(4, name) for name in ("ddp static", "allreduce each", "butterfly", "interleaved copies")),
    ],
)
def test_it_ends_as_a_plain_loop(rank_pool: RankPool, strategy: str, ranks: int) -> None:
    """The runs accumulate, clip by the norm of all gradients, recompute activations and use channels last."""
    end_as_a_loop(rank_pool, strategy, FULL, ranks=ranks, tolerance=1e-9)


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (3, "ddp"),
        (3, "allreduce"),
        (3, "gpipe whole"),
        exhaustive(4, "gpipe copies"),
        exhaustive(4, "hsdp"),
    ],
)
def test_running_statistics_are_those_of_the_first_rank(rank_pool: RankPool, strategy: str, ranks: int) -> None:
    """Each step begins with its statistics on all ranks; rows that fill up a micro-batch of a pipeline don't count."""
    end_as_a_loop(rank_pool, strategy, NORMED, ranks=ranks, tolerance=1e-9)


OF_FORMATS = {
    "32-true": (How(precision="32-true", clip=0.02, algorithm="value", passes=1), 1e-5),
    "bf16-mixed": (How(precision="bf16-mixed", recomputed=("Linear",)), 5e-3),
    "16-mixed": (How(precision="16-mixed"), 1e-3),
    "bf16-true": (How(precision="bf16-true", clip=None, passes=1), 0.1),
}


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("32-true", "butterfly"),
        ("bf16-mixed", "1f1b"),
        ("bf16-mixed", "ddp"),
        ("16-mixed", "allreduce"),
        exhaustive("16-mixed", "fsdp"),
        ("bf16-true", "allreduce"),
    ],
)
def test_other_formats_end_as_a_plain_loop(rank_pool: RankPool, kind: str, strategy: str) -> None:
    how, tolerance = OF_FORMATS[kind]
    end_as_a_loop(rank_pool, strategy, how, ranks=2, tolerance=tolerance)


def rounded(dtype: torch.dtype, _: int, gradients: Sequence[Tensor]) -> Tensor:
    """Each rank's gradient is rounded and divided; the sum is rounded again."""
    first, second = (gradient.to(dtype).div_(2) for gradient in gradients)
    return (first + second).to(gradients[0].dtype)


class LowRank:
    """PowerSGD of rank 1 with error feedback and warm start, as its paper has it, of the network `dense` in one bucket.

    Gradients come from the last layer to the first. Biases and the last layer are too small to compress.
    """

    def __init__(self, *, start: int) -> None:
        self.start = start
        self.calls = 0
        self.errors: dict[int, list[Tensor]] = {}
        self.thin: dict[int, Tensor] = {}

    def __call__(self, place: int, gradients: Sequence[Tensor]) -> Tensor:
        # A step has three weights and three biases.
        step = self.calls // 6
        self.calls += 1
        if place not in (0, 2) or step < self.start:
            return mean(place, gradients)
        if not self.thin:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(numpy.random.RandomState(0).randint(1_000_000_000))
                self.thin = {2: torch.randn(10, 1, dtype=torch.float64), 0: torch.randn(3, 1, dtype=torch.float64)}
        errors = self.errors.get(place, [torch.zeros_like(each) for each in gradients])
        wanted = [gradient + error for gradient, error in zip(gradients, errors, strict=True)]
        q = nn.functional.normalize(self.thin[place], dim=0)
        p = nn.functional.normalize(torch.stack([each @ q for each in wanted]).sum(dim=0), dim=0)
        self.thin[place] = torch.stack([each.t() @ p for each in wanted]).mean(dim=0)
        product = p @ self.thin[place].t()
        self.errors[place] = [each - product for each in wanted]
        return product


@pytest.mark.parametrize(
    ("strategy", "how", "exchange", "tolerance"),
    [
        ("ddp bf16", How("dense", precision="32-true"), partial(rounded, torch.bfloat16), 1e-5),
        ("ddp powersgd", How("dense"), LowRank(start=4), 1e-8),
        exhaustive("ddp fp16", How("dense", precision="32-true"), partial(rounded, torch.float16), 1e-5),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_shortened_gradients_end_where_their_rule_does(
    rank_pool: RankPool, strategy: str, how: How, exchange: Exchange, tolerance: float
) -> None:
    wanted = expect(how, ranks=2, exchange=exchange)
    check(rank_pool.run(train, strategy, how, ranks=2), wanted, tolerance=tolerance)
    exact = expect(how, ranks=2)
    assert max((value - exact.weights[name]).abs().max() for name, value in wanted.weights.items()) > 1e-5


SHORT = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Formats:
    """The precision of a run, and the formats of weights and reduced gradients."""

    precision: Precision
    param: str | None = None
    reduce: str | None = None
    tolerance: float = 1e-5


@pytest.mark.parametrize(
    "formats",
    [
        Formats(precision="32-true", param="bf16", reduce="bf16"),
        Formats(precision="16-mixed", param="fp16", reduce="fp16"),
        exhaustive(Formats(precision="32-true", param="bf16")),
        exhaustive(Formats(precision="32-true", reduce="bf16")),
        exhaustive(Formats(precision="bf16-mixed", param="bf16", reduce="fp32")),
        exhaustive(Formats(precision="16-mixed", param="fp32", reduce="fp16")),
        exhaustive(Formats(precision="bf16-true", param="bf16", reduce="fp32", tolerance=2.0**-7)),
    ],
)
def test_short_weights_end_where_their_rule_does(rank_pool: RankPool, formats: Formats) -> None:
    """Each rank computes with rounded weights; gradients are added in `reduce`; the optimizer steps whole weights."""
    how = How("dense", precision=formats.precision, passes=1)
    kept = next(how.model().parameters()).dtype
    exchange = partial(rounded, SHORT[formats.reduce] if formats.reduce else kept)
    wanted = expect(how, ranks=2, exchange=exchange, param=SHORT[formats.param] if formats.param else None)
    policy = {"param_dtype": formats.param, "reduce_dtype": formats.reduce}
    check(rank_pool.run(train, "fsdp", how, mp_policy=policy, ranks=2), wanted, tolerance=formats.tolerance)


@pytest.mark.exhaustive
def test_what_a_pipeline_computes_again_drops_the_same(rank_pool: RankPool) -> None:
    how = How("dropping", precision="bf16-mixed")
    once, again = (
        rank_pool.run(train, "1f1b", each, ranks=2) for each in (how, how._replace(recomputed=("Linear", "Dropout")))
    )
    undropped = expect(how._replace(network="dense"), ranks=1, cuts=CUTS["1f1b"]).weights
    for one, other in zip(once, again, strict=True):
        assert all(torch.equal(value, other.weights[name]) for name, value in one.weights.items())
        assert not any(torch.allclose(value, undropped[name], atol=1e-2) for name, value in one.weights.items())

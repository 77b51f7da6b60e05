"""How far apart two trainings are and may be, and what is recorded of tensors to compare them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.internals import moments, move_weights, sketch, switch_off_dropout, tensor_difference, tolerance


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_differences_are_shares_of_the_size() -> None:
    one = torch.tensor([3.0, 4.0])
    zeros = torch.zeros(2)
    pairs = [(one, one), (one, 2 * one), (one, None), (None, zeros), (zeros, zeros)]
    assert [tensor_difference(*pair) for pair in pairs] == [0.0, 0.5, 1.0, 0.0, 0.0]


def test_the_tolerance_lies_between_rounding_and_everything() -> None:
    for precision, dtypes, unit in (
        ("32-true", [torch.float32, torch.int64], 2.0**-24),
        ("64-true", [torch.float64], 2.0**-53),
        ("bf16-mixed", [torch.float32], 2.0**-8),
        ("bf16-true", [torch.bfloat16], 2.0**-8),
        ("16-mixed", [torch.float32], 2.0**-11),
    ):
        floor, moved_by = tolerance(precision, dtypes)
        assert unit <= moved_by < floor < 0.02


@pytest.mark.parametrize(
    ("dtype", "value", "step"),
    # The last is of the numbers between 1 and 2, which bfloat16 has only so many of.
    [(torch.float32, 1.0, 2.0**-18), (torch.bfloat16, 1.5, 2.0**-7)],
)
def test_weights_move_by_rounding_without_generators(dtype: torch.dtype, value: float, step: float) -> None:
    model = nn.Linear(20, 20).to(dtype)
    with torch.no_grad():
        model.weight.fill_(value)
    again = copy.deepcopy(model)
    before = torch.get_rng_state()
    for each in (model, again):
        move_weights(each, by=tolerance("32-true", [dtype])[1])
    assert torch.equal(torch.get_rng_state(), before)
    assert set((model.weight.detach().double() - value).flatten().tolist()) == {step, -step}
    assert torch.equal(model.weight, again.weight)


def test_every_dropout_is_switched_off_and_counted() -> None:
    dropouts = [nn.Dropout(0.1), nn.Dropout2d(0.2), nn.AlphaDropout(0.3), nn.Dropout(0.0)]
    attention = nn.MultiheadAttention(4, 2, dropout=0.1)
    recurrent = nn.GRU(2, 2, num_layers=2, dropout=0.1)
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, dropout=0.1)
    model = nn.ModuleList([*dropouts, attention, recurrent, layer])
    # The last layer has three, and that of its attention.
    assert switch_off_dropout(model) == 5 + 4
    assert switch_off_dropout(model) == 0


def test_sketch_distances_approximate_tensor_distances() -> None:
    for size in (5, 300_000):
        one = drawn(size)
        other = drawn(size, seed=1)
        off = float((sketch(one) - sketch(other)).norm())
        assert off == pytest.approx(float((one - other).norm()), rel=0.1)


def test_no_single_or_patterned_change_is_lost() -> None:
    for place in (0, 1, 1023, 1024, 99_999):
        values = torch.zeros(100_000)
        values[place] = 1.0
        assert float(sketch(values).norm()) == 1.0
    for period in (1, 2, 64, 1000, 1024):
        values = torch.where(torch.arange(200_000) // period % 2 == 0, 1.0, -1.0)
        assert float(sketch(values).norm()) == pytest.approx(200_000**0.5, rel=0.1)
    for odd in (torch.tensor([1.0, float("nan"), float("-inf")]), torch.tensor([True]), torch.tensor([1 + 2j])):
        assert torch.isfinite(sketch(odd)).all()
        assert torch.isfinite(moments(odd)).all()


def test_moments_are_those_of_the_parts() -> None:
    whole = drawn(7, 6, 5)
    for dimension in range(3):
        parts = whole.split([1, whole.shape[dimension] - 1], dim=dimension)
        weighted = sum(part.shape[dimension] * moments(part) for part in parts)
        torch.testing.assert_close(weighted / whole.shape[dimension], moments(whole), rtol=1e-12, atol=1e-15)
    norm = nn.BatchNorm1d(5)
    rows = drawn(64, 5)
    one, other = (moments(norm(half)) for half in rows.split(32))
    assert tensor_difference(moments(norm(rows)), (one + other) / 2) > 1e-3

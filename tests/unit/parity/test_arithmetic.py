"""How far apart two trainings are and may be, and the sketches of tensors that are compared."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from framework.parity.comparing import common_factor, row_difference, tensor_difference
from framework.parity.recording import move_weights, switch_off_dropout, weights_shown
from framework.parity.sketch import ROW_BUCKETS, sample_sketches, sketch, sketch_whole, views_by_sample
from framework.parity.tolerance import floor, moved_by, of_gradients, shown_gradient, unit_of


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_differences_are_shares_of_the_size() -> None:
    one, zeros = torch.tensor([3.0, 4.0]), torch.zeros(2)
    pairs = [(one, one), (one, 2 * one), (one, None), (None, zeros), (zeros, zeros), (one, torch.ones(3))]
    assert [tensor_difference(*pair) for pair in pairs] == [0.0, 0.5, 1.0, 0.0, 0.0, float("inf")]
    many = torch.ones(1000, 4)
    other = many.clone()
    other[7] *= 1.5  # a sample far off is not lost among many
    assert row_difference(many, other) == pytest.approx(0.5, rel=1e-3)
    assert row_difference(many, many) == 0.0
    assert row_difference(torch.zeros(2, 3), torch.ones(2, 3)) == pytest.approx(1.0)


def test_a_factor_that_all_gradients_have_in_common() -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    gradients = {"a": a, "b": b, "c": None}
    assert common_factor(gradients, {"a": a / 2, "b": b / 2, "c": None}, tolerance=1e-6) == 0.5
    assert common_factor(gradients, {"a": a / 2, "b": b, "c": None}, tolerance=1e-6) is None
    assert common_factor({"c": None}, {"c": None}, tolerance=1e-6) is None


def test_what_is_allowed_is_more_than_rounding_and_far_less_than_all() -> None:
    assert unit_of("32-true", [torch.float32, torch.int64]) == unit_of("32-true", []) == 2.0**-24
    assert unit_of("64-true", [torch.float64]) == 2.0**-53
    assert unit_of("bf16-mixed", [torch.float32]) == unit_of("bf16-true", [torch.bfloat16]) == 2.0**-8
    assert unit_of("16-mixed", [torch.float32]) == 2.0**-11
    for unit in (2.0**-53, 2.0**-24, 2.0**-11, 2.0**-8):
        assert unit <= moved_by(unit) < floor(unit) < shown_gradient(unit)
        assert of_gradients(unit) * floor(unit) < 0.1


def test_changes_are_weighed_by_how_sure_the_gradients_sign_is() -> None:
    gradient = torch.tensor([1.0, -1.0, 0.01, -0.001, 0.0])
    limit = 0.01 * float(gradient.square().mean().sqrt())
    assert weights_shown(gradient, least=0.01).tolist() == pytest.approx([1.0, 1.0, 0.01 / limit - 1, 0.0, 0.0])
    assert weights_shown(torch.zeros(3), least=0.01).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("dtype", "value", "step"),
    # The last is of the numbers between 1 and 2, which bfloat16 has only so many of.
    [(torch.float64, 1.0, 2.0**-47), (torch.float32, 1.0, 2.0**-18), (torch.bfloat16, 1.5, 2.0**-7)],
)
def test_weights_are_moved_by_rounding_and_no_generator_moves(dtype: torch.dtype, value: float, step: float) -> None:
    model = nn.Linear(20, 20).to(dtype)
    with torch.no_grad():
        model.weight.fill_(value)
    again, before = copy.deepcopy(model), torch.get_rng_state()
    for each in (model, again):
        move_weights(each, by=moved_by(unit_of("32-true", [dtype])))
    assert torch.equal(torch.get_rng_state(), before)
    assert set((model.weight.detach().double() - value).flatten().tolist()) == {step, -step}
    assert torch.equal(model.weight, again.weight)


def test_every_dropout_of_torch_is_switched_off_and_counted() -> None:
    dropouts = [nn.Dropout(0.1), nn.Dropout2d(0.2), nn.AlphaDropout(0.3), nn.Dropout(0.0)]
    attention, recurrent = nn.MultiheadAttention(4, 2, dropout=0.1), nn.GRU(2, 2, num_layers=2, dropout=0.1)
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, dropout=0.1)
    model = nn.ModuleList([*dropouts, attention, recurrent, layer])
    assert switch_off_dropout(model) == 5 + 4  # three and the attention's in the last
    assert switch_off_dropout(model) == 0


# Sketches


def test_the_distance_of_sketches_is_about_that_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.equal(sketch(drawn(3, 5), buckets=5), drawn(3, 5).double())
    one, other = drawn(300_000), drawn(300_000, seed=1)
    sketches = sketch_whole(one), sketch_whole(other)
    assert float((sketches[0] - sketches[1]).norm()) == pytest.approx(float((one - other).norm()), rel=0.1)
    monkeypatch.setattr("framework.parity.sketch._PIECE", 10_000)  # and in pieces it is the same
    torch.testing.assert_close(sketch_whole(one), sketches[0], rtol=0, atol=1e-9)


def test_no_value_is_lost_alone_or_in_a_pattern() -> None:
    for place in (0, 1, 1023, 1024, 99_999):
        values = torch.zeros(100_000)
        values[place] = 1.0
        assert float(sketch_whole(values).norm()) == 1.0
    for period in (1, 2, 64, 1000, 1024):
        values = torch.where(torch.arange(200_000) // period % 2 == 0, 1.0, -1.0)
        assert float(sketch_whole(values).norm()) == pytest.approx(200_000**0.5, rel=0.1)
    for odd in (torch.tensor([1.0, float("nan"), float("-inf")]), torch.tensor([True]), torch.tensor([1 + 2j])):
        assert torch.isfinite(sketch_whole(odd)).all()


def read(tensor: Tensor, *, samples: int) -> dict[str, Tensor]:
    return views_by_sample(sample_sketches(tensor), tensor.shape, num_samples=samples)


@pytest.mark.parametrize(
    ("shape", "dimension", "name"),
    [
        ((6,), 0, "first 1 1"),
        ((6, 3, 9, 9), 0, "first 1 243"),
        ((7, 6, 5), 1, "second 7 5"),
        ((6, 4, 10), 0, "first 4 10"),  # several rows for each sample, sample by sample
        ((6, 4, 10), 0, "first, turned 4 10"),  # or place by place
    ],
)
def test_the_parts_of_two_ranks_make_the_whole_sample_by_sample(
    shape: tuple[int, ...], dimension: int, name: str
) -> None:
    def given(tensor: Tensor) -> Tensor:
        if " 4 " not in name:
            return tensor
        return (tensor.transpose(0, 1) if "turned" in name else tensor).reshape(-1, 10)

    whole = drawn(*shape)
    parts = [read(given(part), samples=3)[name] for part in whole.split(3, dim=dimension)]
    view = read(given(whole), samples=6)[name]
    torch.testing.assert_close(view, torch.cat(parts))
    assert view.shape[1] <= ROW_BUCKETS


def test_a_tensor_without_samples_is_read_differently_for_other_numbers_of_them() -> None:
    weight = drawn(8, 8)
    assert not read(weight, samples=8).keys() & read(weight, samples=4).keys()
    assert read(torch.ones(()), samples=4) == read(torch.ones(0, 3), samples=4) == {}

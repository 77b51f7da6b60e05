from __future__ import annotations

import pytest
import torch
from torch import Tensor

from framework.parity.sketch import (
    ROW_BUCKETS,
    TENSOR_BUCKETS,
    sample_sketches,
    sketch,
    sketch_whole,
    tensors_in,
    views_by_sample,
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_what_is_no_longer_than_the_buckets_stays_as_it_is() -> None:
    rows = drawn(3, 5)
    assert torch.equal(sketch(rows, buckets=5), rows.double())


def test_the_distance_of_sketches_is_about_that_of_tensors() -> None:
    one, other = drawn(300_000), drawn(300_000, seed=1)
    exact = float((one - other).norm())
    assert float((sketch_whole(one) - sketch_whole(other)).norm()) == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("place", [0, 1, 1023, 1024, 77_777, 99_999])
def test_no_single_value_is_lost(place: int) -> None:
    values = torch.zeros(100_000)
    values[place] = 1.0
    assert float(sketch_whole(values).norm()) == 1.0


@pytest.mark.parametrize("period", [1, 2, 64, 1000, 1024])
def test_values_in_a_pattern_do_not_cancel(period: int) -> None:
    values = torch.where(torch.arange(200_000) // period % 2 == 0, 1.0, -1.0)
    assert float(sketch_whole(values).norm()) == pytest.approx(200_000**0.5, rel=0.1)


def test_pieces_make_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = drawn(4, 10_007)
    whole = sketch(rows, buckets=64)
    monkeypatch.setattr("framework.parity.sketch._PIECE", 1000)
    torch.testing.assert_close(sketch(rows, buckets=64), whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.0, float("nan"), float("-inf")]),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.ones(()),
    ],
    ids=str,
)
def test_all_kinds_of_values_have_one(tensor: Tensor) -> None:
    assert torch.isfinite(sketch_whole(tensor)).all()


def test_no_generator_moves(own_state: None) -> None:
    before = torch.get_rng_state()
    sketch_whole(drawn(5000))
    assert torch.equal(torch.get_rng_state(), before)


# By sample


def read(tensor: Tensor, *, samples: int) -> dict[str, Tensor]:
    return views_by_sample(sample_sketches(tensor), tensor.shape, num_samples=samples)


@pytest.mark.parametrize("shape", [(6,), (6, 5), (6, 3, 9, 9), (6, 200)])
def test_the_first_dimension_is_the_samples(shape: tuple[int, ...]) -> None:
    tensor = drawn(*shape)
    views = read(tensor, samples=6)
    parts = [read(part, samples=3) for part in tensor.split(3)]
    (name,) = (name for name in views if name.startswith("first 1 "))
    torch.testing.assert_close(views[name], torch.cat([part[name] for part in parts]))


@pytest.mark.parametrize("turned", [False, True])
def test_several_rows_for_each_sample_are_read_both_ways(turned: bool) -> None:
    by_sample = drawn(6, 4, 10)  # six samples of four places
    halves = by_sample.split(3)

    def flat(tensor: Tensor) -> Tensor:
        return (tensor.transpose(0, 1) if turned else tensor).reshape(-1, 10)

    name = f"first{', turned' if turned else ''} 4 10"
    parts = [read(flat(half), samples=3)[name] for half in halves]
    torch.testing.assert_close(read(flat(by_sample), samples=6)[name], torch.cat(parts))


def test_the_second_dimension_may_be_the_samples() -> None:
    tensor = drawn(7, 6, 5)
    parts = [read(part, samples=2)["second 7 5"] for part in tensor.split(2, dim=1)]
    torch.testing.assert_close(read(tensor, samples=6)["second 7 5"], torch.cat(parts))


def test_a_tensor_without_samples_is_read_differently_for_other_numbers_of_them() -> None:
    weight = drawn(8, 8)
    assert not read(weight, samples=8).keys() & read(weight, samples=4).keys()
    assert read(torch.ones(()), samples=4) == {}
    assert read(torch.ones(0, 3), samples=4) == {}


def test_a_view_is_small() -> None:
    views = read(drawn(4, 50, 300), samples=4)
    assert {view.shape for view in views.values()} == {(4, ROW_BUCKETS)}
    assert sketch_whole(drawn(10_000)).shape == (TENSOR_BUCKETS,)


def test_tensors_are_found_in_any_nesting() -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    assert list(tensors_in({"a": one, "b": ([two, "text"], None, {"c": three})})) == [one, two, three]

"""When two computations count as the same."""

from __future__ import annotations

import math

import pytest
import torch

from framework.agreement import TOLERANCES, Agreement, agreement, worst
from framework.errors import RunError


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_results_agree_up_to_the_tolerance_of_their_type(dtype):
    wide = torch.full((3,), 8.0, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    near, far = ((wide * (1 + share * TOLERANCES[dtype])).to(dtype) for share in (0.5, 3.0))
    assert 0 < agreement([wide.to(dtype)], [near]).difference <= TOLERANCES[dtype]
    with pytest.raises(RunError, match=r"Output 0 of the file .* differs from the model's by .* is allowed"):
        agreement([wide.to(dtype)], [far])


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_a_difference_is_a_share_of_the_largest_value(scale):
    wanted = torch.tensor([1.0, 0.0]) * scale
    assert agreement([wanted], [wanted + scale * 1e-5]).difference == pytest.approx(1e-5, rel=0.1)
    with pytest.raises(RunError):
        agreement([wanted], [wanted + scale * 1e-3])


def test_values_that_are_not_finite_agree_only_with_themselves():
    inf, nan = math.inf, math.nan
    wanted = torch.tensor([1.0, inf, -inf, nan])
    for same in (wanted, torch.full((2,), nan), torch.zeros(0, 3)):
        assert agreement([same], [same.clone()]).difference == 0
    for other in ([1.0, inf, inf, nan], [1.0, nan, -inf, nan], [1.0, 5.0, -inf, nan], [nan, inf, -inf, nan]):
        with pytest.raises(RunError, match="differs from the model's by inf"):
            agreement([wanted], [torch.tensor(other)])


@pytest.mark.parametrize(
    ("wanted", "found", "said"),
    [
        ([torch.zeros(3)], [], "The model gives 1 tensors, the file 0"),
        ([torch.zeros(3)], [torch.zeros(3, 1)], r"float32 of shape \(3,\) .* float32 of shape \(3, 1\)"),
        ([torch.zeros(3)], [torch.zeros(3, dtype=torch.float64)], r"float64 of shape \(3,\)"),
        ([torch.tensor([1, 2])], [torch.tensor([1, 3])], "differs"),
        ([], [], "nothing to export"),
    ],
)
def test_another_kind_of_output_is_refused(wanted, found, said):
    with pytest.raises(RunError, match=said):
        agreement(wanted, found)


def test_the_worst_is_the_one_nearest_to_its_limit():
    short, long = Agreement(1e-3, torch.bfloat16), Agreement(5e-5, torch.float32)
    assert worst([short, Agreement(0.0, torch.int64), long]) is long
    assert str(long) == "greatest difference 5.0e-05 of the largest value (float32; allowed: 1e-04)"
    assert str(Agreement(0.0, torch.float32)) == "no difference (float32)"
    assert str(agreement([torch.tensor([1, 2])], [torch.tensor([1, 2])])) == "equal (int64)"

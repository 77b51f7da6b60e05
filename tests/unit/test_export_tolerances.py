"""When an exported graph counts as the same as the model."""

from __future__ import annotations

import math

import pytest
import torch

from tests.helpers.internals import TOLERANCES, check_close


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_outputs_agree_relative_to_the_largest_value(dtype):
    wide = torch.tensor([8.0, 0.0]).to(torch.complex128 if dtype.is_complex else torch.float64)
    wanted = wide.to(dtype)
    check_close([wanted], [(wide + 8 * 0.5 * TOLERANCES[dtype]).to(dtype)])
    with pytest.raises(AssertionError, match=r"Output 0: .*not close"):
        check_close([wanted], [(wide + 8 * 3 * TOLERANCES[dtype]).to(dtype)])


def test_non_finite_values_agree_with_themselves_only():
    inf = math.inf
    nan = math.nan
    wanted = torch.tensor([1.0, inf, -inf, nan])
    for same in (wanted, torch.full((2,), nan), torch.zeros(0, 3)):
        check_close([same], [same.clone()])
    for other in ([1.0, inf, inf, nan], [1.0, nan, -inf, nan], [1.0, 5.0, -inf, nan], [nan, inf, -inf, nan]):
        with pytest.raises(AssertionError, match="not close"):
            check_close([wanted], [torch.tensor(other)])


@pytest.mark.parametrize(
    ("wanted", "found", "said"),
    [
        ([torch.zeros(3)], [], "The model returns 1 tensors, the file 0"),
        ([torch.zeros(3)], [torch.zeros(3, 1)], "'shape' do not match"),
        ([torch.zeros(3)], [torch.zeros(3, dtype=torch.float64)], "'dtype' do not match"),
        ([torch.tensor([1, 2])], [torch.tensor([1, 3])], "not equal"),
        ([], [], "nothing to export"),
    ],
)
def test_another_kind_of_output_is_refused(wanted, found, said):
    with pytest.raises(AssertionError, match=said):
        check_close(wanted, found)

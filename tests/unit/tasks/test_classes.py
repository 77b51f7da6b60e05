from __future__ import annotations

import pytest
import torch

from framework.errors import DataError
from framework.tasks import Classes


def test_the_best_class_of_each_sample_and_its_probability() -> None:
    scores = torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0 + torch.log(torch.tensor(2.0)), -100.0]])
    found = Classes()(scores)
    assert found.keys() == {"class", "probability"}
    assert torch.equal(found["class"], torch.tensor([1, 1]))
    torch.testing.assert_close(found["probability"], torch.tensor([0.66524094, 2 / 3]))


def test_half_precision_scores_give_float32_probabilities() -> None:
    scores = torch.randn(50, 10, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = Classes()(scores)
    assert found["probability"].dtype == torch.float32
    torch.testing.assert_close(found["probability"], scores.double().softmax(dim=1).amax(dim=1).float())


@pytest.mark.parametrize("shape", [(3,), (3, 4, 5), ()])
def test_other_shapes_are_refused_with_the_way_out(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"task\.predictions=null") as caught:
        Classes()(torch.zeros(shape))
    assert str(shape) in str(caught.value)

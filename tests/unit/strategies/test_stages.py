"""A model cut into stages: where, what each rank keeps of it, and what can't be cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from framework.distributed.stages import gives_output, layout_of, num_parameters, set_layout
from framework.distributed.tensors import is_model_spread
from framework.errors import ConfigError, FrameworkError, TargetError
from framework.strategies.stages import cut, keep, layout


class Net(nn.Module):
    """Says itself how it is cut: by `way`."""

    def __init__(self, way: Callable[[Net], Sequence[nn.Module]]) -> None:
        super().__init__()
        self.way = way
        self.last, self.first = nn.Linear(3, 1), nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)

    def stages(self, number: int) -> Sequence[nn.Module]:
        return self.way(self)


def sizes(stages: Sequence[nn.Module]) -> list[int]:
    return [sum(each.numel() for each in stage.parameters()) for stage in stages]


@pytest.mark.parametrize(
    ("widths", "number", "wanted"),
    [((1, 1, 1, 1), 2, [2, 2]), ((6, 1, 1, 1), 2, [6, 3]), ((1, 1, 5, 1, 1), 3, [2, 5, 2]), ((2, 3), 1, [5])],
)
def test_a_sequential_is_cut_where_the_largest_stage_is_smallest(
    widths: tuple[int, ...], number: int, wanted: list[int]
) -> None:
    model = nn.Sequential(*(nn.Linear(1, width, bias=False) for width in widths), nn.ReLU())
    stages = cut(model, number)
    assert sizes(stages) == wanted
    assert [child for stage in stages for child in stage.children()] == list(model)


def test_each_stage_of_a_sequential_has_something_to_train() -> None:
    frozen = nn.Linear(9, 9).requires_grad_(False)
    model = nn.Sequential(frozen, nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    assert [[type(each).__name__ for each in stage.children()] for stage in cut(model, 2)] == [
        ["Linear", "Linear"],
        ["ReLU", "Linear"],
    ]
    with pytest.raises(ConfigError, match=r"with 2 trained modules can't be cut into 3 stages"):
        cut(model, 3)


def test_a_rank_keeps_its_stages_by_the_names_of_the_whole() -> None:
    model = Net(lambda net: [nn.Sequential(net.first, net.norm, nn.ReLU()), net.last])
    names, total = frozenset(model.state_dict()), num_parameters(model)
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    stages = cut(model, 2)
    known = layout(model, stages, [0], writes=True)
    assert gives_output(model)
    assert not is_model_spread(model)
    keep(model, stages[:1])
    set_layout(model, known)
    assert known.names == names
    assert known.parameters == ("last.weight", "last.bias", "first.weight", "first.bias", "norm.weight", "norm.bias")
    assert known.written == model.state_dict().keys() == names - {"last.weight", "last.bias"}
    assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())
    assert (layout_of(model), is_model_spread(model), gives_output(model)) == (known, True, False)
    assert num_parameters(model) == total > sum(each.numel() for each in model.parameters())
    assert stages[0](torch.ones(2, 2)).shape == (2, 3)


def test_stages_take_their_own_weights_in_and_nothing_else_is_missed() -> None:
    """BatchNorm adds a count to weights of before there was one; where it has been left to another rank, it doesn't."""
    model, other = (Net(lambda net: [nn.Sequential(net.first, net.norm), net.last]) for _ in range(2))
    keep(model, cut(model, 2)[1:])
    given = {name: other.state_dict()[name] for name in model.state_dict()}
    model.load_state_dict(given)
    assert given.keys() == {"last.weight", "last.bias"}
    assert torch.equal(model.last.weight, other.last.weight)


def test_what_several_stages_have_is_written_with_the_first() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Module()
            self.table.register_buffer("scale", torch.ones(1))
            self.one, self.two = nn.Linear(1, 1), nn.Linear(1, 1)

        def stages(self, number: int) -> list[nn.Module]:
            return [nn.ModuleList([self.table, self.one]), nn.ModuleList([self.table, self.two])]

    model = Scaled()
    stages = cut(model, 2)
    written = [layout(model, stages, [index], writes=True).written for index in range(2)]
    assert written == [{"table.scale", "one.weight", "one.bias"}, {"two.weight", "two.bias"}]
    assert layout(model, stages, [0], writes=False).written == frozenset()


class Own(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.table = inner, nn.Buffer(torch.ones(1))


def tied(net: Net) -> list[nn.Module]:
    return [nn.Sequential(net.first, net.norm, net.last), net.last]


@pytest.mark.parametrize(
    ("way", "kind", "said"),
    [
        (lambda net: [net.first], TargetError, r"Net\.stages\(2\) must give 2 modules, and gave 1: Linear"),
        (lambda net: [net.first, "last"], TargetError, r"gave 2: Linear, str"),
        (lambda net: [net.first, net.last], TargetError, r"No stage of Net has norm\.weight, norm\.bias, norm\.runn"),
        (tied, ConfigError, r"share parameters.*: last\.weight in 0, 1; last\.bias in 0, 1"),
        (lambda net: [nn.ReLU(), nn.Sequential(net.first, net.norm, net.last)], ConfigError, "no parameter to train"),
        (lambda net: [nn.Sequential(net.first, net.norm), nn.Linear(3, 1)], TargetError, "aren't the model's own"),
        (lambda net: [Own(nn.Sequential(net.first, net.norm)), net.last], TargetError, "aren't the model's own"),
    ],
)
def test_what_cannot_be_cut_is_told(way: Callable[[Net], list[nn.Module]], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        cut(Net(way), 2)


def test_a_model_that_says_nothing_of_stages_is_refused() -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList([nn.Linear(1, 1)])  # a module of that name is no method

    with pytest.raises(TargetError, match=r"can't cut Holds into 2 stages.*no method `stages`"):
        cut(Holds(), 2)


def test_a_state_that_is_no_tensor_is_refused() -> None:
    class Counts(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"seen": 1}

        def set_extra_state(self, state: object) -> None:
            raise AssertionError

        def forward(self, input: Tensor) -> Tensor:
            return input

    with pytest.raises(FrameworkError, match=r"something else: 0\._extra_state"):
        cut(nn.Sequential(Counts(1, 1), nn.Linear(1, 1)), 2)

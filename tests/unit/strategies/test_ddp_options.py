"""What DDP is told beyond torch's own keywords: hooks, BatchNorm over all ranks; and whom it names in a failure."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework.distributed.context import Context
from framework.errors import ConfigError, TopologyError
from framework.launch.warm import WarmServer
from framework.strategies import DDP, auto
from framework.topology import Topology
from tests.helpers.ranks import left_by_ranks
from tests.unit.simulated_ranks import cpu_context

pytestmark = pytest.mark.usefixtures("group", "own_state")


def gpus(*, span: int = 1) -> Context:
    return Context(Topology(1, 1, span, span), 0, 0, 0, tuple(torch.device("cuda", n) for n in range(span)), "nccl")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp16", torch.float16), ("bf16", torch.bfloat16), ("butterfly", torch.float32), (None, torch.float32)],
)
def test_a_hook_sends_gradients_in_its_own_type(name: str | None, dtype: torch.dtype) -> None:
    strategy, model = DDP(context=cpu_context(), comm_hook=name), nn.Linear(3, 2)
    wrapped = strategy.wrap(model)
    inputs = torch.randn(5, 3)
    for _ in range(3):  # buckets are laid out anew after the first
        model.zero_grad()
        expected = torch.autograd.grad(model(inputs).square().mean(), model.weight)[0]
        with strategy.accumulate(wrapped, synchronise=True):
            wrapped(inputs).square().mean().backward()
        assert model.weight.grad is not None
        assert torch.equal(model.weight.grad, expected.to(dtype).float())
        assert torch.equal(model.weight.grad, expected) == (dtype is torch.float32)


def test_a_hook_that_is_none_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"comm_hook=fp8: there is none\. Use one of fp16, bf16, butterfly, powersgd, or null"
    ):
        auto(context=replace(cpu_context(), topology=Topology(1, 2, 0, 1)), comm_hook="fp8")


@pytest.mark.parametrize(
    ("comm_hook", "more", "message"),
    [
        ({"powersgd": {"rank": 2}}, {}, r"powersgd has no option rank\. It takes matrix_approximation_rank, start_"),
        ({"powersgd": {"start_powerSGD_iter": 1}}, {}, r"start_powerSGD_iter=1 must be 2 or more"),
        ({"powersgd": {"start_powerSGD_iter": 2}}, {"static_graph": True}, r"start_powerSGD_iter=2 must be 3 or more"),
        ({"fp16": {"rank": 2}}, {}, r"only powersgd has options"),
    ],
)
def test_options_of_a_hook_that_cannot_be_are_refused(comm_hook: Any, more: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DDP(context=cpu_context(), comm_hook=comm_hook, **more)


def test_thin_matrices_are_refused_for_several_devices() -> None:
    with pytest.raises(TopologyError, match=r"powersgd is for processes of one device each, and these have 2"):
        DDP(context=gpus(span=2), comm_hook="powersgd")


THIN = {"start_powerSGD_iter": 2, "min_compression_rate": 1}


class Thin:
    """Three layers of 1.4 MB in several buckets."""

    def __init__(self, *, cap_mb: float = 1) -> None:
        self.strategy = DDP(context=cpu_context(), comm_hook={"powersgd": THIN}, bucket_cap_mb=cap_mb)
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(600, 600, bias=False) for _ in range(3)))
        self.wrapped = self.strategy.wrap(self.model)

    def step(self, number: int) -> list[Tensor]:
        inputs = torch.randn(4, 600, generator=torch.Generator().manual_seed(number))
        self.model.zero_grad()
        with self.strategy.accumulate(self.wrapped, synchronise=True):
            self.wrapped(inputs).square().mean().backward()
        return [each.grad.clone() for each in self.model.parameters() if each.grad is not None]


def test_what_thin_matrices_left_out_is_kept_and_brought_back() -> None:
    one = Thin()
    for number in range(4):
        one.step(number)
    saved = copy.deepcopy(one.strategy.state_dict(one.wrapped))
    (errors,) = saved["powersgd"]["errors"]
    assert len(errors) > 1
    assert all(error.abs().max() > 0 for error in errors.values())
    wanted = [one.step(number) for number in (4, 5)]

    def after(change: dict[str, Any], **how: Any) -> list[list[Tensor]]:
        other = Thin(**how)
        state = copy.deepcopy(saved)
        state["powersgd"] |= change
        other.strategy.load_state_dict(other.wrapped, state)
        return [other.step(number) for number in (4, 5)]

    def same(one: list[list[Tensor]], other: list[list[Tensor]]) -> list[bool]:
        return [all(map(torch.equal, *pair)) for pair in zip(one, other, strict=True)]

    assert same(after({}), wanted) == [True, True]
    # Of two ranks, whose mean is this rank's.
    halves = [{index: share * error for index, error in errors.items()} for share in (0.5, 1.5)]
    assert same(after({"errors": halves}), wanted) == [True, True]
    assert same(after({"errors": [{index: 0 * error for index, error in errors.items()}]}), wanted) == [False, False]
    assert same(after({}, cap_mb=25), wanted) == [False, False]  # begun anew: the buckets are others


@pytest.mark.multiproc
def test_thin_matrices_of_several_buckets_do_not_wait_for_each_other(warm: WarmServer, tmp_path: Path) -> None:
    """As they would with torch's hook alone, in gloo's two threads."""
    entry = "tests.multiproc.strategy_entries:thin_matrices_in_buckets"
    (first, *counts), others = left_by_ranks(entry, procs=2, warm=warm, folder=tmp_path)
    assert first > 2
    assert counts == [first]
    assert others == []


class Choosing(nn.Module):
    """Trains one of two layers; a frozen parameter stands before both."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.left, self.right = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: Tensor, *, takes_left: bool) -> Tensor:
        result: Tensor = (self.left if takes_left else self.right)(x * self.frozen)
        return result


@pytest.mark.parametrize("synchronise", [True, False])
def test_parameters_without_a_gradient_are_named_in_the_next_step(synchronise: bool) -> None:
    strategy = DDP(context=cpu_context())
    wrapped = strategy.wrap(Choosing())
    with strategy.accumulate(wrapped, synchronise=True):
        wrapped(torch.ones(2, 2), takes_left=True).sum().backward()
    with (
        pytest.raises(
            ConfigError, match=r"2 of 4 had none: right\.weight, right\.bias\.\n.*find_unused_parameters=true"
        ),
        strategy.accumulate(wrapped, synchronise=synchronise),
    ):
        wrapped(torch.ones(2, 2), takes_left=True)


def test_other_failures_pass_as_they_are() -> None:
    strategy = DDP(context=cpu_context())
    wrapped = strategy.wrap(Choosing())
    with pytest.raises(RuntimeError, match="mat1 and mat2"), strategy.accumulate(wrapped, synchronise=True):
        wrapped(torch.ones(2, 3), takes_left=True)
    own = RuntimeError("of the model")
    with pytest.raises(RuntimeError) as raised, strategy.accumulate(wrapped, synchronise=False):
        raise own
    assert raised.value is own


def test_with_the_setting_that_is_named_it_trains() -> None:
    strategy, model = DDP(context=cpu_context(), find_unused_parameters=True), Choosing()
    wrapped = strategy.wrap(model)
    for takes_left in (True, False, True):
        model.zero_grad()
        with strategy.accumulate(wrapped, synchronise=True):
            wrapped(torch.ones(2, 2), takes_left=takes_left).sum().backward()
        assert (model.left.weight.grad is None, model.right.weight.grad is None) == (not takes_left, takes_left)


def test_batch_norm_over_all_ranks_keeps_names_and_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr("framework.strategies.ddp.DistributedDataParallel", lambda model, **_: given.append(model))
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    parameters, names = list(model.parameters()), list(model.state_dict())
    DDP(context=gpus(), sync_batchnorm=True, find_unused_parameters=True).wrap(model)
    (converted,) = given
    assert isinstance(converted[1], nn.SyncBatchNorm)
    assert list(converted.state_dict()) == names
    assert all(one is other for one, other in zip(converted.parameters(), parameters, strict=True))


def test_batch_norm_over_all_ranks_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"sync_batchnorm=true needs GPUs: .*\nUse strategy\.sync_batchnorm=false"):
        DDP(context=cpu_context(), sync_batchnorm=True)
    with pytest.raises(TopologyError, match=r"one GPU each, and these have 2\.\nUse topology\.gpus_per_process=1"):
        DDP(context=gpus(span=2), sync_batchnorm=True)
    with pytest.raises(ConfigError, match="Linear has no BatchNorm"):
        DDP(context=gpus(), sync_batchnorm=True).wrap(nn.Linear(1, 1))


def test_a_second_copy_of_gradients_is_told() -> None:
    assert [DDP(context=cpu_context(), gradient_as_bucket_view=view).copies_gradients for view in (True, False)] == [
        False,
        True,
    ]

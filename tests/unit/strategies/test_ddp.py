"""strategy=ddp: what is made of its options, which parameters it names, and what a resumed run gets back.

The order of gradients that it gets back is tested in tests/parity/test_exact_resume.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from framework.errors import ConfigError
from framework.strategies import DDP, Single, auto
from tests.helpers.contexts import cpu_context
from tests.helpers.internals import Context, Topology, ddp_module, gather_to_all
from tests.helpers.rank_pool import RankPool

pytestmark = pytest.mark.usefixtures("own_state")


def test_auto_is_single_or_ddp() -> None:
    assert isinstance(auto(context=cpu_context()), Single)
    assert isinstance(auto(context=cpu_context(world_size=2), static_graph=True), DDP)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What DistributedDataParallel was made with."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(ddp_module, "DistributedDataParallel", lambda model, **how: found.update(how, model=model))
    return found


def on_gpus(*indices: int) -> Context:
    devices = tuple(torch.device("cuda", index) for index in indices)
    return Context(Topology(1, 1, 4, len(devices)), 0, 0, 0, devices, "nccl")


@pytest.mark.parametrize(
    ("context", "device_ids"),
    [(cpu_context(world_size=2), None), (on_gpus(3), [3]), (on_gpus(2, 3), None)],
    ids=["cpu", "gpu", "gpus"],
)
def test_options_and_device_ids_reach_torch(
    given: dict[str, Any], context: Context, device_ids: list[int] | None
) -> None:
    options: dict[str, Any] = {"find_unused_parameters": True, "gradient_as_bucket_view": False, "bucket_cap_mb": 3}
    DDP(context=context, broadcast_buffers=False, **options).wrap(nn.Linear(3, 2))
    assert {name: given[name] for name in (*options, "device_ids")} == options | {"device_ids": device_ids}
    assert False in (given.get("broadcast_buffers"), given.get("forward_sync_buffers"))


def test_sync_batch_norm_keeps_names_and_parameters(given: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    parameters = list(model.parameters())
    names = list(model.state_dict())
    DDP(context=on_gpus(0), sync_batchnorm=True, find_unused_parameters=True).wrap(model)
    assert isinstance(given["model"][1], nn.SyncBatchNorm)
    assert list(given["model"].state_dict()) == names
    assert all(one is other for one, other in zip(given["model"].parameters(), parameters, strict=True))


def compare_buckets(context: Context) -> None:
    layers = nn.Sequential(*(nn.Linear(300, 300) for _ in range(6)))
    ours: Any = DDP(context=context).wrap(copy.deepcopy(layers))
    bucket_sizes = []
    for wrapped in (ours, DistributedDataParallel(layers)):
        wrapped._set_ddp_runtime_logging_sample_rate(1)
        for _ in range(3):
            wrapped(torch.ones(1, 300)).sum().backward()
        bucket_sizes.append(wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"])
    assert bucket_sizes[0] == bucket_sizes[1]
    # Gradients of 2.2 MB: the exchange begins before the backward has ended.
    assert len(bucket_sizes[0].split(", ")) == 2


@pytest.mark.multiproc
def test_buckets_are_those_of_torch(rank_pool: RankPool) -> None:
    rank_pool.run(compare_buckets, ranks=2)


class Choosing(nn.Module):
    """Trains one of two layers; a frozen parameter stands before both."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.left = nn.Linear(2, 1)
        self.right = nn.Linear(2, 1)

    def forward(self, x: Tensor, *, takes_left: bool) -> Tensor:
        result: Tensor = (self.left if takes_left else self.right)(x * self.frozen)
        return result


def leave_out_a_layer(context: Context) -> None:
    for synchronise in (True, False):
        strategy = DDP(context=context)
        wrapped = strategy.wrap(Choosing())
        with strategy.accumulate(wrapped, synchronise=True):
            wrapped(torch.ones(2, 2), takes_left=True).sum().backward()
        message = r"2 of 4 had none: right\.weight, right\.bias\.\n.*find_unused_parameters=true"
        with pytest.raises(ConfigError, match=message), strategy.accumulate(wrapped, synchronise=synchronise):
            wrapped(torch.ones(2, 2), takes_left=True)
    strategy = DDP(context=context, find_unused_parameters=True)
    model = Choosing()
    wrapped = strategy.wrap(model)
    for takes_left in (True, False, True):
        model.zero_grad()
        with strategy.accumulate(wrapped, synchronise=True):
            wrapped(torch.ones(2, 2), takes_left=takes_left).sum().backward()
        assert (model.left.weight.grad is None, model.right.weight.grad is None) == (not takes_left, takes_left)
    with pytest.raises(RuntimeError, match="mat1 and mat2"), strategy.accumulate(wrapped, synchronise=True):
        wrapped(torch.ones(2, 3), takes_left=True)


@pytest.mark.multiproc
def test_parameters_without_gradients_are_named_later(rank_pool: RankPool) -> None:
    """With the named setting the model trains. Other errors are passed on unchanged."""
    rank_pool.run(leave_out_a_layer, ranks=2)


THIN = {"start_powerSGD_iter": 2, "min_compression_rate": 1}


class Thin:
    """Three layers in several buckets, whose gradients are exchanged as thin matrices."""

    def __init__(self, context: Context, *, cap_mb: float = 0.1) -> None:
        self.context = context
        self.strategy = DDP(context=context, comm_hook={"powersgd": THIN}, bucket_cap_mb=cap_mb)
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(200, 200, bias=False) for _ in range(3)))
        self.wrapped = self.strategy.wrap(self.model)

    def steps(self, *numbers: int) -> list[Tensor]:
        for number in numbers:
            seed = 10 * number + self.context.rank
            inputs = torch.randn(4, 200, generator=torch.Generator().manual_seed(seed))
            self.model.zero_grad()
            with self.strategy.accumulate(self.wrapped, synchronise=True):
                self.wrapped(inputs).square().mean().backward()
        return [each.grad.clone() for each in self.model.parameters() if each.grad is not None]


def bring_back_errors(context: Context) -> list[bool]:
    """Return if gradients equal those without a stop: with all state, without errors, with other buckets or ranks."""
    one = Thin(context)
    one.steps(0, 1, 2, 3)
    # The state of rank 0 is saved.
    (saved, *_) = gather_to_all(copy.deepcopy(one.strategy.state_dict(one.wrapped)), context)
    errors = saved["powersgd"]["errors"]
    assert len(errors) == context.world_size
    assert len(errors[0]) > 1
    wanted = one.steps(4, 5)
    ends = []
    nothing = [{index: 0 * error for index, error in each.items()} for each in errors]
    changes: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"errors": nothing}, {}),
        ({}, {"cap_mb": 25}),
        ({"errors": errors[:1]}, {}),
    ]
    for change, how in changes:
        other = Thin(context, **how)
        state = copy.deepcopy(saved)
        state["powersgd"] |= change
        other.strategy.load_state_dict(other.wrapped, state)
        ends.append(all(map(torch.equal, other.steps(4, 5), wanted)))
    return ends


@pytest.mark.multiproc
def test_thin_matrix_errors_are_fed_back(rank_pool: RankPool) -> None:
    assert rank_pool.run(bring_back_errors, ranks=2) == [[True, False, False, False]] * 2


def resume_with_device_ids(context: Context) -> tuple[list[str], list[str]]:
    """Return the order of gradients that was saved, and the one after loading it into a replica with `device_ids`.

    With them DDP moves the arguments of each call to the device, as it does for every replica on a single GPU.
    """
    order = ["weight", "bias"]
    strategy = DDP(context=context)
    model = strategy.wrap(nn.Linear(3, 2))
    assert isinstance(model, DistributedDataParallel)
    model.device_ids = [0]
    strategy.load_state_dict(model, {"gradient_order": order, "exchanges": 1})
    return order, strategy.state_dict(model)["gradient_order"]


@pytest.mark.multiproc
def test_a_replica_on_one_device_gets_its_order_back(rank_pool: RankPool) -> None:
    for saved, loaded in rank_pool.run(resume_with_device_ids, ranks=2):
        assert loaded == saved

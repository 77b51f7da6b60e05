"""strategy=allreduce and strategy=butterfly: what they refuse, and what two and three ranks have after a backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from framework.errors import ConfigError
from framework.launch.warm import WarmServer
from framework.strategies import DDP, FSDP, AllReduce, Butterfly, LocalSGD, Pipeline
from framework.strategies.buckets import Bucket, by_kind
from framework.types import Strategy
from tests.helpers.ranks import left_by_ranks
from tests.unit.simulated_ranks import cpu_context

Run = Callable[..., list[Any]]


@pytest.fixture
def run(warm: WarmServer, tmp_path: Path) -> Run:
    """Runs an entry on `procs` ranks; gives what each left."""

    def call(entry: str, *, procs: int) -> list[Any]:
        return left_by_ranks(f"tests.multiproc.strategy_entries:{entry}", procs=procs, warm=warm, folder=tmp_path)

    return call


def test_alone_nothing_is_exchanged_and_no_group_is_needed() -> None:
    strategy, model = AllReduce(context=cpu_context()), nn.BatchNorm1d(2)
    assert strategy.unwrap(strategy.wrap(model)) is model
    strategy.before_evaluation(model)
    assert strategy.accumulate(model, synchronise=True) is strategy.accumulate(model, synchronise=False)


@pytest.mark.parametrize(("make", "name"), [(AllReduce, "allreduce"), (Butterfly, "butterfly")])
def test_what_cannot_be_is_refused(make: type[AllReduce | Butterfly], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"strategy={name} averages gradients, but no parameter of Linear"):
        make(context=cpu_context()).wrap(nn.Linear(1, 1).requires_grad_(False))
    for wrong in (-1, float("nan")):
        with pytest.raises(ConfigError, match=r"strategy\.bucket_cap_mb=.* must be 0"):
            make(context=cpu_context(), bucket_cap_mb=wrong)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("allreduce", AllReduce),
        ("butterfly", Butterfly),
        ("local_sgd", partial(LocalSGD, warmup_steps=1)),
        ("pipeline", partial(Pipeline, num_stages=2)),
        ("fsdp", FSDP),
        ("ddp with comm_hook=butterfly", partial(DDP, comm_hook="butterfly")),
        ("ddp with comm_hook=powersgd", partial(DDP, comm_hook="powersgd")),
    ],
)
def test_an_embedding_that_says_it_makes_sparse_gradients_is_refused_before_a_step(
    name: str, make: Callable[..., Strategy]
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Embedding(4, 2, sparse=True))
    with pytest.raises(ConfigError, match=rf"strategy={name} .* there is a sparse one: 1\.weight\.\nMake it dense"):
        make(context=cpu_context(world_size=4)).wrap(model)


def test_tensors_are_laid_together_by_type_and_size() -> None:
    sizes = [(torch.float32, 3), (torch.float64, 1), (torch.float32, 2), (torch.float32, 9), (torch.float32, 1)]
    tensors = [torch.zeros(size, dtype=dtype) for dtype, size in sizes]

    def found(cap_bytes: float) -> list[list[int]]:
        return [[each.numel() for each in group] for group in by_kind(tensors, cap_bytes=cap_bytes)]

    assert found(float("inf")) == [[3, 2, 9, 1], [1]]
    assert found(20) == [[3, 2], [9], [1], [1]]
    assert found(0) == [[3], [2], [9], [1], [1]]


def test_a_bucket_keeps_no_gradient_of_the_step_before() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    bucket = Bucket([used, unused])
    for first, second in ((1.0, 2.0), (3.0, None), (None, 4.0)):
        used.grad = None if first is None else torch.full((2,), first)
        unused.grad = None if second is None else torch.full((3,), second)
        bucket.fill()
        values = [0.0 if value is None else value for value in (first, second)]
        flags = [float(value is not None) for value in (first, second)]
        assert bucket.flat.tolist() == [values[0]] * 2 + [values[1]] * 3 + flags
        bucket.hand_out()
        assert (used.grad is None, unused.grad is None) == (first is None, second is None)


@pytest.mark.multiproc
@pytest.mark.parametrize("procs", [2, 3])
def test_every_gradient_is_the_mean_over_ranks(run: Run, procs: int) -> None:
    begun = run("replicas_of", procs=procs)
    assert len(begun) == procs
    assert len(set(begun)) == 1


@pytest.mark.multiproc
def test_buffers_are_those_of_the_first_rank_or_each_has_its_own(run: Run) -> None:
    zero, one = run("buffers_of_replicas", procs=2)
    (before, after, evaluated, last), (others_before, others_after, others_evaluated, _) = zero["True"], one["True"]
    # Before the first and the third forward, which begin steps, not before the second and fourth.
    assert [mine == other for mine, other in zip(before, others_before, strict=True)] == [True, False, True, False]
    assert after != others_after
    assert evaluated == others_evaluated == after
    assert last == 0.0  # nothing of them was in the state
    for mine in (zero["False"], one["False"]):
        assert mine[1] == mine[2] == mine[3]
    assert zero["False"][1] != one["False"][1]
    sparse, failed = zero["refused"]
    assert "strategy=butterfly averages dense gradients, and there is a sparse one: 1.weight" in sparse
    assert [failed, one["refused"][1]] == ["a mistake 0.0", "a mistake 1.0"]

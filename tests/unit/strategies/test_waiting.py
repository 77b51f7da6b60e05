"""What DDP tells of a rank's waiting: from where its own gradients are there; and when it can't."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework.strategies import DDP, AllReduce, LocalSGD
from framework.types import Strategy
from tests.unit.simulated_ranks import cpu_context

pytestmark = pytest.mark.usefixtures("group", "own_state")


class Told:
    """What is told, in order, among what the model does."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def begin_waiting(self) -> None:
        self.seen.append("waits")

    def end_waiting(self) -> None:
        self.seen.append("goes on")

    def lose_count(self) -> None:
        self.seen.append("not known")


class Seen(nn.Module):
    """Two layers, of which the last may be left out; gradients are noted as they come."""

    def __init__(self, told: Told) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
        for name, parameter in self.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: told.seen.append(name))

    def forward(self, inputs: Tensor, *, all_of_it: bool = True) -> Tensor:
        hidden = self.first(inputs)
        result: Tensor = self.last(hidden) if all_of_it else hidden
        return result


def step(strategy: Strategy, wrapped: nn.Module, told: Told, *, synchronise: bool = True, **how: Any) -> list[str]:
    told.seen.clear()
    with strategy.accumulate(wrapped, synchronise=synchronise):
        wrapped(torch.randn(3, 2), **how).sum().backward()
    return list(told.seen)


@pytest.mark.parametrize("static_graph", [False, True])
def test_a_rank_waits_when_the_last_of_its_own_gradients_is_there(static_graph: bool) -> None:
    told = Told()
    strategy = DDP(context=cpu_context(), static_graph=static_graph)
    wrapped = strategy.wrap(Seen(told))
    assert strategy.tell_waiting(wrapped, told)
    for synchronise in (True, True, False, True):
        *gradients, then = step(strategy, wrapped, told, synchronise=synchronise)
        assert sorted(gradients) == ["first.bias", "first.weight", "last.bias", "last.weight"]
        assert then == "waits"


def test_the_exchange_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What DDP waits for isn't there before: its hook's future is done when it is asked for."""
    told = Told()
    strategy = DDP(context=cpu_context(), comm_hook="fp16")

    def hook(_: Any, bucket: Any) -> Any:
        told.seen.append("exchanges")
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    hook.__annotations__.clear()
    strategy._comm_hook = hook
    wrapped = strategy.wrap(Seen(told))
    assert strategy.tell_waiting(wrapped, told)
    seen = step(strategy, wrapped, told)
    assert seen[-1] == "waits"
    assert seen.count("exchanges") == 1  # begun in backward, beside which it goes on


def test_a_backward_that_leaves_out_the_last_parameter_is_not_known() -> None:
    """Which is told before the step ends: whoever reads the times after it reads them with that."""
    told = Told()
    strategy = DDP(context=cpu_context(), find_unused_parameters=True)
    wrapped = strategy.wrap(Seen(told))
    assert strategy.tell_waiting(wrapped, told)
    assert step(strategy, wrapped, told)[-1] == "waits"
    seen = step(strategy, wrapped, told, all_of_it=False)
    assert (seen[-1], seen.count("waits")) == ("not known", 0)
    assert "not known" not in step(strategy, wrapped, told)
    # Nothing is exchanged here, so nobody waits.
    assert "not known" not in step(strategy, wrapped, told, synchronise=False, all_of_it=False)
    assert "not known" not in step(strategy, wrapped, told)


@pytest.mark.parametrize("comm_hook", ["butterfly", "powersgd", {"powersgd": {"start_powerSGD_iter": 5}}])
def test_hooks_that_wait_in_backward_tell_nothing(comm_hook: Any) -> None:
    told = Told()
    strategy = DDP(context=cpu_context(), comm_hook=comm_hook)
    wrapped = strategy.wrap(Seen(told))
    assert not strategy.tell_waiting(wrapped, told)
    assert "waits" not in step(strategy, wrapped, told)


def test_an_exchange_after_backward_is_waiting() -> None:
    told = Told()
    strategy = AllReduce(context=cpu_context())
    model = strategy.wrap(Seen(told))
    assert strategy.tell_waiting(model, told)
    strategy.exchange()
    assert told.seen == ["waits"]


def test_an_average_is_waiting_and_so_is_an_exchange_before_the_first() -> None:
    """Two steps of warm-up, then an average in every second."""
    told = Told()
    strategy = LocalSGD(context=cpu_context(), every_n_steps=2, warmup_steps=2, outer_lr=0.5)
    model = strategy.wrap(Seen(told))
    assert strategy.tell_waiting(model, told)
    strategy._all_reduce.exchange()  # as two ranks do in a warm-up
    assert told.seen == ["waits"]
    seen = []
    for _ in range(6):
        step(strategy, model, told)
        told.seen.clear()
        strategy.after_update(model)
        seen.append(list(told.seen))
    assert seen == [[], [], [], ["waits", "goes on"], [], ["waits", "goes on"]]

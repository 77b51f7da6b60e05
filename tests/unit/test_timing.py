"""Times of ranks while they train: what it costs, and who is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from framework import ending as ending_module
from framework import meter as meter_module
from framework import timing as timing_module
from framework import trainer as trainer_module
from framework.distributed.context import Context
from framework.slow_ranks import Spent
from framework.strategies.single import AsItIs
from framework.timing import Timing
from framework.trainer import Trainer
from framework.types import Waiting
from tests.unit.simulated_ranks import SimulatedRanks, cpu_context
from tests.unit.small_trainer import Marks, Numbers, make_trainer, settings

pytestmark = pytest.mark.usefixtures("own_state")
SECOND = Spent(steps=10, step=1.0, data=0.1, compute=0.5, waiting=0.4)


class Telling(AsItIs):
    """A strategy that is asked whether it knows of waiting."""

    def __init__(self, *, knows: bool) -> None:
        self.knows = knows
        self.asked: list[Waiting] = []

    def tell_waiting(self, model: nn.Module, waiting: Waiting) -> bool:
        self.asked.append(waiting)
        return self.knows


class Texts(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[tuple[str, str]] = []

    def text(self, tag: str, text: str) -> None:
        self.texts.append((tag, text))


@pytest.mark.parametrize(("every", "collectives"), [(100, 1), (3, 4), (1, 10)])
def test_the_ranks_times_ride_on_what_is_reduced_anyway(
    monkeypatch: pytest.MonkeyPatch, every: int, collectives: int
) -> None:
    """Nine steps: a sum over ranks for each log and one at the end, and none for the times."""
    ranks = SimulatedRanks(2)
    calls: list[str] = []

    def counted(name: str, call: Any) -> Any:
        def counting(value: Any, context: Context) -> Any:
            if context.is_main:
                calls.append(name)
            return call(value, context)

        return counting

    for module, name in ((meter_module, "names"), (timing_module, "places"), (ending_module, "wishes")):
        monkeypatch.setattr(module, "gather_to_all", counted(name, ranks.gather))
    monkeypatch.setattr(trainer_module, "gather_to_all", ranks.gather)
    monkeypatch.setattr(meter_module, "sum_over_ranks", counted("sum", ranks.sum))
    monkeypatch.setattr(ending_module, "any_over_ranks", counted("epoch", ranks.any))
    how = settings(log_every_n_steps=every, max_steps=9, max_epochs=None, check_val_every_n_epoch=None)

    def fit(context: Context) -> Trainer:
        trainer = make_trainer(how, context=context)
        trainer.fit()
        return trainer

    ends = ranks.run(fit)
    assert all(isinstance(end, Trainer) for end in ends), ends
    assert calls.count("places") == calls.count("names") == 1
    assert calls.count("sum") == collectives
    assert set(calls) == {"places", "names", "sum", "epoch"}


def make(rank: int, monkeypatch: pytest.MonkeyPatch, *, knows: bool = True) -> tuple[Timing, Telling]:
    """Of two ranks, started at step 5."""
    monkeypatch.setattr(timing_module, "gather_to_all", lambda *_: ["node0, cuda:0", "node1, cuda:0"])
    pulse: Any = Marks()
    timing, strategy = Timing(pulse, context=cpu_context(rank, world_size=2), every=1), Telling(knows=knows)
    timing.start(strategy, nn.Linear(1, 1), step=5)
    return timing, strategy


@pytest.mark.parametrize("knows", [True, False])
def test_computing_is_compared_where_the_strategy_knows_of_waiting(
    monkeypatch: pytest.MonkeyPatch, knows: bool
) -> None:
    timing, strategy = make(1, monkeypatch, knows=knows)
    assert strategy.asked == [timing.watch]
    assert timing.watch.knows_waiting is knows
    pulse: Any = Marks()
    alone, strategy = Timing(pulse, context=cpu_context(), every=1), Telling(knows=True)
    alone.start(strategy, nn.Linear(1, 1), step=0)
    assert strategy.asked == []


def test_a_slow_rank_is_told_once_by_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = [*SECOND, *SECOND._replace(data=0.4, waiting=0.1)]
    logger: Any = Texts()
    silent: Any = Texts()
    (first, _), (second, _) = make(0, monkeypatch), make(1, monkeypatch)
    for step in range(15, 85, 10):
        assert first.note(table, step=step, loggers=[logger])["skew/slowest_rank"] == 1.0
        assert second.note(table, step=step, loggers=[silent]) == {}
    line = "Rank 1 (node1, cuda:0) is 30 % slower in data than the others, since step 6"
    assert logger.texts == [("slow_rank", line)]
    assert capsys.readouterr().out == f"{line}\n"
    assert [str(each) for each in first.slow_ranks()] == ["rank 1 (node1, cuda:0) is 30 % slower in data"]
    assert (silent.texts, second.slow_ranks()) == ([], [])


def test_alone_the_share_of_data_is_logged_and_nothing_else() -> None:
    numbers = Numbers()
    torch.manual_seed(0)
    make_trainer(settings(max_steps=4), loggers={"numbers": numbers}).fit()
    names = [{name for name in values if not name.startswith("train/")} for _, _, values in numbers.logged]
    assert names == [set(), {"time/data"}, {"time/data"}, {"time/data"}]
    assert all(0 <= values.get("time/data", 0.5) <= 1 for _, _, values in numbers.logged)

"""Training on streams of uneven length: the numbers of one process, resumed exactly, and nobody waits forever."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from framework.errors import RunError
from framework.strategies import DDP, FSDP, AllReduce, LocalSGD
from framework.types import MicroBatch, Window
from tests.helpers.contexts import CPU
from tests.helpers.internals import (
    Context,
    SideChannel,
    Trainer,
    full_tensor,
    load_weights,
    restore_generator_states,
    set_group_timeouts,
)
from tests.helpers.rank_pool import RankPool
from tests.unit.small_trainer import make_trainer, settings
from tests.unit.streams import Parts, Stateful, make_eval_loader, make_loader, opened, sample

pytestmark = pytest.mark.multiproc

LENGTHS = (22, 10, 0)
VAL_LENGTHS = (5, 2, 0)
BATCH = 2
ACCUMULATE = 2
EPOCHS = 2
STEPS_PER_EPOCH = 6
LR = 0.05


def filled(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return model


def plain() -> nn.Module:
    return filled(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))


def noisy() -> nn.Module:
    """What a stand-in computes would show in the statistics, and in the draws of dropout after it."""
    return filled(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1)))


def squares(model: nn.Module, samples: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    inputs, targets = (torch.stack(column) for column in zip(*samples, strict=True))
    loss: Tensor = (model(inputs).squeeze(1) - targets).square().mean()
    return loss


def parts_of(lengths: Sequence[int], epoch: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Return the samples of every part in an epoch."""
    parts = []
    for part, size in enumerate(lengths):
        parts.append([sample(part, number, epoch) for number in range(size)])
    return parts


def one_process() -> tuple[dict[str, Tensor], float]:
    """The same rule in one process: each step takes the next four samples of every part that has some left."""
    model = plain()
    optimizer = SGD(model.parameters(), lr=LR, momentum=0.9)
    for epoch in range(EPOCHS):
        parts = parts_of(LENGTHS, epoch)
        share = BATCH * ACCUMULATE
        for begin in range(0, max(LENGTHS), share):
            optimizer.zero_grad()
            batch = chain.from_iterable(part[begin : begin + share] for part in parts)
            squares(model, list(batch)).backward()
            optimizer.step()
    held_out = list(chain.from_iterable(parts_of(VAL_LENGTHS, 0)))
    return {name: value.detach() for name, value in model.named_parameters()}, squares(model, held_out).item()


def trainer_of(
    context: Context,
    strategy: Any,
    exchange: SideChannel,
    *,
    model: nn.Module,
    dataset: Any = Parts,
    lengths: Sequence[int] = LENGTHS,
    **how: Any,
) -> Trainer:
    trainer = make_trainer(
        replace(settings(max_epochs=EPOCHS, accumulate_grad_batches=ACCUMULATE, log_every_n_steps=4), **how),
        model=model,
        optimizer=lambda parameters: SGD(parameters, lr=LR, momentum=0.9),
        context=context,
        strategy=strategy,
    )
    world_size = context.world_size
    trainer.train_loader = trainer.state.train_loader = make_loader(
        dataset(lengths), context, exchange=exchange, is_sharded=True, batch_size=BATCH, accumulate=ACCUMULATE
    )
    val_loader = make_eval_loader(
        Parts(VAL_LENGTHS[:world_size]), context, exchange=exchange, is_sharded=True, batch_size=2, is_even=True
    )
    trainer.val_loaders = {"val": val_loader}
    return trainer


def strategy_of(name: str, context: Context) -> Any:
    makers: dict[str, Callable[[], Any]] = {
        "ddp": lambda: DDP(context=context),
        "allreduce": lambda: AllReduce(context=context),
        "fsdp": lambda: FSDP(context=context, min_num_params=4),
        "local_sgd": lambda: LocalSGD(context=context, every_n_steps=1),
        "local_sgd, every second step": lambda: LocalSGD(context=context, every_n_steps=2),
    }
    return makers[name]()


def trained(context: Context, names: Sequence[str]) -> list[Any]:
    exchange = opened(context)
    found = []
    for name in names:
        trainer = trainer_of(context, strategy_of(name, context), exchange, model=plain())
        trainer.fit()
        weights = {key: full_tensor(value.detach()) for key, value in trainer.state.bare_model.named_parameters()}
        found.append((weights, trainer.state.val_metrics["val/loss"], trainer.progress.step))
    return found


@pytest.mark.exhaustive
def test_uneven_streams_train_as_one_process_does(rank_pool: RankPool) -> None:
    wanted, loss = one_process()
    for of_rank in rank_pool.run(trained, ["ddp", "fsdp", "local_sgd"], ranks=3):
        for weights, val_loss, steps in of_rank:
            for name, value in wanted.items():
                torch.testing.assert_close(weights[name], value, rtol=0.0, atol=1e-6)
            assert val_loss == pytest.approx(loss, abs=1e-6)
            assert steps == EPOCHS * STEPS_PER_EPOCH


def resumed(context: Context, dataset: Any, stops: Sequence[int]) -> None:
    """Stop after each of these steps, in which some streams have ended, or the epoch; resume, and compare."""
    exchange = opened(context)

    def fitted(state: dict[str, Any] | None = None, **how: Any) -> Trainer:
        trainer = trainer_of(context, AllReduce(context=context), exchange, dataset=dataset, model=noisy(), **how)
        torch.manual_seed(context.rank)
        if state is not None:
            load_weights(trainer.state.bare_model, state["model"], source=Path("memory"))
            trainer.load_state_dict(state["training"])
            restore_generator_states(state["generators"][context.rank], devices=(CPU,))
        trainer.fit()
        return trainer

    straight = fitted()
    assert straight.progress.step == EPOCHS * STEPS_PER_EPOCH
    wanted = straight.state.state_dict()
    for stop in stops:
        found = fitted(fitted(max_steps=stop).state.state_dict()).state.state_dict()
        assert found["training"]["progress"] == wanted["training"]["progress"]
        for name, value in wanted["model"].items():
            assert torch.equal(found["model"][name], value), (stop, name)
        for now, then in zip(found["generators"], wanted["generators"], strict=True):
            assert torch.equal(now["cpu"], then["cpu"])


@pytest.mark.parametrize(("dataset", "stops"), [(Parts, (4,)), (Stateful, (2, STEPS_PER_EPOCH))])
def test_training_resumes_exactly_within_an_epoch(rank_pool: RankPool, dataset: Any, stops: Any) -> None:
    rank_pool.run(resumed, dataset, stops, ranks=3)


def normalising() -> nn.Module:
    """A model whose statistics depend on the inputs alone, not on its weights."""
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))


def statistics_of(lengths: Sequence[int]) -> dict[str, Tensor]:
    """The rule in one process: in each step those of the first part that has samples left, by micro-batch."""
    model = nn.Sequential(nn.BatchNorm1d(3))
    for epoch in range(EPOCHS):
        for begin in range(0, max(lengths), BATCH * ACCUMULATE):
            part = next(part for part, size in enumerate(lengths) if size > begin)
            for number in range(begin, min(lengths[part], begin + BATCH * ACCUMULATE), BATCH):
                model(torch.stack([sample(part, each, epoch)[0] for each in range(number, number + BATCH)]))
    return dict(model.named_buffers())


def statistics(context: Context, names: Sequence[str], lengths: Sequence[int]) -> list[dict[str, Tensor]]:
    exchange = opened(context)
    found = []
    for name in names:
        trainer = trainer_of(context, strategy_of(name, context), exchange, lengths=lengths, model=normalising())
        trainer.fit()
        found.append({key: full_tensor(value) for key, value in trainer.state.bare_model.named_buffers()})
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("lengths", [(0, 10), (6, 14)])
def test_statistics_survive_an_empty_first_rank(rank_pool: RankPool, lengths: Any) -> None:
    names = ["ddp", "allreduce", "fsdp", "local_sgd, every second step"]
    wanted = statistics_of(lengths)
    for of_rank in rank_pool.run(statistics, names, lengths):
        for name, buffers in zip(names, of_rank, strict=True):
            for key, value in wanted.items():
                torch.testing.assert_close(buffers[key], value, rtol=0.0, atol=1e-6, msg=f"{name} {key}")


def late(context: Context) -> str:
    exchange = opened(context)
    assert exchange.gather([context.rank, 0.5])() == [[float(rank), 0.5] for rank in range(context.world_size)]
    set_group_timeouts(0.5, exchange.groups)
    dist.barrier()
    said = ""
    if context.rank == 0:
        try:
            exchange.gather([1.0])()
        except RunError as error:
            said = str(error)
    dist.barrier()
    return said


def test_a_rank_of_unknown_length_is_reported(rank_pool: RankPool) -> None:
    assert "what other ranks read of their streams" in rank_pool.run(late)[0]


@pytest.mark.usefixtures("own_state")
def test_a_stand_in_leaves_zero_gradients() -> None:
    """Neither in statistics nor in generators, so it doesn't matter which batch stands in."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
    trainer = make_trainer(model=model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state(), random.getstate()
    batch = [torch.full((4, 3), 5.0) + torch.arange(4.0)[:, None], torch.arange(4.0)]
    seen: list[Tensor] = []
    model[2].register_forward_hook(lambda *_: seen.append(model.get_buffer("0.running_mean").clone()))
    trainer.train_step(Window(iter([MicroBatch(batch, 0)] * 2), 2, 1, False))
    assert len(seen) == 2
    assert not torch.equal(seen[0], before["0.running_mean"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]

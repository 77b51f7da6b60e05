"""What ranks run whose streams are of uneven length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from framework.checkpoint import load_weights
from framework.data.batching import plan_batches
from framework.data.stream import Deal, Reading
from framework.data.stream_loader import StreamEvalLoader, StreamLoader, evaluation_plan
from framework.distributed.context import Context
from framework.distributed.exchange import SideExchange
from framework.distributed.tensors import whole
from framework.errors import DataError, RunError
from framework.late_dynamo import late_dynamo
from framework.launch import heartbeat
from framework.launch.link import Link
from framework.launch.plan import RankArguments
from framework.seed import restore_generator_states
from framework.strategies import DDP, FSDP, AllReduce, LocalSGD
from framework.trainer import Trainer
from tests.multiproc.collective_entries import group, leave
from tests.unit.simulated_ranks import CPU
from tests.unit.small_trainer import Numbers, make_trainer, settings
from tests.unit.streams import Parts, Stateful, sample

LENGTHS, VAL_LENGTHS = (22, 10, 0), (5, 2, 0)
BATCH, ACCUMULATE, EPOCHS = 2, 2, 2
STEPS_PER_EPOCH = 6
LR = 0.05


def one_process() -> tuple[dict[str, Tensor], float]:
    """The same rule in one process: each step takes the next four samples of every part that has some left."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    _fill(model)
    optimizer = SGD(model.parameters(), lr=LR, momentum=0.9)
    for epoch in range(EPOCHS):
        parts = [[sample(part, number, epoch) for number in range(size)] for part, size in enumerate(LENGTHS)]
        share = BATCH * ACCUMULATE
        for begin in range(0, max(LENGTHS), share):
            taken = [each for part in parts for each in part[begin : begin + share]]
            optimizer.zero_grad()
            _squares(model, taken).backward()
            optimizer.step()
    held_out = [sample(part, number, 0) for part, size in enumerate(VAL_LENGTHS) for number in range(size)]
    return {name: value.detach() for name, value in model.named_parameters()}, float(_squares(model, held_out))


def _squares(model: nn.Module, samples: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    inputs, targets = (torch.stack(column) for column in zip(*samples, strict=True))
    loss: Tensor = (model(inputs).squeeze(1) - targets).square().mean()
    return loss


def _fill(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)


def uneven_streams(rank: RankArguments, _link: Link) -> None:
    """Strategies of each kind against one process; then what goes on after a stop. Leaves how many steps there were."""
    torch.set_num_threads(1)
    with late_dynamo(), group(rank) as context:
        exchange = SideExchange(context, timeout_s=30.0)
        exchange.open()
        begun = heartbeat._collectives()
        assert exchange.begin([context.rank, 0.5])() == [[float(each), 0.5] for each in range(context.world_size)]
        assert heartbeat._collectives() == begun + 1  # by which it is told who is behind
        wanted, loss = one_process()
        steps = []
        for make in (
            lambda: DDP(context=context),
            lambda: FSDP(context=context, min_num_params=4),
            lambda: LocalSGD(context=context, every_n_steps=1),
        ):
            numbers = Numbers()
            trainer = _trainer(context, make(), exchange, loggers={"numbers": numbers})
            trainer.fit()
            found = {name: whole(value.detach()) for name, value in trainer.parts.bare_model.named_parameters()}
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value, rtol=0.0, atol=1e-6)
            assert abs(trainer.val_metrics["val/loss"] - loss) < 1e-6, (trainer.val_metrics, loss)
            steps.append(trainer.progress.step)
        _goes_on(context, exchange, Parts, after=(4,))
        _goes_on(context, exchange, Stateful, after=(2, STEPS_PER_EPOCH))
        leave(rank, {"steps": steps, "late": _late(context, exchange)})


def statistics_of_uneven_streams(rank: RankArguments, _link: Link) -> None:
    """BatchNorm's statistics where the first rank's stream is empty, or ends before the other's; and what is refused.

    Leaves how many batches they have counted, of each strategy, and what was said.
    """
    torch.set_num_threads(1)
    with late_dynamo(), group(rank) as context:
        exchange = SideExchange(context, timeout_s=30.0)
        exchange.open()
        counted = {}
        for lengths in ((0, 10), (6, 14)):
            wanted = _statistics(lengths)
            for name, strategy in (
                ("ddp", DDP(context=context)),
                ("allreduce", AllReduce(context=context)),
                ("fsdp", FSDP(context=context)),
                ("local_sgd", LocalSGD(context=context, every_n_steps=2)),
                ("local_sgd, warm-up", LocalSGD(context=context, every_n_steps=2, warmup_steps=50)),
            ):
                trainer = _trainer(context, strategy, exchange, lengths=lengths, model=_normalising())
                trainer.fit()
                for key, value in trainer.parts.bare_model.state_dict().items():
                    if key in wanted:
                        torch.testing.assert_close(
                            value, wanted[key], rtol=0.0, atol=1e-6, msg=f"{name} {lengths} {key}"
                        )
                counted[f"{name} {lengths}"] = int(trainer.parts.bare_model.state_dict()["0.num_batches_tracked"])
        apart = [AllReduce(context=context, broadcast_buffers=False) for _ in range(3)]
        _trainer(context, apart[0], exchange, lengths=(6, 14), model=_normalising()).fit()
        _trainer(context, apart[1], exchange, lengths=(0, 10)).fit()
        told = ""
        try:
            _trainer(context, apart[2], exchange, lengths=(0, 10), model=_normalising()).fit()
        except DataError as error:
            told = str(error)
        leave(rank, {"counted": counted, "told": told})


def _normalising() -> nn.Module:
    """The statistics are those of the inputs, whatever the weights become."""
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))


def _statistics(lengths: Sequence[int]) -> dict[str, Tensor]:
    """The rule in one process: in each step those of the first part that has some left, micro-batch by micro-batch."""
    model = nn.Sequential(nn.BatchNorm1d(3))
    for epoch in range(EPOCHS):
        for begin in range(0, max(lengths), BATCH * ACCUMULATE):
            part = next(part for part, size in enumerate(lengths) if size > begin)
            end = min(lengths[part], begin + BATCH * ACCUMULATE)
            for number in range(begin, end, BATCH):
                model(torch.stack([sample(part, each, epoch)[0] for each in range(number, number + BATCH)]))
    return dict(model.named_buffers())


def _trainer(
    context: Context,
    strategy: Any,
    exchange: SideExchange,
    *,
    dataset: Any = Parts,
    model: nn.Module | None = None,
    lengths: Sequence[int] = LENGTHS,
    **more: Any,
) -> Trainer:
    if model is None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        _fill(model)
    how = settings(max_epochs=EPOCHS, accumulate_grad_batches=ACCUMULATE, log_every_n_steps=4)
    trainer = make_trainer(
        replace(how, **more.pop("how", {})),
        model=model,
        optimizer=lambda parameters: SGD(parameters, lr=LR, momentum=0.9),
        context=context,
        strategy=strategy,
        **more,
    )
    world = context.world_size
    where: dict[str, Any] = {"device": CPU, "exchange": exchange}
    plan = plan_batches(batch_size=BATCH, global_batch_size=None, world_size=world, accumulate=ACCUMULATE)
    trainer.train_loader = StreamLoader(
        dataset(lengths), deal=Deal(plan, context.rank, True), reading=Reading("train"), **where
    )
    deal = Deal(evaluation_plan(2, world_size=world), context.rank, True)
    trainer.val_loader = StreamEvalLoader(
        Parts(VAL_LENGTHS[:world]), deal=deal, reading=Reading("val"), is_even=True, **where
    )
    return trainer


def _noisy() -> nn.Module:
    """What a stand-in computes would show in its statistics, and in what is dropped after it."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
    _fill(model)
    return model


def _goes_on(context: Context, exchange: SideExchange, dataset: Any, *, after: Sequence[int]) -> None:
    """From after these steps: in which some streams have ended, or the epoch."""

    def one(how: dict[str, Any], state: dict[str, Any] | None = None) -> Trainer:
        trainer = _trainer(context, AllReduce(context=context), exchange, dataset=dataset, model=_noisy(), how=how)
        torch.manual_seed(context.rank)
        if state is not None:
            load_weights(trainer.parts.bare_model, state["model"], source=Path("memory"))
            trainer.load_state_dict(state["training"])
            restore_generator_states(state["generators"][context.rank], devices=(CPU,))
        trainer.fit()
        return trainer

    straight = one({"max_epochs": 2})
    assert straight.progress.step == 2 * STEPS_PER_EPOCH
    wanted = straight.state_dict()
    for steps in after:
        state = one({"max_epochs": 2, "max_steps": steps}).state_dict()
        resumed = one({"max_epochs": 2}, state).state_dict()
        assert resumed["training"]["progress"] == wanted["training"]["progress"]
        for name, value in wanted["model"].items():
            assert torch.equal(resumed["model"][name], value), (dataset, steps, name)
        for now, then in zip(resumed["generators"], wanted["generators"], strict=True):
            assert torch.equal(now["cpu"], then["cpu"])


def _late(context: Context, exchange: SideExchange) -> str:
    """What a rank says that waits for one that doesn't come. The last: what is left in the group doesn't fit."""
    from framework.distributed.group import limit_groups

    limit_groups(1.0, exchange.groups)
    dist.barrier()
    told = "came late"
    if context.rank != 1:
        try:
            exchange.begin([1.0])()
        except RunError as error:
            told = str(error)
    dist.barrier()
    return told

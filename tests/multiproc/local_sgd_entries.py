"""What ranks run whose replicas differ between averages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from framework.callbacks.ema import EMAWeightAveraging
from framework.checkpoint.replicas import own_training
from framework.distributed import collectives
from framework.distributed.collectives import gather_bytes, gather_to_all
from framework.distributed.context import Context
from framework.errors import ConfigError
from framework.late_dynamo import late_dynamo
from framework.launch.link import Link
from framework.launch.plan import RankArguments
from framework.strategies import AllReduce, LocalSGD
from framework.trainer import Trainer
from framework.types import StepReport, Strategy
from tests.multiproc.collective_entries import group, leave
from tests.multiproc.strategy_entries import Branching
from tests.unit.small_trainer import make_trainer, samples, settings

COLLECTIVES = ("all_reduce", "broadcast", "gather", "all_gather_object", "barrier")


def replicas_apart(rank: RankArguments, _link: Link) -> None:
    """Everything about them that takes several; leaves in which steps they met, and what is refused."""
    torch.set_num_threads(1)
    with late_dynamo(), group(rank) as context:
        pieces_come_together(context)
        weights_of_all_kinds(context)
        in_every_step_it_is_all_reduce(context)
        looking_changes_nothing(context)
        leave(rank, {"meets": meetings(context), "refused": sparse_gradients(context)})


def pieces_come_together(context: Context) -> None:
    own = torch.arange(10 * context.rank, dtype=torch.uint8)
    before, collectives._CHUNK_BYTES = collectives._CHUNK_BYTES, 7
    try:
        found = gather_bytes(own, context)
    finally:
        collectives._CHUNK_BYTES = before
    sizes = [10 * each for each in range(context.world_size)] if context.is_main else []
    assert [each.tolist() for each in found] == [list(range(size)) for size in sizes]


def weights_of_all_kinds(context: Context) -> None:
    """Of several types and layouts; what nothing moves stays bit for bit, also where a third isn't exact."""
    for make, cap_mb in ((Branching, 25), (Branching, 0), (lambda: Branching().to(torch.bfloat16), 25)):
        torch.manual_seed(context.rank)
        strategy = LocalSGD(context=context, every_n_steps=2, bucket_cap_mb=cap_mb)
        model: nn.Module = make()
        assert strategy.wrap(model) is model
        begun = _copied(model)
        assert _are_equal(begun, context)
        torch.manual_seed(10 + context.rank)
        for step in range(1, 6):
            with strategy.accumulate(model, synchronise=True):
                _move_weights(model)
            own = _copied(model)
            mean = _mean(own, context)
            strategy.after_update(model)
            if step % 2 == 0:
                _assert_mean(model, mean, context)
                continue
            assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())
            with strategy.evaluation_weights(model):
                _assert_mean(model, mean, context)
            assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())
        for name in ("never.weight", "frozen.weight", "frozen.bias"):
            assert torch.equal(model.state_dict()[name], begun[name])


@torch.no_grad()
def _move_weights(model: nn.Module) -> None:
    """As this rank's own gradients would, of those that it has."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not name.startswith("never"):
            parameter.add_(0.1 * torch.randn_like(parameter))
    for buffer in model.buffers():
        buffer.add_(dist.get_rank() + 1)


def _mean(own: dict[str, Tensor], context: Context) -> dict[str, Tensor]:
    """Over ranks; rank 0's of buffers."""
    everyone = gather_to_all(own, context)
    means = {}
    for name, value in own.items():
        wide = torch.complex128 if value.is_complex() else torch.float64
        given = torch.stack([each[name].to(wide) for each in everyone])
        is_buffer = name.startswith("norm.") and not name.endswith(("weight", "bias"))
        means[name] = (given[0] if is_buffer else given.mean(dim=0)).to(value.dtype)
    return means


def _assert_mean(model: nn.Module, mean: dict[str, Tensor], context: Context) -> None:
    found = model.state_dict()
    assert _are_equal(found, context)
    for name, value in mean.items():
        rough = value.dtype is torch.bfloat16
        torch.testing.assert_close(found[name], value, rtol=0.02 if rough else 1e-5, atol=0.01 if rough else 1e-6)


def _are_equal(weights: dict[str, Tensor], context: Context) -> bool:
    return all(
        torch.equal(value, first)
        for other in gather_to_all(weights, context)
        for value, first in zip(other.values(), weights.values(), strict=True)
    )


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def in_every_step_it_is_all_reduce(context: Context) -> None:
    """With momentum and weight decay too; of the second global batch, of one sample, two ranks have none."""
    found = []
    for make in (AllReduce, lambda context: LocalSGD(context=context, every_n_steps=1)):
        trainer = _trainer(context, make(context=context), steps=8, data=samples(13))
        trainer.fit()
        found.append(_copied(trainer.parts.bare_model))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=0.0, atol=1e-6)


def looking_changes_nothing(context: Context) -> None:
    """Nor does keeping, at every step. What is kept is the mean of what each rank would evaluate by itself."""
    found = []
    for is_watched in (False, True):
        ema = EMAWeightAveraging(decay=0.5)
        strategy = LocalSGD(context=context, every_n_steps=3, outer_lr=0.7, outer_momentum=0.9, nesterov=True)
        how = {"val_check_interval": 1, "log_every_n_steps": 1} if is_watched else {}
        val = samples(7) if is_watched else None
        trainer = _trainer(context, strategy, steps=8, how=how, val=val, callbacks={"ema": ema}, model=_normed())
        if is_watched:
            _watch(trainer, ema, context)
        trainer.fit()
        found.append((_copied(trainer.parts.bare_model), ema.state_dict()["average"], trainer.parts.optimizer))
    for one, other in zip(found[0][:2], found[1][:2], strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())
    states = [list(optimizer.state.values()) for *_, optimizer in found]
    for one, other in zip(*states, strict=True):
        assert torch.equal(one["momentum_buffer"], other["momentum_buffer"])
    assert (
        len({tuple(each.tolist()) for each in gather_to_all(found[0][0]["1.weight"][0], context)}) == context.world_size
    )


def _watch(trainer: Trainer, ema: EMAWeightAveraging, context: Context) -> None:
    """Keep after every evaluation, and look at what is kept."""
    evaluate = trainer.evaluate

    def look(*, epoch: int) -> None:
        evaluate(epoch=epoch)
        own, average = _copied(trainer.parts.bare_model), ema.state_dict()["average"]
        state = trainer.state_dict()
        everyone = gather_to_all(average, context)
        for name, value in state["model"].items():
            each = [one[name] for one in everyone]
            wanted = each[0] if "running" in name or "batches" in name else torch.stack(each).mean(dim=0)
            torch.testing.assert_close(value, wanted, rtol=0.0, atol=1e-6)
        assert _are_equal(state["model"], context)
        # As on the first rank, which alone writes: what every rank would find again.
        training = gather_to_all(state["training"] if context.is_main else None, context)[0]
        again = own_training(training, context)
        assert "replicas" not in again
        assert all(torch.equal(value, own[name]) for name, value in again["model"].items())
        kept = again["callbacks"]["ema"]["average"]
        assert all(torch.equal(value, average[name]) for name, value in kept.items())

    trainer.evaluate = look  # type: ignore[method-assign]


def meetings(context: Context) -> list[int]:
    """The steps in which ranks exchanged anything, of ten with a warm-up of two and an average every three."""

    class Note:
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_train_step_end(self, report: StepReport) -> None:
            if calls:
                self.steps.append(report.step)
            calls.clear()

    note = Note()
    strategy = LocalSGD(context=context, every_n_steps=3, warmup_steps=2)
    trainer = _trainer(context, strategy, steps=10, callbacks={"note": note}, model=_normed())
    with _counted() as calls:
        trainer.fit()
    return note.steps


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """How often each collective was called."""
    calls: Counter[str] = Counter()
    real = {name: getattr(dist, name) for name in COLLECTIVES}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            calls[name] += 1
            return real[name](*args, **keywords)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counting(name))
    try:
        yield calls
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


def sparse_gradients(context: Context) -> str:
    """Each rank's own may be sparse; those of a warm-up, which are exchanged, may not. Gives what is said of that."""
    told = "nothing"
    for warmup in (0, 1):
        torch.manual_seed(0)
        model = nn.Embedding(4, 2, sparse=True)
        strategy = LocalSGD(context=context, every_n_steps=1, warmup_steps=warmup)
        try:
            strategy.wrap(model)
        except ConfigError as error:
            told = str(error)
            continue
        before = _copied(model)["weight"]
        optimizer = SGD(model.parameters(), lr=1.0)
        with strategy.accumulate(model, synchronise=True):
            model(torch.tensor([context.rank])).sum().backward()
        optimizer.step()
        strategy.after_update(model)
        moved = (model.weight.detach() - before).sum(dim=1)
        torch.testing.assert_close(moved, torch.tensor([-2 / 3, -2 / 3, -2 / 3, 0.0]))
    return told


def _normed() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))


def _trainer(
    context: Context,
    strategy: Strategy,
    *,
    steps: int,
    data: Any = None,
    how: Mapping[str, Any] | None = None,
    **parts: Any,
) -> Trainer:
    return make_trainer(
        replace(settings(max_steps=steps, max_epochs=None, log_every_n_steps=100), **(how or {})),
        optimizer=lambda parameters: SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1),
        data=samples(200) if data is None else data,
        context=context,
        strategy=strategy,
        **parts,
    )

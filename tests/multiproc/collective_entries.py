"""What ranks run that meet in a process group; a failed assertion is the rank's failure and ends the run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from framework.config.schema import BackendConfig, BackendName, Duration, InitMethod, Precision
from framework.data.loader import EvalLoader
from framework.distributed.collectives import (
    any_over_ranks,
    barrier,
    from_first,
    gather_to_all,
    gather_to_first,
    sum_over_ranks,
)
from framework.distributed.context import Context, make_context
from framework.distributed.group import process_group, set_timeout
from framework.errors import RunError
from framework.evaluator import evaluate
from framework.launch.link import Link
from framework.launch.plan import RankArguments
from framework.meter import Meter
from framework.precision import PrecisionPlugin
from framework.strategies import DDP
from framework.types import StepOutput
from tests.unit.simulated_ranks import cpu_context
from tests.unit.small_trainer import eval_loader, make_trainer, samples, settings

SIZES = (1, 2, 3, 22, 23)


def backend(*, init_timeout_s: float = 30.0) -> BackendConfig:
    return BackendConfig(
        name=BackendName.GLOO,
        init_method=InitMethod.ENV,
        init_timeout=Duration(init_timeout_s),
        timeout=Duration(30.0),
    )


def context_of(rank: RankArguments) -> Context:
    return make_context(
        rank.topology, node_rank=rank.node_rank, local_rank=rank.local_rank, backend_name=BackendName.AUTO
    )


@contextmanager
def group(rank: RankArguments) -> Iterator[Context]:
    context = context_of(rank)
    with process_group(context, backend(), rendezvous=rank.rendezvous):
        yield context
    assert not dist.is_initialized()


def leave(rank: RankArguments, value: Any) -> None:
    Path(rank.run_dir, f"rank_{rank.rank}.json").write_text(json.dumps(value))


def collectives(rank: RankArguments, _link: Link) -> None:
    """Every collective once; which rank waits for which is seen from the clock."""
    with group(rank) as context:
        world, mine = context.world_size, context.rank
        given = torch.tensor([float(mine), 1.0, 0.5], dtype=torch.float64)
        summed = sum_over_ranks(given, context)
        assert summed is given
        assert summed.tolist() == [world * (world - 1) / 2, float(world), world / 2]
        assert [any_over_ranks(mine == chosen, context) for chosen in range(world)] == [True] * world
        assert any_over_ranks(False, context) is False
        values = gather_to_all({"rank": mine, "names": ["x"] * mine}, context)
        assert values == [{"rank": other, "names": ["x"] * other} for other in range(world)]
        gathered = gather_to_first({"rank": mine}, context)
        assert gathered == (None if mine else [{"rank": other} for other in range(world)])
        assert from_first({"rank": mine}, context) == {"rank": 0}
        time.sleep(0.3 * (mine == world - 1))
        came = time.time()
        barrier(context)
        left = time.time()
        assert left >= max(gather_to_all(came, context))
        leave(rank, "done")


def reduce_meters(rank: RankArguments, _link: Link) -> None:
    """Rank 0 has no samples; then names differ."""
    with group(rank) as context:
        meter = Meter()
        if context.rank > 0:
            meter.add(
                StepOutput(torch.tensor(float(context.rank)), 2, {"right": (torch.tensor(1), 2)}), step=context.rank
            )
        values, extra = meter.reduce(context, extra=[1.0])
        assert extra == [float(context.world_size)]
        meter.clear()
        loss = torch.tensor(float("nan") if context.rank == 1 else 1.0)
        for step in (4, 5):
            meter.add(StepOutput(loss if step == 5 else torch.tensor(1.0), 1), step=step)
        bad = meter.first_nonfinite_step(context)
        differing = Meter()
        differing.add(StepOutput(torch.tensor(1.0), 1, {} if context.rank == 0 else {"more": (1.0, 1)}))
        try:
            differing.reduce(context)
        except RunError as error:
            leave(rank, {"values": values, "bad": bad, "error": str(error)})


class Counting:
    """A metric that is a whole number, and one for each sample."""

    def validation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        (numbers,) = batch
        values = model(numbers.double())
        return StepOutput(values.mean(), len(numbers), {"square": (values.sum(), len(numbers))})

    training_step = validation_step


class Square(nn.Module):
    def forward(self, numbers: Tensor) -> Tensor:
        return numbers.square()


def evaluate_shares(rank: RankArguments, _link: Link) -> None:
    """Parts of several sizes, also smaller than the number of ranks."""
    with group(rank) as context:
        results = {}
        for size in SIZES:
            loader = EvalLoader(
                TensorDataset(torch.arange(size)),
                part="val",
                batch_size=4,
                rank=context.rank,
                world_size=context.world_size,
                device=context.device,
            )
            precision = PrecisionPlugin(Precision.FP32, device=context.device)
            results[size] = evaluate(
                Square(), loader, task=Counting(), precision=precision, context=context, prefix="val"
            )
        leave(rank, results)


def wait_in_vain(rank: RankArguments, _link: Link) -> None:
    """With a short time-out set, rank 0 waits in a collective that rank 1 never comes to."""
    with group(rank) as context:
        set_timeout(1.0, context)
        if context.rank == 1:
            wait_for(Path(rank.run_dir, "rank_0.json"), within_s=6.0)
            return
        began = time.monotonic()
        try:
            sum_over_ranks(torch.ones(1), context)
        except RuntimeError:
            leave(rank, time.monotonic() - began)


def evaluate_buffers(rank: RankArguments, _link: Link) -> None:
    """After a training step each rank has its own batch's running statistics; rank 0's are what is saved."""
    with group(rank) as context:
        trainer = make_trainer(
            settings(max_steps=3, val_check_interval=3),
            model=_with_statistics(),
            strategy=DDP(context=context),
            context=context,
            val=samples(8),
        )
        trainer.fit()
        saved = _with_statistics()
        saved.load_state_dict(trainer.state_dict()["model"])
        alone = cpu_context()
        values = evaluate(
            saved,
            eval_loader(samples(8), alone),
            task=trainer.parts.task,
            precision=trainer.parts.precision,
            context=alone,
            prefix="val",
        )
        leave(rank, [trainer.val_metrics["val/loss"], values["val/loss"]])


def _with_statistics() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))


def wait_in_vain_with_an_older_torch(rank: RankArguments, link: Link) -> None:
    if hasattr(dist, "set_timeout"):
        del dist.set_timeout  # in this process alone
    wait_in_vain(rank, link)


def wait_for(path: Path, *, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def arrive_alone(rank: RankArguments, _link: Link) -> None:
    """Rank 1 never comes to the rendezvous."""
    if rank.rank == 1:
        time.sleep(60.0)
    with process_group(context_of(rank), backend(init_timeout_s=1.0), rendezvous=rank.rendezvous):
        pass

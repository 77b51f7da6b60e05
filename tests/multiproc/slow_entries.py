"""What ranks run of which some are slow."""

from __future__ import annotations

from typing import Any

import torch

from framework import slow_ranks
from framework.distributed.context import Context
from framework.late_dynamo import late_dynamo
from framework.launch.link import Link
from framework.launch.plan import RankArguments
from framework.strategies import DDP, AllReduce
from tests.helpers.naps import PLACES, SAMPLES, Naps, Observer, Samples, Sleepy
from tests.multiproc.collective_entries import group, leave
from tests.unit.small_trainer import make_trainer, settings

EVERY, LOGS = 4, 7
"""The first log isn't judged. Each of the others is, by itself."""
USUAL_S, NAP_S = 0.03, 0.03
KINDS = {"data": "data", "forward": "compute", "backward": "compute", "callbacks": "callbacks"}


def found(context: Context, strategy: Any, seconds: dict[str, dict[int, float]]) -> list[tuple[int, str]]:
    """Who is named after a training in which ranks sleep so."""
    naps = Naps(seconds, usual_s=USUAL_S)
    torch.manual_seed(0)
    steps = EVERY * LOGS
    trainer = make_trainer(
        settings(max_steps=steps, max_epochs=None, log_every_n_steps=EVERY, check_val_every_n_epoch=None),
        model=Sleepy(naps),
        strategy=strategy(context=context),
        context=context,
        data=Samples(steps * SAMPLES * context.world_size, naps),
        callbacks={"naps": Observer(naps)},
    )
    trainer.fit()
    return [(each.rank, each.kind) for each in trainer.timing.slow_ranks()]


def slow_together(rank: RankArguments, _link: Link) -> None:
    """Of four ranks three are slow, each in something else; then none is. Leaves what is found with each strategy."""
    torch.set_num_threads(1)
    vars(slow_ranks)["STRETCH_S"] = 0.0
    with late_dynamo(), group(rank) as context:
        slow = {"data": {1: NAP_S}, "callbacks": {3: NAP_S}}
        leave(
            rank,
            {
                "ddp": found(context, DDP, {**slow, "backward": {2: NAP_S}}),
                "allreduce": found(context, AllReduce, {**slow, "forward": {0: NAP_S}}),
                "none": found(context, DDP, {}),
            },
        )


def slow_alone(rank: RankArguments, _link: Link) -> None:
    """Every place and strategy by itself, and each rank in turn: rank 0's buffers are awaited as well."""
    torch.set_num_threads(1)
    vars(slow_ranks)["STRETCH_S"] = 0.0
    with late_dynamo(), group(rank) as context:
        wrong = []
        for strategy in (DDP, AllReduce):
            for place in PLACES:
                for who in range(context.world_size):
                    named = found(context, strategy, {place: {who: NAP_S}})
                    if context.is_main and named != [(who, KINDS[place])]:
                        wrong.append([strategy.__name__, place, who, named])
            named = found(context, strategy, {})
            if named:
                wrong.append([strategy.__name__, "nowhere", named])
        leave(rank, wrong)

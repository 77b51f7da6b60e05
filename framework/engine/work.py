"""One rank of a job that works with a trained model, or with the process group alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from framework.distributed.collectives import barrier
from framework.distributed.process_group import process_group
from framework.engine.assemble import Assembled, assemble
from framework.engine.setup import RankSetup
from framework.launch.plan import RankArguments
from framework.monitoring.rank_status import RankPhase


@contextmanager
def joined(setup: RankSetup, arguments: RankArguments, *, with_model: bool) -> Iterator[nn.Module | None]:
    """Join the process group, and leave it when every rank has ended the block. Every rank must enter it.

    Yields the model in evaluation mode, with the weights of `checkpoint.path` if that is set. Without `with_model`,
    yields None.
    """
    rank_status = setup.link.rank_status
    rank_status.set_phase(RankPhase.MEETING)
    group = process_group(setup.context, setup.config.backend, rendezvous=arguments.rendezvous)
    with group, setup.link.recording():
        model = None
        if with_model:
            model = trained_model(setup).model.eval()

        rank_status.set_phase(RankPhase.FUNCTION)
        yield model

        rank_status.set_phase(RankPhase.CLOSING)
        barrier(setup.context)


def trained_model(setup: RankSetup) -> Assembled:
    """Return the model with the weights of `checkpoint.path`, or as it is built if there is none.

    Every rank must call it, inside the process group.
    """
    path = setup.config.checkpoint.path
    setup.link.rank_status.set_phase(RankPhase.BUILDING)
    assembled = assemble(setup.requested, setup.context, weights=None if path is None else Path(path))
    setup.link.rank_status.set_phase(RankPhase.EVALUATE)
    return assembled

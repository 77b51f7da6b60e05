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
def joined(setup: RankSetup, arguments: RankArguments, *, needs_weights: bool) -> Iterator[nn.Module | None]:
    """Join the process group, and leave it when every rank has ended the block. Every rank must enter it.

    Yields the model with the weights of `checkpoint.path`, in evaluation mode; None unless `needs_weights`.
    """
    rank_status = setup.link.rank_status
    rank_status.set_phase(RankPhase.MEETING)
    group = process_group(setup.context, setup.config.backend, rendezvous=arguments.rendezvous)
    with group, setup.link.recording():
        model = None
        if needs_weights:
            model = trained_model(setup).model.eval()

        rank_status.set_phase(RankPhase.FUNCTION)
        yield model

        rank_status.set_phase(RankPhase.CLOSING)
        barrier(setup.context)


def trained_model(setup: RankSetup) -> Assembled:
    """Return the model with the weights of `checkpoint.path`. Every rank must call it, inside the process group."""
    setup.link.rank_status.set_phase(RankPhase.BUILDING)
    assembled = assemble(setup.requested, setup.context, weights=Path(str(setup.config.checkpoint.path)))
    setup.link.rank_status.set_phase(RankPhase.EVALUATE)
    return assembled

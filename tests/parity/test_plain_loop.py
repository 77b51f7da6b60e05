"""The command against a plain PyTorch loop: the same weights, on any number of processes, with every strategy.

What strategies compute is compared in more detail in test_strategies.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import results
from tests.helpers.loops import plain_loop, toy_batches

pytestmark = pytest.mark.usefixtures("own_state")

Train = Callable[..., Path]
SHORT = ("logger=none", "trainer.num_threads=1", "trainer.check_val_every_n_epoch=null", "checkpoint.monitor=null")
TOY = ("recipe=toy", *SHORT, "trainer.max_epochs=1")
MODEL_PARALLEL = ("recipe=toy_model_parallel", *TOY[1:])
STAGES = (*MODEL_PARALLEL, "strategy=pipeline", "topology=single_node")
SPREAD = "strategy.min_num_params=50"


def test_one_process_equals_the_plain_loop_exactly(train: Train) -> None:
    """Three epochs; the last batch of each is a short one."""
    run = train("recipe=toy", *SHORT, "trainer.max_epochs=3", "data.global_batch_size=37")
    results.assert_same(results.weights(run), plain_loop(toy_batches(epochs=3, batch_size=37)))


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("processes", "size", "options"),
    [
        # Of 1,600 samples the last batch of 37 has 9, and of 41 one: then some ranks have none.
        (3, 37, (*TOY, "strategy=ddp")),
        (2, 41, (*TOY, "trainer.accumulate_grad_batches=2")),
        (2, 40, MODEL_PARALLEL),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in (
                (2, 41, (*TOY, "strategy=fsdp", SPREAD)),
                (5, 41, (*TOY, "strategy=butterfly")),
                (4, 40, (*TOY, "strategy=hsdp", SPREAD, "strategy.data_parallel_shard_degree=2")),
                (2, 40, (*TOY, "strategy=ddp", "strategy.static_graph=true", "data.num_workers=1")),
                (2, 40, (*TOY, "strategy=local_sgd", "strategy.every_n_steps=1")),
                (2, 40, (*STAGES, "trainer.compile=default")),
                (2, 40, (*TOY, "strategy=fsdp", SPREAD, "trainer.compile=default")),
                (3, 40, (*TOY, "strategy=fsdp", SPREAD, "trainer.activation_checkpointing=[Linear]")),
            )
        ),
    ],
    ids=str,
)
def test_world_size_and_strategy_change_nothing(
    train: Train, processes: int, size: int, options: tuple[str, ...]
) -> None:
    run = train(*options, f"topology.procs_per_node={processes}", f"data.global_batch_size={size}")
    wanted = plain_loop(toy_batches(epochs=1, batch_size=size))
    results.assert_same(results.weights(run), wanted, tolerance=1e-6)

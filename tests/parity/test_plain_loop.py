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
TOY = ("recipe=toy", *SHORT, "trainer.max_steps=20", "data.global_batch_size=20")
STAGES = ("recipe=toy_model_parallel", *TOY[1:], "strategy=pipeline", "topology=single_node")
SPREAD = "strategy.min_num_params=50"


def test_one_process_is_the_plain_loop_bit_for_bit(train: Train) -> None:
    """Three epochs; the last batch of each is a short one."""
    run = train("recipe=toy", *SHORT, "trainer.max_epochs=3", "data.global_batch_size=37")
    results.assert_same(results.weights(run), plain_loop(toy_batches(epochs=3, batch_size=37)))


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (3, (*TOY, "strategy=allreduce")),  # 20 isn't a multiple of 3: shares of 7, 7 and 6
        (2, (*TOY, "trainer.accumulate_grad_batches=2")),
        (2, ("recipe=toy_model_parallel", *TOY[1:])),
        (2, (*STAGES, "strategy.schedule=gpipe", "strategy.num_microbatches=3")),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in (
                (5, (*TOY, "strategy=butterfly")),
                (4, (*TOY, "strategy=hsdp", SPREAD, "strategy.data_parallel_shard_degree=2")),
                (2, (*TOY, "strategy=ddp", "strategy.static_graph=true", "data.num_workers=1")),
                (2, (*TOY, "strategy=ddp", "strategy.comm_hook=butterfly")),
                (2, (*TOY, "strategy=local_sgd", "strategy.every_n_steps=1")),
                (2, (*STAGES, "trainer.compile=default")),
                (2, (*TOY, "strategy=fsdp", SPREAD, "trainer.compile=default")),
                (3, (*TOY, "strategy=fsdp", SPREAD, "trainer.activation_checkpointing=[Linear]")),
            )
        ),
    ],
    ids=str,
)
def test_the_number_of_processes_and_the_strategy_change_nothing(
    train: Train, processes: int, options: tuple[str, ...]
) -> None:
    run = train(*options, f"topology.procs_per_node={processes}")
    results.assert_same(results.weights(run), plain_loop(toy_batches(epochs=1, batches=20)), tolerance=1e-6)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("processes", "strategy", "size"),
    [(3, "ddp", 37), pytest.param(2, "fsdp", 41, marks=pytest.mark.exhaustive)],
    ids=["short-last-batch", "rank-without-samples"],
)
def test_a_short_last_batch_weighs_its_samples(train: Train, processes: int, strategy: str, size: int) -> None:
    """Of 1,600 samples the last batch of 37 has 9, and of 41 one: then a rank has none."""
    several = (f"topology.procs_per_node={processes}", f"strategy={strategy}", f"data.global_batch_size={size}")
    run = train("recipe=toy", *SHORT, *several, "trainer.max_epochs=2")
    wanted = plain_loop(toy_batches(epochs=2, batch_size=size))
    results.assert_same(results.weights(run), wanted, tolerance=1e-6)

"""Two processes with a GPU each, over NCCL: the weights of one process, by every strategy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers import results

pytestmark = pytest.mark.multiproc

Run = Callable[..., Path]
TOY = ("recipe=toy", "logger=jsonl", "trainer.max_steps=10", "data.global_batch_size=20")


@pytest.mark.parametrize("strategy", ["ddp", "allreduce", "butterfly", "fsdp", "local_sgd"])
def test_strategies(train: Run, shared_run: Run, two_gpus: int, strategy: str) -> None:
    every = ("strategy.every_n_steps=1",) if strategy == "local_sgd" else ()
    on = (f"trainer.gpus={two_gpus}", "topology.procs_per_node=2")
    weights = results.weights(train(*TOY, f"strategy={strategy}", *every, *on))
    for name, tensor in results.weights(shared_run(*TOY)).items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-4)


def test_a_model_over_two_gpus_and_pipelined(train: Run, shared_run: Run, two_gpus: int) -> None:
    steps = ("recipe=toy_model_parallel", *TOY[1:], f"trainer.gpus={two_gpus}")
    spread = results.weights(train(*steps, "topology.procs_per_node=1"))
    stages = ("strategy=pipeline", "topology.procs_per_node=2", "topology=single_node", "topology.gpus_per_process=1")
    cut = results.weights(train(*steps, *stages))
    for name, tensor in results.weights(shared_run(*TOY)).items():
        torch.testing.assert_close(spread[name], tensor, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(cut[name], tensor, rtol=1e-3, atol=1e-4)


def test_preflight_measures_the_link(train: Run, two_gpus: int) -> None:
    seconds = 4 if two_gpus else 0.1
    on = (f"trainer.gpus={two_gpus}", "topology.procs_per_node=2", f"preflight.seconds={seconds}")
    assert results.run_file(train("job=preflight", "recipe=toy", *on))["results"]["passed"]

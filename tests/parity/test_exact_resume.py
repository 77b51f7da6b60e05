"""A killed run resumes bit for bit: weights, every state and every logged number are those of the uninterrupted one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.callbacks.recorder import compare
from framework.data.sampler import GlobalOrder
from tests.helpers import exact, results

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_state")]
Train = Callable[..., Path]

KILLED = 1
ADAMW = ("optimizer=adamw", "scheduler=cosine", "scheduler.interval=step")
ADAM = (*ADAMW, "trainer.accumulate_grad_batches=2")
SHORT = "strategy.mp_policy={param_dtype:bf16,reduce_dtype:bf16}"
AGAIN = "trainer.activation_checkpointing=[Linear,Dropout,BatchNorm1d]"
AVERAGED = (*ADAM, "trainer.gradient_clip_val=0.5", "callbacks=[recorder,ema]", "callbacks.ema.decay=0.9")
MOMENTUM = ("optimizer=sgd_momentum", "scheduler=plateau", "scheduler.schedule.patience=0", "data.num_workers=2")
APART = ("strategy=local_sgd", "strategy.every_n_steps=4")
DILOCO = ("strategy.outer_lr=0.7", "strategy.outer_momentum=0.9", "strategy.nesterov=true")
POWER_SGD = "strategy.comm_hook={powersgd:{start_powerSGD_iter:3,min_compression_rate:1}}"
SHARDED = ("strategy.min_num_params=100", "strategy.broadcast_buffers=false")
UNFREEZES = "+callbacks.unfreezes._target_=recipes.exact.Unfreezes"
STOPPING = (*MOMENTUM, "callbacks=[recorder,early_stopping]", "callbacks.early_stopping.patience=9")


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path) -> None:
    exact.write_recipe(tmp_path)


def whole_and_resumed(train: Train, folder: Path, *overrides: str) -> tuple[Path, Path]:
    """The run directories of an uninterrupted run, and of one that was killed once and resumed."""
    command = ("recipe=exact", *overrides)
    (folder / "died").touch()
    whole = train(*command)
    exact.loaded(folder)
    (folder / "died").unlink()
    resumed = train(*command, status=KILLED)
    assert (folder / "died").exists()
    exact.loaded(folder)
    assert train(f"resume={resumed}") == resumed
    return whole, resumed


def assert_resumes_exactly(train: Train, folder: Path, *overrides: str) -> Path:
    """Killed after step 10, in mid-epoch; return the resumed run."""
    whole, resumed = whole_and_resumed(train, folder, *overrides)
    assert exact.differences(whole, resumed) == []
    assert results.repeated(resumed) == {}
    return resumed


def exhaustive(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("processes", "overrides"),
    [
        (1, STOPPING),
        # While step 12 is saved, on a rank that isn't the first.
        (3, (*AVERAGED, "callbacks.dies.where=saving", "callbacks.dies.rank=1")),
        # Between two micro-batches of step 11.
        exhaustive(3, (*AVERAGED, "callbacks.dies.where=accumulating", "callbacks.dies.rank=1")),
        exhaustive(4, STOPPING),
        # Each rank its own statistics of BatchNorm; gradients that are never laid out again; a graph taken for fixed.
        exhaustive(3, ("strategy=allreduce", "strategy.broadcast_buffers=false", *STOPPING)),
        exhaustive(3, ("+strategy.find_unused_parameters=true", *STOPPING)),
        exhaustive(3, ("+strategy.static_graph=true", *STOPPING)),
        exhaustive(3, ("strategy=ddp", "strategy.static_graph=true", *AVERAGED)),
        exhaustive(3, ("strategy=ddp", "strategy.comm_hook=butterfly", *AVERAGED)),
        exhaustive(3, ("strategy=ddp", POWER_SGD, *AVERAGED)),
        exhaustive(3, ("strategy=ddp", UNFREEZES, *AVERAGED)),
        exhaustive(3, ("strategy=butterfly", UNFREEZES, *AVERAGED)),
        exhaustive(3, (*APART, *DILOCO, *AVERAGED)),
        exhaustive(3, (*APART, UNFREEZES, "strategy.warmup_steps=6", *AVERAGED)),
        exhaustive(3, (*APART, *DILOCO, "strategy.warmup_steps=11", *ADAM)),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else str(value),
)
def test_a_killed_run_resumes_exactly(train: Train, tmp_path: Path, processes: int, overrides: tuple[str, ...]) -> None:
    resumed = assert_resumes_exactly(train, tmp_path, f"topology.procs_per_node={processes}", *overrides)
    assert "Resuming after step 9" in results.log(resumed)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (2, ("strategy=fsdp", SHORT, AGAIN, *SHARDED, *ADAM)),
        (3, ("strategy=fsdp", *SHARDED, *ADAM)),
        (4, ("strategy=hsdp", "strategy.data_parallel_shard_degree=2", SHORT, AGAIN, *SHARDED, *ADAM)),
        # Two stages, two copies; the last window of an epoch is a short one, whose micro-batches are smaller.
        (4, ("strategy=pipeline", "strategy.num_stages=2", "strategy.num_microbatches=2", *ADAMW)),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else str(value),
)
def test_a_killed_run_of_a_model_that_several_processes_share_resumes_exactly(
    train: Train, tmp_path: Path, processes: int, options: tuple[str, ...]
) -> None:
    """Of the weights with one row, one process has all and others nothing; each has its own statistics.

    Two copies over two processes each compute in a short format, and parts of them again in the backward.
    """
    clipped = ("trainer.gradient_clip_val=0.5", "callbacks=recorder", f"topology.procs_per_node={processes}")
    resumed = assert_resumes_exactly(train, tmp_path, *options, *clipped)
    # What was being written beside step 10 may have been lost.
    assert "Resuming after step 9" in results.log(resumed) or "Resuming after step 6" in results.log(resumed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_static", [False, True])
def test_after_the_first_step_gradients_are_laid_out_as_in_the_uninterrupted_run(
    train: Train, tmp_path: Path, is_static: bool
) -> None:
    """DDP lays them out again after one step, for a static graph after two; here the run resumes from the first."""
    early = ("checkpoint.every_n_steps=1", "callbacks.dies.after=2", "callbacks.dies.saved=1")
    graph = f"+strategy.static_graph={str(is_static).lower()}"
    resumed = assert_resumes_exactly(train, tmp_path, "topology.procs_per_node=3", graph, *early)
    assert "Resuming after step 1" in results.log(resumed)


@pytest.mark.exhaustive
def test_without_the_order_of_gradients_the_first_difference_is_a_sum(train: Train, tmp_path: Path) -> None:
    """The reason for the strategy's state, and how the recorder finds the first difference of two runs.

    Torch lays the gradients out again after a process's first step, so three ranks add them in another order.
    """
    forgetful = ("strategy=single", "strategy._target_=recipes.exact.Forgetful", "topology.procs_per_node=3")
    whole, resumed = whole_and_resumed(train, tmp_path, *forgetful)
    first = compare(whole, resumed)
    assert first is not None
    assert first.step == 10
    assert first.what.startswith("gradients ")
    # What was taken before isn't loaded again.
    rest = [index for step, indices in exact.taken(resumed).items() if step > 9 for index in indices]
    assert sorted(exact.loaded(tmp_path)) == sorted(rest)


@pytest.mark.exhaustive
def test_the_newest_unfinished_run_is_found(train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What a scheduler that repeats one command needs: start, resume after a kill, start the next."""
    command = ("recipe=exact", "resume=auto", "topology.procs_per_node=2")
    killed = train(*command, status=KILLED)
    assert "no unfinished run in outputs/exact" in capfd.readouterr().err
    train(*command, "trainer.max_epochs=2")
    assert f"resume=auto: {killed.relative_to(tmp_path)} (failed; checkpoint of step 9)" in capfd.readouterr().err
    assert list(tmp_path.glob("outputs/*/*")) == [killed]
    assert results.results(killed)["epochs"] == 2
    assert "Resuming after step 9" in results.log(killed)
    assert train(*command) != killed


# Another world size


@pytest.mark.parametrize("processes", [exhaustive(2), 3])
def test_no_sample_is_lost_or_repeated_on_another_number_of_ranks(train: Train, tmp_path: Path, processes: int) -> None:
    """Started on 4 ranks and killed after step 10; steps 10 to 18 on fewer, in two copies of the run."""
    killed = train("recipe=exact", "topology.procs_per_node=4", *AVERAGED, status=KILLED)
    copied = shutil.copytree(killed, killed.with_name("copied"), symlinks=True)
    for run in (killed, copied):
        train(f"resume={run}", f"topology.procs_per_node={processes}")
    order = GlobalOrder(exact.SIZE, seed=0, shuffle=True)
    steps = exact.taken(killed)
    assert sorted(steps) == list(range(1, 3 * exact.STEPS_PER_EPOCH + 1))
    for epoch in range(3):
        batches = torch.split(order.indices(epoch), exact.GLOBAL_BATCH)
        for step, batch in enumerate(batches, start=epoch * exact.STEPS_PER_EPOCH + 1):
            assert sorted(steps[step]) == sorted(batch.tolist())
    # The generators that there were none of are well defined: both went on with the same.
    assert exact.differences(killed, copied) == []
    assert f"the checkpoint is of 4 ranks, this run has {processes}" in results.log(killed)


@pytest.mark.exhaustive
def test_another_global_batch_is_a_warning(train: Train, tmp_path: Path) -> None:
    by_rank = ("data.global_batch_size=null", "data.batch_size=4", "topology.procs_per_node=3")
    killed = train("recipe=exact", *by_rank, status=KILLED)
    train(f"resume={killed}", "topology.procs_per_node=2")
    assert "a global batch has 8 samples now, and had 12" in results.log(killed)
    taken = [
        index for step, indices in exact.taken(killed).items() if step > exact.STEPS_PER_EPOCH for index in indices
    ]
    assert sorted(taken) == sorted([*range(exact.SIZE)] * 2)

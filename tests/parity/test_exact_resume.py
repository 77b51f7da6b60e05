"""A killed run resumes bit for bit: weights, every state and every logged number are those of the uninterrupted one."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.helpers import exact, results
from tests.helpers.internals import GlobalOrder

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_state")]
Train = Callable[..., Path]

KILLED = 1
ADAMW = ("optimizer=adamw", "scheduler=cosine", "scheduler.interval=step")
ADAM = (*ADAMW, "trainer.accumulate_grad_batches=2")
SHORT = "strategy.mp_policy={param_dtype:bf16,reduce_dtype:bf16}"
AGAIN = "trainer.activation_checkpointing=[Linear,Dropout,BatchNorm1d]"
AVERAGED = (*ADAM, "trainer.gradient_clip_val=0.5", "callbacks=[ema]", "callbacks.ema.decay=0.9")
MOMENTUM = ("optimizer=sgd_momentum", "scheduler=plateau", "scheduler.schedule.patience=0", "data.num_workers=2")
APART = ("strategy=local_sgd", "strategy.every_n_steps=4")
DILOCO = ("strategy.outer_lr=0.7", "strategy.outer_momentum=0.9", "strategy.nesterov=true")
POWER_SGD = "strategy.comm_hook={powersgd:{start_powerSGD_iter:3,min_compression_rate:1}}"
SHARDED = ("strategy.min_num_params=100", "strategy.broadcast_buffers=false")
UNFREEZES = "+callbacks.unfreezes._target_=recipes.exact.Unfreezes"
STOPPING = (*MOMENTUM, "callbacks=[early_stopping]", "callbacks.early_stopping.patience=9")


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path) -> None:
    exact.write_recipe(tmp_path)


def assert_resumes_exactly(train: Train, folder: Path, *overrides: str) -> Path:
    """Compare an uninterrupted run with one that is killed once after step 10, in mid-epoch; return the latter."""
    command = ("recipe=exact", *overrides)
    (folder / "died").touch()
    whole = train(*command)
    (folder / "died").unlink()
    resumed = train(*command, status=KILLED)
    assert (folder / "died").exists()
    exact.loaded(folder)
    assert train(f"resume={resumed}") == resumed
    assert exact.differences(whole, resumed) == []
    assert results.repeated(resumed) == {}
    return resumed


def exhaustive(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("processes", "overrides"),
    [
        exhaustive(1, STOPPING),
        # While step 12 is saved, on a rank that isn't the first.
        (3, (*AVERAGED, "callbacks.dies.where=saving", "callbacks.dies.rank=1")),
        # Between two micro-batches of step 11.
        exhaustive(3, (*AVERAGED, "callbacks.dies.where=accumulating", "callbacks.dies.rank=1")),
        # Each rank its own statistics of BatchNorm; gradients that are never laid out again; a graph taken for fixed.
        exhaustive(3, ("strategy=allreduce", "strategy.broadcast_buffers=false", *STOPPING)),
        exhaustive(3, ("+strategy.find_unused_parameters=true", *STOPPING)),
        exhaustive(3, ("strategy=ddp", "strategy.static_graph=true", *AVERAGED)),
        exhaustive(3, ("strategy=ddp", "strategy.bucket_cap_mb=0.0001", *AVERAGED)),
        exhaustive(3, ("strategy=ddp", POWER_SGD, *AVERAGED)),
        exhaustive(3, ("strategy=butterfly", UNFREEZES, *AVERAGED)),
        exhaustive(3, (*APART, UNFREEZES, "strategy.warmup_steps=6", *AVERAGED)),
        exhaustive(3, (*APART, *DILOCO, "strategy.warmup_steps=11", *ADAM)),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else str(value),
)
def test_a_killed_run_resumes_exactly(train: Train, tmp_path: Path, processes: int, overrides: tuple[str, ...]) -> None:
    resumed = assert_resumes_exactly(train, tmp_path, f"topology.procs_per_node={processes}", *overrides)
    assert "Resuming after step 9" in results.log(resumed)
    # What was taken before isn't loaded again, but for the four samples that each rank loads twice at the start.
    trained: Counter[int] = Counter()
    for step, indices in exact.taken(resumed).items():
        if step > 9:
            trained.update(indices)
    loaded = Counter(exact.loaded(tmp_path))
    assert not trained - loaded
    assert list((loaded - trained).values()) == [2 * processes] * 4


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (3, ("strategy=fsdp", *SHARDED, *ADAM)),
        (4, ("strategy=hsdp", "strategy.data_parallel_shard_degree=2", SHORT, AGAIN, *SHARDED, *ADAM)),
        # Two stages, two copies; the last window of an epoch is a short one, whose micro-batches are smaller.
        (4, ("strategy=pipeline", "strategy.num_stages=2", "strategy.num_microbatches=2", *ADAMW)),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else str(value),
)
def test_a_killed_sharded_run_resumes_exactly(
    train: Train, tmp_path: Path, processes: int, options: tuple[str, ...]
) -> None:
    """One process holds all of the weights with one row, the others nothing; each has its own statistics.

    Two copies over two processes each compute in a short format, and parts of them again in the backward.
    """
    clipped = ("trainer.gradient_clip_val=0.5", f"topology.procs_per_node={processes}")
    resumed = assert_resumes_exactly(train, tmp_path, *options, *clipped)
    # What was being written beside step 10 may have been lost.
    assert "Resuming after step 9" in results.log(resumed) or "Resuming after step 6" in results.log(resumed)


@pytest.mark.exhaustive
def test_resumed_gradients_keep_their_memory_layout(train: Train, tmp_path: Path) -> None:
    """DDP lays a static graph's gradients out again after two steps; here the run resumes from the first."""
    early = ("checkpoint.every_n_steps=1", "callbacks.dies.after=2", "callbacks.dies.saved=1")
    static = ("topology.procs_per_node=3", "+strategy.static_graph=true")
    resumed = assert_resumes_exactly(train, tmp_path, *static, *early)
    assert "Resuming after step 1" in results.log(resumed)


@pytest.mark.exhaustive
def test_the_newest_unfinished_run_is_found(train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What a scheduler that repeats one command needs: start, resume after a kill, start the next."""
    command = ("recipe=exact", "resume=auto", "topology.procs_per_node=2")
    killed = train(*command, status=KILLED)
    assert "no unfinished run in outputs/exact" in capfd.readouterr().err
    train(*command, "trainer.max_epochs=2")
    assert f"resume=auto: {killed.relative_to(tmp_path)} (failed)" in capfd.readouterr().err
    assert list(tmp_path.glob("outputs/*/*")) == [killed]
    assert results.results(killed)["epochs"] == 2
    assert "Resuming after step 9" in results.log(killed)
    assert train(*command) != killed


# Another world size


def test_another_world_size_loses_no_sample(train: Train, tmp_path: Path) -> None:
    """Start on 4 ranks, kill one after step 10, and take steps 10 to 18 on 3."""
    run = train("recipe=exact", "topology.procs_per_node=4", *AVERAGED, status=KILLED)
    train(f"resume={run}", "topology.procs_per_node=3")
    assert "the checkpoint is of 4 ranks, this run has 3" in results.log(run)
    order = GlobalOrder(exact.SIZE, seed=0, shuffle=True)
    batches: list[Tensor] = []
    for epoch in range(3):
        batches.extend(order.indices(epoch)[:].split(exact.GLOBAL_BATCH))
    taken = exact.taken(run)
    assert list(taken) == list(range(1, len(batches) + 1))
    for step, batch in enumerate(batches, start=1):
        assert sorted(taken[step]) == sorted(batch.tolist())


@pytest.mark.exhaustive
def test_new_ranks_get_repeatable_generators(train: Train, tmp_path: Path) -> None:
    killed = train("recipe=exact", "topology.procs_per_node=2", *AVERAGED, status=KILLED)
    copied = shutil.copytree(killed, killed.with_name("copied"), symlinks=True)
    for run in (killed, copied):
        train(f"resume={run}", "topology.procs_per_node=3")
    assert exact.differences(killed, copied) == []


@pytest.mark.exhaustive
def test_another_global_batch_is_a_warning(train: Train, tmp_path: Path) -> None:
    by_rank = ("data.global_batch_size=null", "data.batch_size=4", "topology.procs_per_node=3")
    killed = train("recipe=exact", *by_rank, status=KILLED)
    train(f"resume={killed}", "topology.procs_per_node=2")
    assert "A global batch has 8 samples now, and had 12" in results.log(killed)
    later = [indices for step, indices in exact.taken(killed).items() if step > exact.STEPS_PER_EPOCH]
    assert sorted(chain.from_iterable(later)) == sorted([*range(exact.SIZE)] * 2)

"""A run that was killed goes on bit for bit as if it never had been: weights, every state, every logged number."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from framework.callbacks.recorder import compare
from framework.data.sampler import GlobalOrder
from framework.run_dir import RunDir, locked
from tests.helpers import exact, results

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_state")]
Train = Callable[..., Path]

KILLED = 1
ADAM = ("optimizer=adamw", "scheduler=cosine", "scheduler.interval=step", "trainer.accumulate_grad_batches=2")
SHORT = "strategy.mp_policy={param_dtype:bf16,reduce_dtype:bf16}"
AGAIN = "trainer.activation_checkpointing=[Linear,Dropout,BatchNorm1d]"
AVERAGED = (*ADAM, "trainer.gradient_clip_val=0.5", "callbacks=[recorder,ema]", "callbacks.ema.decay=0.9")
MOMENTUM = ("optimizer=sgd_momentum", "scheduler=plateau", "scheduler.schedule.patience=0", "data.num_workers=2")
APART = ("strategy=local_sgd", "strategy.every_n_steps=4")
DILOCO = ("strategy.outer_lr=0.7", "strategy.outer_momentum=0.9", "strategy.nesterov=true")
UNFREEZES = "+callbacks.unfreezes._target_=recipes.exact.Unfreezes"
STOPPING = (*MOMENTUM, "callbacks=[recorder,early_stopping]", "callbacks.early_stopping.patience=9")


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path) -> None:
    exact.write_recipe(tmp_path)


def whole_and_resumed(train: Train, folder: Path, *overrides: str) -> tuple[Path, Path]:
    """An uninterrupted run, and one that died once and went on; each run directory."""
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


@pytest.mark.parametrize(
    ("processes", "overrides"),
    [
        (1, STOPPING),
        (3, AVERAGED),
        *(pytest.param(procs, STOPPING, marks=pytest.mark.exhaustive) for procs in (2, 4)),
        pytest.param(1, AVERAGED, marks=pytest.mark.exhaustive),
    ],
)
def test_a_killed_run_ends_as_an_uninterrupted_one(
    train: Train, tmp_path: Path, processes: int, overrides: tuple[str, ...]
) -> None:
    """Killed after step 10, in mid-epoch; it goes on from step 9."""
    whole, resumed = whole_and_resumed(train, tmp_path, f"topology.procs_per_node={processes}", *overrides)
    assert "Resuming after step 9" in results.log(resumed)
    assert exact.differences(whole, resumed) == []
    assert results.repeated(resumed) == {}


@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (2, ("strategy=fsdp", SHORT, AGAIN)),
        pytest.param(3, ("strategy=fsdp",), marks=pytest.mark.exhaustive),
        pytest.param(
            4,
            ("strategy=hsdp", "strategy.data_parallel_shard_degree=2", SHORT, AGAIN),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=str,
)
def test_so_it_does_where_the_model_is_spread_over_the_processes(
    train: Train, tmp_path: Path, processes: int, options: tuple[str, ...]
) -> None:
    """Of the weights with one row, one process has all and others nothing; each has its own statistics.

    Two copies over two processes each compute in a short format, and parts of them again in the backward.
    """
    spread = ("strategy.min_num_params=100", "strategy.broadcast_buffers=false")
    averaged = ("trainer.gradient_clip_val=0.5", "callbacks=recorder", f"topology.procs_per_node={processes}")
    whole, resumed = whole_and_resumed(train, tmp_path, *options, *spread, *ADAM, *averaged)
    # What was being written beside step 10 may have been lost.
    assert "Resuming after step 9" in results.log(resumed) or "Resuming after step 6" in results.log(resumed)
    assert exact.differences(whole, resumed) == []
    assert results.repeated(resumed) == {}


@pytest.mark.parametrize(
    "option",
    [
        pytest.param("broadcast_buffers=false", marks=pytest.mark.exhaustive),
        pytest.param("find_unused_parameters=true", marks=pytest.mark.exhaustive),
        pytest.param("static_graph=true", marks=pytest.mark.exhaustive),
    ],
)
def test_so_it_does_with_other_ways_of_ddp(train: Train, tmp_path: Path, option: str) -> None:
    """Each rank its own statistics of BatchNorm; gradients that are never laid out anew; a graph taken for fixed."""
    overrides = ("topology.procs_per_node=3", f"+strategy.{option}", *STOPPING)
    whole, resumed = whole_and_resumed(train, tmp_path, *overrides)
    assert exact.differences(whole, resumed) == []


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            ("strategy=allreduce", "strategy.broadcast_buffers=false", *STOPPING), marks=pytest.mark.exhaustive
        ),
        pytest.param(("strategy=ddp", "strategy.comm_hook=butterfly", *AVERAGED), marks=pytest.mark.exhaustive),
        pytest.param(
            ("strategy=ddp", "strategy.comm_hook={powersgd:{start_powerSGD_iter:3,min_compression_rate:1}}", *AVERAGED),
            marks=pytest.mark.exhaustive,
        ),
        (*APART, *DILOCO, *AVERAGED),
        ("strategy=ddp", UNFREEZES, *AVERAGED),
        pytest.param(("strategy=butterfly", UNFREEZES, *AVERAGED), marks=pytest.mark.exhaustive),
        pytest.param((*APART, *DILOCO, UNFREEZES, *AVERAGED), marks=pytest.mark.exhaustive),
        pytest.param((*APART, UNFREEZES, "strategy.warmup_steps=6", *AVERAGED), marks=pytest.mark.exhaustive),
        pytest.param((*APART, "strategy.broadcast_buffers=false", *STOPPING), marks=pytest.mark.exhaustive),
        pytest.param((*APART, *DILOCO, "strategy.warmup_steps=9", *ADAM), marks=pytest.mark.exhaustive),
        pytest.param((*APART, *DILOCO, "strategy.warmup_steps=11", *ADAM), marks=pytest.mark.exhaustive),
        pytest.param(("strategy=allreduce", *AVERAGED), marks=pytest.mark.exhaustive),
        pytest.param(("strategy=butterfly", *AVERAGED), marks=pytest.mark.exhaustive),
        pytest.param(("strategy=ddp", "strategy.comm_hook=bf16", *AVERAGED), marks=pytest.mark.exhaustive),
    ],
    ids=lambda overrides: " ".join(overrides[:2]),
)
def test_so_it_does_with_other_ways_to_average(train: Train, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    whole, resumed = whole_and_resumed(train, tmp_path, "topology.procs_per_node=3", *overrides)
    assert "Resuming after step 9" in results.log(resumed)
    assert exact.differences(whole, resumed) == []
    assert results.repeated(resumed) == {}


@pytest.mark.parametrize("static", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_after_the_first_step_the_layout_of_gradients_is_the_one_there_would_be(
    train: Train, tmp_path: Path, static: bool
) -> None:
    """It is made anew after one step, of a static graph after two; here the run goes on from the first."""
    early = ("checkpoint.every_n_steps=1", "callbacks.dies.after=2", "callbacks.dies.saved=1")
    graph = f"+strategy.static_graph={str(static).lower()}"
    whole, resumed = whole_and_resumed(train, tmp_path, "topology.procs_per_node=3", graph, *early)
    assert "Resuming after step 1" in results.log(resumed)
    assert exact.differences(whole, resumed) == []


@pytest.mark.exhaustive
def test_skipping_ahead_loads_nothing(train: Train, tmp_path: Path) -> None:
    _, resumed = whole_and_resumed(train, tmp_path, "topology.procs_per_node=2")
    rest = [index for step, indices in exact.taken(resumed).items() if step > 9 for index in indices]
    assert sorted(exact.loaded(tmp_path)) == sorted(rest)


@pytest.mark.exhaustive
def test_without_the_order_of_gradients_the_first_difference_is_a_sum(train: Train, tmp_path: Path) -> None:
    """What the strategy's state is for, and how the recorder tells where two runs part: in the first step gone on with.

    Torch lays the gradients out anew after a process's first step, so three ranks add them in another order.
    """
    forgetful = ("strategy=single", "strategy._target_=recipes.exact.Forgetful", "topology.procs_per_node=3")
    whole, resumed = whole_and_resumed(train, tmp_path, *forgetful)
    first = compare(whole, resumed)
    assert first is not None
    assert first.step == 10
    assert first.what.startswith("gradients ")


@pytest.mark.parametrize("where", [pytest.param("accumulating", marks=pytest.mark.exhaustive), "saving"])
def test_the_moment_does_not_matter(train: Train, tmp_path: Path, where: str) -> None:
    """Between two micro-batches of step 11, and while step 12 is saved, on a rank that isn't the first."""
    dies = (f"callbacks.dies.where={where}", "callbacks.dies.rank=1")
    whole, resumed = whole_and_resumed(train, tmp_path, "topology.procs_per_node=3", *AVERAGED, *dies)
    assert "Resuming after step 9" in results.log(resumed)
    assert exact.differences(whole, resumed) == []


@pytest.mark.exhaustive
def test_the_newest_unfinished_run_is_found(train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What a scheduler that starts the same command again needs: begin, go on after a kill, begin the next."""
    command = ("recipe=exact", "resume=auto", "topology.procs_per_node=2")
    killed = train(*command, status=KILLED)
    assert "resume=auto: no unfinished run in outputs/exact; a new one begins" in capfd.readouterr().err
    train(*command, "trainer.max_epochs=2")
    assert f"resume=auto: {killed.relative_to(tmp_path)} (failed; checkpoint of step 9)" in capfd.readouterr().err
    assert list(tmp_path.glob("outputs/*/*")) == [killed]
    assert results.results(killed)["epochs"] == 2
    assert "Resuming after step 9" in results.log(killed)
    assert train(*command) != killed


def test_a_run_that_is_under_way_is_refused(train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    killed = train("recipe=exact", status=KILLED)
    with locked(RunDir(killed)):
        train("recipe=exact", "resume=auto", status=2)
    assert f"The run {killed} is in use by another process" in capfd.readouterr().err
    assert results.pointed(killed, "last") == 9


# Another world size


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_no_sample_is_lost_or_repeated_on_another_number_of_ranks(train: Train, tmp_path: Path, processes: int) -> None:
    """Begun on 4 ranks and killed after step 10; steps 10 to 18 on fewer, in two copies of the run."""
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
    log = results.log(killed)
    assert f"the checkpoint is of 4 ranks, this run has {processes}: random generators are seeded anew" in log


def test_another_global_batch_is_told(train: Train, tmp_path: Path) -> None:
    by_rank = ("data.global_batch_size=null", "data.batch_size=4", "topology.procs_per_node=3")
    killed = train("recipe=exact", *by_rank, status=KILLED)
    train(f"resume={killed}", "topology.procs_per_node=2")
    assert "a global batch has 8 samples now, and had 12" in results.log(killed)
    taken = [
        index for step, indices in exact.taken(killed).items() if step > exact.STEPS_PER_EPOCH for index in indices
    ]
    assert sorted(taken) == sorted([*range(exact.SIZE)] * 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", [2, 4])
def test_so_it_does_where_stages_of_the_model_lie_on_processes_of_their_own(
    train: Train, tmp_path: Path, processes: int
) -> None:
    """One or two copies of two stages; the last window of an epoch is a short one, whose micro-batches are smaller."""
    stages = ("strategy=pipeline", "strategy.num_stages=2", "strategy.num_microbatches=2", "callbacks=recorder")
    how = ("optimizer=adamw", "scheduler=cosine", "scheduler.interval=step", "trainer.gradient_clip_val=0.5")
    whole, resumed = whole_and_resumed(train, tmp_path, f"topology.procs_per_node={processes}", *stages, *how)
    assert "Resuming after step 9" in results.log(resumed) or "Resuming after step 6" in results.log(resumed)
    assert exact.differences(whole, resumed) == []

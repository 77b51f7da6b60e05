"""Models sharded over processes, or in stages: their checkpoints are read by any number of processes and strategy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import results
from tests.helpers.loops import toy_loss

pytestmark = pytest.mark.multiproc

Run = Callable[..., Path]
Capture = pytest.CaptureFixture[str]

SHORT = ("recipe=toy", "logger=jsonl", "trainer.max_epochs=2", "optimizer=adam", "data.global_batch_size=40")
SHARDED = ("strategy=fsdp", "strategy.min_num_params=50")
STOPPED = 47


HSDP = ("strategy=hsdp", "strategy.min_num_params=50", "strategy.data_parallel_shard_degree=2")
STAGES = ("recipe=toy_model_parallel", *SHORT[1:], "strategy=pipeline", "topology=single_node")
COPIES = ("strategy.num_stages=2", "strategy.num_microbatches=4")


def procs(number: int) -> str:
    return f"topology.procs_per_node={number}"


@pytest.fixture
def whole_run(shared_run: Run) -> Path:
    return shared_run(*SHORT, "strategy=single")


@pytest.fixture
def sharded_run(shared_run: Run) -> Path:
    """A run on three processes that stopped in the second epoch."""
    return shared_run(*SHORT, *SHARDED, procs(3), f"trainer.max_steps={STOPPED}")


@pytest.mark.parametrize(
    ("saved_by", "resumed_by"),
    [
        ((*SHARDED, procs(3)), (procs(2), "strategy=ddp")),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in (
                ((*STAGES, procs(2)), (procs(1), "strategy=single", "topology.gpus_per_process=2")),
                (("strategy=single",), (*SHARDED, procs(2))),
                ((*HSDP, procs(4)), (*SHARDED, "strategy.data_parallel_shard_degree=null", procs(2))),
                ((*STAGES, procs(4), *COPIES), (procs(2), "strategy.schedule=gpipe")),
            )
        ),
    ],
    ids=str,
)
def test_it_resumes_with_other_processes_and_another_strategy(
    train: Run, shared_run: Run, whole_run: Path, tmp_path: Path, saved_by: tuple[str, ...], resumed_by: tuple[str, ...]
) -> None:
    """Weights and Adam's state: the end is that of one process. The checkpoint is that of one process, too."""
    saved = shared_run(*(SHORT if saved_by[0] != STAGES[0] else ()), *saved_by, f"trainer.max_steps={STOPPED}")
    stopped = Path(shutil.copytree(saved, tmp_path / "outputs" / "toy" / "copy", symlinks=True))
    alone = results.saved(shared_run(*SHORT, "strategy=single", f"trainer.max_steps={STOPPED}"))
    found = results.saved(stopped)
    results.assert_same(found["model"], alone["model"], tolerance=1e-6)
    theirs = alone["training"]["optimizer"]
    ours = found["training"]["optimizer"]
    assert ours["param_groups"] == theirs["param_groups"]
    for number, state in theirs["state"].items():
        results.assert_same(ours["state"][number], state, tolerance=1e-5)
    resumed = train(f"resume={stopped}", "trainer.max_steps=null", *resumed_by)
    assert f"Resuming after step {STOPPED}" in results.log(resumed)
    results.assert_same(results.weights(resumed), results.weights(whole_run), tolerance=1e-6)


def test_spread_weights_can_be_evaluated_and_reused(train: Run, sharded_run: Path) -> None:
    evaluated = train("job=eval", f"checkpoint.path={sharded_run}", "eval.part=val", procs(2), "path.outputs=outputs")
    loss = toy_loss(results.weights(sharded_run), part="val")
    assert results.metrics(evaluated)["val/loss"] == pytest.approx(loss, rel=1e-6)
    too_little_to_be_seen = ("optimizer.lr=1e-30", "trainer.max_steps=1", "logger=none")
    begun = train("recipe=toy", *too_little_to_be_seen, f"init_from={sharded_run}")
    results.assert_same(results.weights(begun), results.weights(sharded_run))


FAILS_TO_WRITE = """
import os
import resource

class Full:
    \"\"\"No file on rank 1 may grow beyond a few bytes while the checkpoint of step 3 is written.\"\"\"
    def on_train_step_end(self, report):
        if os.environ["RANK"] == "1" and report.step in (2, 4):
            limit = 64 if report.step == 2 else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
"""


def test_an_unwritable_part_costs_only_its_checkpoint(train: Run, tmp_path: Path) -> None:
    (tmp_path / "full.py").write_text(FAILS_TO_WRITE)
    steps = ("checkpoint.every_n_steps=3", "checkpoint.asynchronous=false", "trainer.max_steps=8")
    kept = ("checkpoint.save_top_k=-1", "checkpoint.monitor=null", "trainer.check_val_every_n_epoch=null")
    run = train(*SHORT, *SHARDED, procs(2), *steps, *kept, "+callbacks.full._target_=full.Full")
    assert results.saved_steps(run) == [6, 8]
    assert "rank 1: [Errno 27] File too large" in results.log(run)


def test_needs_of_whole_models_are_refused_early(train: Run, capfd: Capture) -> None:
    train("recipe=toy", *SHARDED, "callbacks=ema", procs(2), status=2)
    assert "callbacks.ema keeps a whole copy of the model" in capfd.readouterr().err
    train("recipe=toy_model_parallel", *SHARDED, procs(2), status=2)
    assert "topology.gpus_per_process=1" in capfd.readouterr().err

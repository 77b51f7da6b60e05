"""strategy=fsdp: a model spread over the processes ends as any other, and its checkpoints go wherever others go."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from framework.checkpoint import find, read_manifest
from tests.helpers import results
from tests.helpers.command import started_framework
from tests.helpers.loops import toy_loss

pytestmark = pytest.mark.multiproc

SHORT = ("recipe=toy", "logger=jsonl", "trainer.max_epochs=2", "optimizer=adam", "data.global_batch_size=40")
SPREAD = ("strategy=fsdp", "strategy.min_num_params=50")
STOPPED = 47


FAILS = '''
import os

class Fails:
    """Raises on rank 1 in the forward behind a step: a checkpoint was begun, and not all will come to write it."""
    def __init__(self, after): self.after, self.step = after, 0
    def on_fit_start(self, info): info.model.register_forward_hook(self.look)
    def on_train_step_end(self, report): self.step = report.step
    def look(self, model, inputs, output):
        if self.step == self.after and os.environ["RANK"] == "1":
            raise ValueError("a mistake")
'''


@pytest.fixture(scope="module")
def whole_run(train_once):
    return train_once(*SHORT)


@pytest.fixture(scope="module")
def spread_run(train_once):
    """On four processes; stopped in the second epoch."""
    return train_once(*SHORT, *SPREAD, "topology.procs_per_node=4", f"trainer.max_steps={STOPPED}")


@pytest.fixture
def stopped(spread_run, tmp_path):
    return Path(shutil.copytree(spread_run, tmp_path / "outputs" / "toy" / "copy", symlinks=True))


def test_every_process_writes_its_part(spread_run):
    directory = find(spread_run)
    files = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    assert files - {"manifest.json"} == read_manifest(directory).files.keys()
    assert {f"sharded/__{rank}_0.distcp" for rank in range(4)} < files
    assert "model.pt" not in files


@pytest.mark.parametrize(
    "overrides",
    [
        ("topology.procs_per_node=3",),
        ("topology.procs_per_node=2", "strategy=ddp"),
        ("topology.procs_per_node=1", "strategy=single"),
    ],
    ids=" ".join,
)
def test_it_goes_on_on_other_processes_with_another_strategy(train, whole_run, stopped, overrides):
    resumed = train(f"resume={stopped}", "trainer.max_steps=null", *overrides)
    assert f"Resuming after step {STOPPED}" in results.log(resumed)
    results.assert_same(results.weights(resumed), results.weights(whole_run), tolerance=1e-6)


def test_it_goes_on_from_a_run_that_was_whole(train, whole_run):
    stopped = train(*SHORT, "topology.procs_per_node=2", f"trainer.max_steps={STOPPED}")
    resumed = train(f"resume={stopped}", "trainer.max_steps=null", *SPREAD, "topology.procs_per_node=4")
    assert f"Resuming after step {STOPPED}" in results.log(resumed)
    assert read_manifest(find(resumed)).is_sharded
    results.assert_same(results.weights(resumed), results.weights(whole_run), tolerance=1e-6)


@pytest.mark.parametrize("procs", [1, 2])
def test_its_weights_are_evaluated_as_any_others(train, spread_run, procs):
    typed = ("eval.part=val", f"topology.procs_per_node={procs}", "path.outputs=outputs")
    evaluated = train("job=eval", f"checkpoint.path={spread_run}", *typed)
    loss = toy_loss(results.weights(spread_run), part="val")
    assert results.metrics(evaluated)["val/loss"] == pytest.approx(loss, rel=1e-6)


def test_a_new_run_begins_with_its_weights(train, spread_run):
    """No step is big enough to be seen."""
    begun = train(
        "recipe=toy", "logger=none", f"init_from={spread_run}", "optimizer.lr=1e-30", "trainer.max_steps=1", *SPREAD,
        "topology.procs_per_node=2",
    )  # fmt: skip
    results.assert_same(results.weights(begun), results.weights(spread_run))


@pytest.mark.exhaustive
def test_a_damaged_part_is_found(train, stopped):
    part = find(stopped) / "sharded" / "__2_0.distcp"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(bytes(content))
    resumed = train(f"resume={stopped}", "trainer.max_steps=50", "topology.procs_per_node=2", status=0)
    assert "sharded/__2_0.distcp has another checksum" in results.log(resumed)
    assert "Resuming after step 40" in results.log(resumed)


@pytest.mark.exhaustive
def test_a_failure_while_a_checkpoint_is_begun_is_told_at_once(train, tmp_path, capfd):
    """Nobody waits for those who won't come, and the checkpoint before is whole."""
    (tmp_path / "fails.py").write_text(FAILS)
    fails = ("+callbacks.fails._target_=fails.Fails", "+callbacks.fails.after=10", "checkpoint.every_n_steps=5")
    failed = train(*SHORT, *SPREAD, *fails, "topology.procs_per_node=3", status=1)
    assert "ValueError: a mistake" in capfd.readouterr().err
    assert results.run_file(failed)["status"] == "failed"
    assert results.pointed(failed, "last") == 5
    assert results.saved_steps(failed) == [5]


@pytest.mark.exhaustive
def test_it_stops_on_request_with_a_checkpoint(tmp_path):
    """The ranks agree on the step, and all write their part of it."""
    command = (
        "trainer.gpus=0",
        *SHORT,
        *SPREAD,
        "topology.procs_per_node=2",
        "trainer.max_epochs=1000",
        "logger=[jsonl,console]",
    )
    with started_framework(*command, cwd=tmp_path) as started:
        started.wait_for_output("epoch 0", timeout=60)
        started.process.send_signal(signal.SIGTERM)
        assert started.wait(timeout=60) == 75, started.printed()
        started.assert_all_gone()
    (stopped,) = tmp_path.glob("outputs/*/*")
    directory = find(stopped)
    assert read_manifest(directory).is_sharded
    assert results.saved_steps(stopped)[-1] == results.results(stopped)["steps"]


def test_averaged_weights_are_refused_before_the_processes_meet(train, capfd):
    train("recipe=toy", *SPREAD, "callbacks=ema", "topology.procs_per_node=2", status=2)
    assert "callbacks.ema keeps a whole copy of the model" in capfd.readouterr().err


def test_several_devices_of_a_process_are_refused(train, capfd):
    train("recipe=toy_model_parallel", *SPREAD, "topology.procs_per_node=2", status=2)
    assert "topology.gpus_per_process=1" in capfd.readouterr().err

"""A run that was stopped goes on in its directory and ends as if it had never been stopped."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import results
from tests.helpers.command import started_framework

SHORT = ("recipe=toy", "logger=[jsonl,tensorboard]", "trainer.max_epochs=2", "trainer.limit_test_batches=0")
SLEEPER = '''
import time
from pathlib import Path

class Sleeper:
    """Sleeps after a step, the first time it is there: long enough to be interrupted."""
    def __init__(self, after): self.after = after
    def on_train_step_end(self, report):
        if report.step == self.after and not Path("slept").exists():
            Path("slept").touch()
            time.sleep(300)
'''


def training(run_dir: Path) -> dict[str, Any]:
    """What of a checkpoint decides how training goes on."""
    state = results.saved(run_dir)
    return {"model": state["model"], "progress": state["training"]["progress"], "generators": state["generators"]}


@pytest.mark.multiproc
@pytest.mark.parametrize("procs", [1, 2])
def test_an_interrupted_run_ends_as_an_uninterrupted_one(train, tmp_path, procs):
    """Ctrl-C in the middle of the second epoch: after step 131, all up to 130 being logged, the last checkpoint 126."""
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    every = ("checkpoint.every_n_steps=7", "trainer.log_every_n_steps=2", "trainer.val_check_interval=10", "seed=1")
    processes = (f"topology.procs_per_node={procs}", "data.global_batch_size=20")
    overrides = (*SHORT, *every, *processes, "checkpoint.monitor=null")
    sleeper = ("+callbacks.sleeper._target_=sleeper.Sleeper", "+callbacks.sleeper.after=131")
    command = ("trainer.gpus=0", *overrides, *sleeper)
    with started_framework(*command, cwd=tmp_path) as started:
        deadline = time.monotonic() + 60
        while not (tmp_path / "slept").exists():
            assert started.process.poll() is None, started.printed()
            assert time.monotonic() < deadline, started.printed()
            time.sleep(0.02)
        started.process.send_signal(signal.SIGINT)
        assert started.wait(timeout=15) == 130
        started.assert_all_gone()
    (stopped,) = tmp_path.glob("outputs/*/*")
    assert results.pointed(stopped, "last") == 126
    assert results.run_file(stopped)["status"] == "interrupted"
    assert max(results.curve(stopped, "train/loss")) == max(results.curve(stopped, "val/loss")) == 130
    assert [event.step for event in results.events(stopped).Scalars("val/loss")][-1] == 130
    resumed = train(f"resume={stopped}")
    whole = train(*overrides)

    one, other = training(whole), training(resumed)
    results.assert_same(other["model"], one["model"])
    assert other["progress"] == one["progress"] == {"epoch": 2, "step": 160, "samples": 0}
    assert len(one["generators"]) == procs
    for mine, wanted in zip(other["generators"], one["generators"], strict=True):
        assert torch.equal(mine["cpu"], wanted["cpu"])
    assert results.curve(resumed, "val/loss") == results.curve(whole, "val/loss")
    losses = results.curve(whole, "train/loss")
    assert results.curve(resumed, "train/loss") == {
        step: pytest.approx(loss, rel=1e-5) for step, loss in losses.items()
    }
    assert results.repeated(resumed) == {}
    for name in ("train/loss", "val/loss"):
        shown = [event.step for event in results.events(resumed).Scalars(name)]
        assert shown == list(results.curve(whole, name))
    record = results.run_file(resumed)
    assert record["status"] == "finished"
    assert [run["status"] for run in record["earlier"]] == ["interrupted"]


@pytest.fixture(scope="module")
def whole_run(train_once):
    return train_once(*SHORT)


@pytest.mark.multiproc
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_a_run_goes_on_with_another_number_of_processes(train, whole_run, before, after):
    stopped = train(*SHORT, "data.global_batch_size=20", f"topology.procs_per_node={before}", "trainer.max_steps=93")
    resumed = train(f"resume={stopped}", f"topology.procs_per_node={after}", "trainer.max_steps=null")
    assert resumed == stopped
    results.assert_same(results.weights(resumed), results.weights(whole_run), tolerance=1e-6)
    assert f"the checkpoint is of {before} ranks, this run has {after}" in results.log(resumed)
    log = results.log(resumed, rank=after - 1)
    assert f"world size {after}" in log


@pytest.mark.parametrize(
    "overrides",
    [("optimizer=adamw",), ("optimizer=sgd_momentum", "optimizer.lr=0.001", "trainer.accumulate_grad_batches=3")],
    ids=" ".join,
)
def test_optimizers_go_on_with_their_state(train, overrides):
    common = (*SHORT, *overrides)
    whole, stopped = train(*common), train(*common, "trainer.max_steps=33")
    resumed = train(f"resume={stopped}", "trainer.max_steps=null")
    results.assert_same(results.weights(resumed), results.weights(whole))


def test_dropout_goes_on_with_its_generators(train):
    short = ("trainer.limit_train_batches=4", "trainer.max_epochs=2", "trainer.limit_test_batches=0")
    common = ("recipe=digits", "logger=none", "scheduler=none", *short)
    whole, stopped = train(*common), train(*common, "trainer.max_steps=3")
    resumed = train(f"resume={stopped}", "trainer.max_steps=null")
    results.assert_same(results.weights(resumed), results.weights(whole))


def test_a_run_is_prolonged(train, whole_run):
    prolonged = train(*SHORT, "trainer.max_epochs=1")
    train(f"resume={prolonged}", "trainer.max_epochs=2")
    results.assert_same(results.weights(prolonged), results.weights(whole_run))
    assert results.curve(prolonged, "train/loss") == results.curve(whole_run, "train/loss")
    # What was typed is kept for the next time.
    assert results.pointed(train(f"resume={prolonged}"), "last") == 160


def test_a_run_that_was_stopped_before_its_first_checkpoint_begins_anew(train, whole_run):
    stopped = train(*SHORT, "checkpoint.enabled=false", "trainer.max_steps=5")
    resumed = train(f"resume={stopped}", "checkpoint.enabled=true", "trainer.max_steps=null")
    assert "no checkpoint yet" in results.log(resumed)
    results.assert_same(results.weights(resumed), results.weights(whole_run))
    assert results.repeated(resumed) == {}

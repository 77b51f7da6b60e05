"""Early stopping, averaged weights, and observers of a user's own, through the command."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from recipes.toy import ToyModel
from tests.helpers import results
from tests.helpers.loops import plain_loop, toy_batches, toy_loss

SHORT = ("recipe=toy", "logger=jsonl", "trainer.limit_train_batches=10", "trainer.limit_test_batches=0")

# Early stopping: with such a min_delta only the first validation counts as better.

STOPPING = (
    *SHORT,
    "callbacks=early_stopping",
    "callbacks.early_stopping.patience=2",
    "callbacks.early_stopping.min_delta=1e6",
)


@pytest.mark.multiproc
def test_early_stopping_stops_all_ranks_and_says_why(train):
    run_dir = train(*STOPPING, "topology.procs_per_node=2")
    found = results.results(run_dir)
    assert (found["steps"], found["epochs"]) == (30, 3)
    assert "EarlyStopping: val/loss did not improve in 2 evaluations" in found["ended_by"]
    assert results.run_file(run_dir)["status"] == "finished"
    assert results.pointed(run_dir, "last") == 30


def test_early_stopping_is_resumed(train):
    stopped = train(*STOPPING, "trainer.max_epochs=2")
    assert "max_epochs" in results.results(stopped)["ended_by"]
    resumed = train(f"resume={stopped}", "trainer.max_epochs=10")
    assert results.results(resumed)["steps"] == 30


def test_early_stopping_of_an_unknown_metric_is_refused(train, capsys):
    train(*STOPPING, "callbacks.early_stopping.monitor=val/los", status=2)
    assert "callbacks.early_stopping.monitor=val/los" in (printed := capsys.readouterr().err)
    assert "Use one of val/loss." in printed


# EMA

DECAY = 0.8
AVERAGING = (*SHORT, "callbacks=ema", f"callbacks.ema.decay={DECAY}", "trainer.max_epochs=3")


@pytest.fixture
def averaged_run(shared_run):
    return shared_run(*AVERAGING)


@pytest.fixture(scope="module")
def expected() -> dict[int, dict[str, dict[str, Tensor]]]:
    """Step → the weights trained on and their average, of a plain loop."""
    found: dict[int, dict[str, dict[str, Tensor]]] = {}
    average: dict[str, Tensor] = {}

    def note(model: ToyModel) -> None:
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for name, tensor in weights.items():
            average[name] = DECAY * average[name] + (1 - DECAY) * tensor if found else tensor
        found[len(found) + 1] = {"trained": weights, "average": dict(average)}

    with torch.random.fork_rng(devices=[]):
        plain_loop(toy_batches(epochs=3, batches=10), after_step=note)
    return found


def test_the_average_is_evaluated_and_saved_separately(averaged_run, expected):
    for pointer in ("best", "last"):
        step = results.pointed(averaged_run, pointer)
        state = results.saved(averaged_run, pointer)
        results.assert_same(state["model"], expected[step]["average"], tolerance=1e-6)
        results.assert_same(state["training"]["model"], expected[step]["trained"])
        assert results.differ(expected[step]["average"], expected[step]["trained"])
    wanted = {step: toy_loss(expected[step]["average"], part="val") for step in (10, 20, 30)}
    losses = results.curve(averaged_run, "val/loss")
    assert losses == {step: pytest.approx(loss, rel=1e-5) for step, loss in wanted.items()}


def test_a_resumed_average_is_exact(train, averaged_run):
    resumed = train(f"resume={train(*AVERAGING, 'trainer.max_steps=17')}", "trainer.max_steps=null")
    one = results.saved(averaged_run)
    other = results.saved(resumed)
    results.assert_same(other["model"], one["model"])
    results.assert_same(other["training"]["model"], one["training"]["model"])


# A user's own

OBSERVERS = '''
import json, os
from pathlib import Path
from framework import Stop, Text

class Notes:
    """A callback of every hook; asks on one rank to stop after a step."""
    def __init__(self, rank, stop_after):
        self.rank, self.stop_after, self.lines, self.steps = rank, stop_after, [], 0
    def on_fit_start(self, info):
        self.lines.append(["start", info.start_step, info.total_steps, info.steps_per_epoch, self.steps])
    def on_train_step_end(self, info):
        self.steps += 1
        self.lines.append(["step", info.step, info.epoch, info.global_count, round(float(info.loss), 6)])
        if os.environ["RANK"] == str(self.rank) and info.step == self.stop_after:
            return Stop("Notes: enough")
    def on_validation_end(self, info):
        self.lines.append(["val", info.step, info.epoch, sorted(info.metrics)])
    def on_fit_end(self):
        self.lines.append(["end"])
        Path(f"notes_{os.environ['RANK']}.json").write_text(json.dumps(self.lines))
    def state_dict(self): return {"steps": self.steps}
    def load_state_dict(self, state): self.steps = state["steps"]

class Lines:
    """A logger that writes what it receives as lines of a file in the run directory."""
    def __init__(self, run_dir, prefix="line"):
        self.file = open(run_dir.path / f"lines_{os.environ['RANK']}", "a")
        self.prefix = prefix
    def log(self, values, *, step, epoch):
        for name, value in values.items():
            if isinstance(value, Text):
                print(self.prefix, name, len(value.text), file=self.file)
        numbers = sorted(name for name, value in values.items() if isinstance(value, float))
        if numbers:
            print(self.prefix, step, epoch, *numbers, file=self.file)
    def close(self): print("closed", file=self.file); self.file.close()
'''
OBSERVED = (
    *SHORT,
    "trainer.max_epochs=2",
    "trainer.log_every_n_steps=5",
    "+callbacks.notes._target_=observers.Notes",
    "+logger.lines._target_=observers.Lines",
    "+logger.lines.prefix=mine",
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "observers.py").write_text(OBSERVERS)
    return tmp_path


def notes(folder, rank=0) -> list[list[Any]]:
    found: list[list[Any]] = json.loads((folder / f"notes_{rank}.json").read_text())
    return found


def test_an_own_callback_and_logger_see_everything(train, folder):
    run_dir = train(*OBSERVED, "+callbacks.notes.rank=0", "+callbacks.notes.stop_after=null")
    lines = notes(folder)
    assert lines[0] == ["start", 0, 20, 10, 0]
    assert lines[-1] == ["end"]
    validations = [line for line in lines if line[0] == "val"]
    assert validations == [["val", 10, 0, ["val/loss"]], ["val", 20, 1, ["val/loss"]]]
    steps = [line for line in lines if line[0] == "step"]
    for step, line in enumerate(steps, start=1):
        assert line[1:4] == [step, (step - 1) // 10, 20]
    assert len(steps) == 20
    mean = sum(line[4] for line in steps[:5]) / 5
    assert results.curve(run_dir, "train/loss")[5] == pytest.approx(mean, rel=1e-5)
    training = "train/grad_norm train/loss train/lr train/samples_per_s train/steps_per_s train/tflop_per_s"
    # Logged from the second time on.
    timed = f"time/backward time/callbacks time/data time/forward time/optimizer {training}"
    # Once a second there is the memory, too.
    lines = (run_dir / "lines_0").read_text().replace("device/memory_gb ", "").splitlines()
    assert lines.pop(0).startswith("mine summary ")
    assert lines == [
        f"mine config {len((run_dir / 'config.yaml').read_text())}",
        f"mine 5 0 {training}",
        f"mine 10 0 {timed}",
        "mine 10 0 val/loss",
        f"mine 15 1 {timed}",
        f"mine 20 1 {timed}",
        "mine 20 1 val/loss",
        "closed",
    ]


def test_a_callback_stops_the_run_and_is_resumed(train, folder):
    stopped = train(*OBSERVED, "+callbacks.notes.rank=0", "+callbacks.notes.stop_after=13")
    assert results.results(stopped)["steps"] == 13
    assert results.results(stopped)["ended_by"] == "Notes: enough"
    train(f"resume={stopped}")
    assert notes(folder)[0] == ["start", 13, 20, 10, 13]


@pytest.mark.multiproc
@pytest.mark.parametrize(("log_every", "end"), [(5, 5), (1000, 10)])
def test_one_rank_stops_all_at_the_same_step(train, folder, log_every, end):
    """Asked for after step 3; the ranks agree when they log, and at the end of the epoch at the latest."""
    rank_1 = ("topology.procs_per_node=2", "+callbacks.notes.rank=1", "+callbacks.notes.stop_after=3")
    # Without validation, a difference between ranks is noticed at the end only.
    unseen = ("trainer.check_val_every_n_epoch=null", "checkpoint=none")
    run_dir = train(*OBSERVED, *rank_1, *unseen, f"trainer.log_every_n_steps={log_every}")
    assert results.results(run_dir)["steps"] == end
    for rank in range(2):
        assert [line[1] for line in notes(folder, rank) if line[0] == "step"] == list(range(1, end + 1))
    assert results.results(run_dir)["ended_by"] == "Notes: enough"
    assert not (run_dir / "lines_1").exists()


# The order of hooks

EVERY = """
from pathlib import Path
from framework import Stop

class Every:
    def __init__(self, stop=None, stop_before=None): self.lines, self.stop, self.stop_before = [], stop, stop_before
    def on_train_epoch_start(self, info):
        self.lines.append(["epoch start", info.epoch, info.step])
        return Stop("enough") if info.epoch == self.stop_before else None
    def on_before_optimizer_step(self, optimizer):
        gradients = [each.grad for group in optimizer.param_groups for each in group["params"]]
        self.lines.append(["before step", str(sum(float(each.square().sum()) for each in gradients) ** 0.5)])
    def on_train_step_end(self, info): self.lines.append(["step", info.step])
    def on_validation_start(self, info): self.lines.append(["validation start", info.epoch, info.step])
    def on_validation_end(self, info): self.lines.append(["validation end", info.epoch, info.step])
    def on_train_epoch_end(self, info):
        self.lines.append(["epoch end", info.epoch, info.step])
        return Stop("enough") if info.epoch == self.stop else None
    def on_fit_end(self): Path("every").write_text(repr(self.lines))
    def state_dict(self): return {"lines": self.lines}
    def load_state_dict(self, state): self.lines = [*map(list, state["lines"]), ["resumed"]]
"""
HOOKED = (
    "recipe=toy",
    "logger=jsonl",
    "trainer.limit_train_batches=3",
    "trainer.limit_test_batches=0",
    "trainer.max_epochs=2",
    "trainer.log_every_n_steps=1",
    "+callbacks.every._target_=every.Every",
)


def hooked(folder) -> list[list[Any]]:
    found: list[list[Any]] = ast.literal_eval((folder / "every").read_text())
    return found


@pytest.mark.parametrize(
    "overrides",
    [
        ("trainer.precision=16-mixed",),
        pytest.param(("topology.procs_per_node=2", "data.global_batch_size=20"), marks=pytest.mark.multiproc),
    ],
    ids=["scaled", "two processes"],
)
def test_hooks_run_in_order_and_once_after_resuming(train, tmp_path, overrides):
    (tmp_path / "every.py").write_text(EVERY)
    run_dir = train(*HOOKED, *overrides)
    lines = hooked(tmp_path)
    norms = [norm for line in lines if line[0] == "before step" and math.isfinite(norm := float(line[1]))]
    curve: Mapping[int, float | None] = results.curve(run_dir, "train/grad_norm")
    logged = [norm for norm in curve.values() if norm is not None]
    assert norms == pytest.approx(logged, abs=1e-4)
    steps = [line for line in lines if line[0] != "before step"]
    one = [["epoch start", 0, 0], ["step", 1], ["step", 2], ["step", 3]]
    one += [["validation start", 0, 3], ["validation end", 0, 3], ["epoch end", 0, 3]]
    two = [["epoch start", 1, 3], ["step", 4], ["step", 5], ["step", 6]]
    two += [["validation start", 1, 6], ["validation end", 1, 6], ["epoch end", 1, 6]]
    assert steps == one + two
    for stop in (3, 4):
        part = train(*HOOKED, *overrides, f"trainer.max_steps={stop}")
        train(f"resume={part}", "trainer.max_steps=6")
        assert [line for line in hooked(tmp_path) if line != ["resumed"]] == lines


EPOCH_START = """
import torch

class Stage:
    '''Sets what the epoch needs, in the model, which no checkpoint keeps.'''
    def on_fit_start(self, info): self.model = info.model
    def on_train_epoch_start(self, info):
        self.model.stage = info.epoch
        with open("starts", "a") as file: file.write(f"{info.epoch} {info.step} {info.resumed} ")
    def on_train_step_end(self, info):
        with open("stages", "a") as file: file.write(f"{self.model.stage} ")

class Changes:
    '''Changes what a checkpoint holds.'''
    count = 0
    def on_fit_start(self, info): self.model, self.optimizer = info.model, info.optimizer
    def on_train_epoch_start(self, info):
        self.count += 1
        for group in self.optimizer.param_groups: group["lr"] *= 0.5
        self.optimizer.state.clear()
        with torch.no_grad():
            for parameter in self.model.parameters(): parameter.mul_(0.9).add_(0.1 / self.count)
    def state_dict(self): return {"count": self.count}
    def load_state_dict(self, state): self.count = state["count"]

class Saves:
    '''Saves what is read by other programs only.'''
    def on_train_epoch_start(self, info): pass
    def state_dict(self): return {"labels": ["cat", "dog"]}
"""


@pytest.mark.parametrize(
    "overrides",
    [
        ("optimizer=adamw",),
        pytest.param(("topology.procs_per_node=2", "data.global_batch_size=20"), marks=pytest.mark.multiproc),
        pytest.param(
            ("topology.procs_per_node=2", "strategy=fsdp", "data.global_batch_size=20"), marks=pytest.mark.exhaustive
        ),
    ],
    ids=["one process", "two processes", "sharded"],
)
def test_a_resume_repeats_the_start_of_its_epoch(train, tmp_path, overrides):
    """What the hook sets up is there again; what the checkpoint holds isn't changed twice."""
    (tmp_path / "own.py").write_text(EPOCH_START)
    callbacks = (
        "+callbacks.stage._target_=own.Stage",
        "+callbacks.changes._target_=own.Changes",
        "+callbacks.saves._target_=own.Saves",
    )
    given = [each for each in HOOKED if "every." not in each]
    is_alone = overrides[0].startswith("optimizer")
    whole = train(*given, *overrides, *callbacks)
    stages = (tmp_path / "stages").read_text()
    if is_alone:
        assert stages == "0 0 0 1 1 1 "
    for stop, repeated in ((2, "0 2 True 1 3 False "), (3, "1 3 False "), (5, "1 5 True ")):
        (tmp_path / "stages").unlink()
        part = train(*given, *overrides, *callbacks, f"trainer.max_steps={stop}")
        (tmp_path / "starts").unlink()
        run_dir = train(f"resume={part}", "trainer.max_steps=6")
        if is_alone:
            assert (tmp_path / "starts").read_text() == repeated
            assert (tmp_path / "stages").read_text() == stages
        results.assert_same(results.weights(run_dir), results.weights(whole))


@pytest.mark.parametrize("stop", ["stop=0", "stop_before=1"])
def test_a_stop_between_two_epochs(train, tmp_path, stop):
    (tmp_path / "every.py").write_text(EVERY)
    run_dir = train(*HOOKED, f"+callbacks.every.{stop}")
    assert (results.results(run_dir)["steps"], results.results(run_dir)["ended_by"]) == (3, "enough")


def test_another_answer_than_stop_is_refused(train, tmp_path, capsys):
    (tmp_path / "yes.py").write_text("class Yes:\n    def on_train_step_end(self, info): return True\n")
    train(*SHORT, "+callbacks.yes._target_=yes.Yes", status=2)
    assert "Yes.on_train_step_end returned True. Return framework.Stop(reason)" in capsys.readouterr().err


def test_a_name_that_the_framework_logs_is_refused(train, tmp_path, capsys):
    code = "from framework import Log\nclass Rate:\n    def on_train_step_end(self, info): return Log({'lr': 3.0})\n"
    (tmp_path / "rate.py").write_text(code)
    train(*SHORT, "+callbacks.rate._target_=rate.Rate", status=2)
    assert "A callback logs 'lr', and the framework logs train/lr itself." in capsys.readouterr().err


CLOSING = """
class Falls:
    def on_train_step_end(self, info):
        if info.step == 3:
            raise ValueError("the real failure")

class Closes:
    def on_fit_start(self, info):
        pass

    def close(self):
        print("closed", flush=True)

class FailsToClose(Closes):
    def close(self):
        raise OSError("close failed")
"""


@pytest.mark.parametrize(
    ("falls", "exception"), [(True, "ValueError: the real failure"), (False, "OSError: close failed")]
)
def test_a_failing_close_hides_no_failure(train, tmp_path, falls, exception):
    (tmp_path / "closing.py").write_text(CLOSING)
    named = [f"+callbacks.{name}._target_=closing.{name}" for name in ("FailsToClose", "Closes", "Falls")]
    run_dir = train(*SHORT, "trainer.max_steps=5", *(named if falls else named[:2]), status=1)
    failure = json.loads((run_dir / "failure.json").read_text())["first"]
    assert failure["exception"] == exception
    log = results.log(run_dir)
    assert "FailsToClose.close failed" in log
    # The other callbacks are closed all the same.
    assert "closed" in log

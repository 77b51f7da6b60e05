"""State of tasks and callbacks that differs between ranks, through the command."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import results
from tests.helpers.internals import fingerprints

OWN = """
import os
import torch
from framework import StepOutput

class Carried:
    \"\"\"Adds to the input the mean that this rank saw last, as truncated backpropagation carries a hidden state.\"\"\"
    state_is_per_rank = True
    def __init__(self): self.hidden = torch.zeros(1)
    def training_step(self, model, batch):
        x, y = batch
        loss = (model(x + self.hidden) - y).square().mean()
        self.hidden = x.mean().reshape(1)
        return StepOutput(loss, len(x))
    def validation_step(self, model, batch):
        x, y = batch
        return StepOutput((model(x) - y).square().mean(), len(x))
    def state_dict(self): return {"steps": 1, "hidden": self.hidden}
    def load_state_dict(self, state): self.hidden = state["hidden"]

class Undeclared(Carried):
    state_is_per_rank = False

class Seen:
    def __init__(self, same=False): self.seen, self.same = [], same
    def on_train_step_end(self, report): self.seen.append(0 if self.same else int(os.environ["RANK"]))
    def on_fit_start(self, info): print("seen", self.seen, flush=True)
    def state_dict(self): return {"seen": {"ranks": self.seen}}
    def load_state_dict(self, state): self.seen = state["seen"]["ranks"]

class SeenPerRank(Seen):
    state_is_per_rank = True

class SeenByFirst(Seen):
    state_is_rank_zero = True
"""
TWO = (
    "recipe=toy",
    "logger=jsonl",
    "trainer.limit_train_batches=10",
    "trainer.limit_test_batches=0",
    "trainer.max_epochs=2",
    "topology.procs_per_node=2",
)
CARRIED = (*TWO, "task._target_=own.Carried", "~task.loss", "~task.metrics")
pytestmark = pytest.mark.multiproc


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def test_state_of_each_rank_is_resumed(train):
    whole = train(*CARRIED)
    resumed = train(f"resume={train(*CARRIED, 'trainer.max_steps=13')}", "trainer.max_steps=null")
    results.assert_same(results.saved(resumed)["model"], results.saved(whole)["model"])


def test_state_of_each_rank_needs_as_many_processes(train, capfd):
    own = (*TWO, "+callbacks.seen._target_=own.SeenPerRank", "trainer.max_steps=3")
    run = train(*own)
    capfd.readouterr()
    train(f"resume={run}", "trainer.max_steps=5", "topology.procs_per_node=1", status=2)
    printed = capfd.readouterr().err
    assert "the state of callbacks.seen of 2 processes" in printed
    assert "this run has 1" in printed
    train(f"resume={run}", "trainer.max_steps=4")
    assert "seen [1, 1, 1]" in results.log(run, 1)
    train(f"resume={run}", "trainer.max_steps=5", "topology.procs_per_node=1", "~callbacks.seen")


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        (("+callbacks.seen._target_=own.Seen",), "callbacks.seen differs between ranks: after step 3"),
        (("task._target_=own.Undeclared", "~task.loss", "~task.metrics"), "different values of hidden (ranks 0 | 1)"),
    ],
)
def test_an_undeclared_difference_is_refused_by_name(train, capfd, typed, named):
    run = train(*TWO, *typed, "trainer.max_steps=3", status=1)
    printed = capfd.readouterr().err
    assert named in printed
    assert "state_is_per_rank = True" in printed
    assert results.saved_steps(run) == []


def test_equal_states_resume_on_any_number(train):
    own = ("+callbacks.seen._target_=own.SeenPerRank", "+callbacks.seen.same=true", "trainer.max_steps=3")
    run = train(*TWO, *own)
    train(f"resume={run}", "trainer.max_steps=5", "topology.procs_per_node=1")
    assert "seen [0, 0, 0]" in results.log(run, 0)


def test_clocks_and_rank_zero_states_may_differ(train):
    own = ("+callbacks.timer._target_=framework.callbacks.Timer", "+callbacks.timer.duration=1000")
    run = train(*TWO, *own, "+callbacks.seen._target_=own.SeenByFirst", "trainer.max_steps=3")
    train(f"resume={run}", "trainer.max_steps=5", "topology.procs_per_node=1")
    assert "seen [0, 0, 0]" in results.log(run, 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["fsdp", "local_sgd", "allreduce"])
def test_state_of_each_rank_with_other_strategies(train, capfd, strategy):
    own = (*TWO, f"strategy={strategy}", "+callbacks.seen._target_=own.SeenPerRank")
    run = train(*own, "trainer.max_steps=3")
    train(f"resume={run}", "trainer.max_steps=5", "topology.procs_per_node=1", status=2)
    assert "the state of callbacks.seen of 2 processes" in capfd.readouterr().err
    train(f"resume={run}", "trainer.max_steps=5")
    assert "seen [1, 1, 1]" in results.log(run, 1)


def fingerprint_of(value: Any) -> Any:
    return fingerprints({"x": None}, {"x": {"key": value}}, replicas_differ=False)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, OrderedDict(b=2, a=1)),
        ([1, 2], [2, 1]),
        (1, 1.0),
        (torch.tensor([1, 2, 3]), torch.tensor([1, 3, 2])),
        (torch.arange(6).reshape(2, 3), torch.arange(6).reshape(3, 2)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int32)),
        (["ab", "c"], ["a", "bc"]),
        # Simple sums of products are the same.
        (torch.tensor([3, 0]), torch.tensor([0, 1])),
        (torch.tensor([1.5, -2.0]).double(), torch.tensor([-1.5, 2.0]).double()),
        (torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, -2.0, 3.0, -4.0])),
        (bytearray(b"a"), bytearray(b"b")),
        (torch.float32, torch.float64),
    ],
)
def test_different_values_have_different_fingerprints(one: Any, other: Any) -> None:
    assert fingerprint_of(one) != fingerprint_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1, 2}, {2, 1}),
        (float("nan"), float("nan")),
        (torch.arange(6).reshape(2, 3).t(), torch.arange(6).reshape(2, 3).t().contiguous()),
        (torch.arange(9)[1:].byte(), torch.arange(1, 9).byte()),
        (torch.zeros(0), torch.zeros(0)),
        (None, None),
    ],
)
def test_equal_values_have_equal_fingerprints(one: Any, other: Any) -> None:
    assert fingerprint_of(one) == fingerprint_of(other)

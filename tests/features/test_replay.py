"""`job=replay`: the steps of a run, made again, give what the run had, bit for bit; the run isn't touched."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.features.replay_cases import BAD_SAMPLE, Noisy
from tests.helpers import results
from tests.helpers.internals import compose
from tests.helpers.recipes import write_recipe

CASES = "tests.features.replay_cases"
RECIPE: dict[str, Any] = {
    "defaults": [{"override /optimizer": "adam"}, {"override /logger": "jsonl"}],
    "model": {"_target_": f"{CASES}.Noisy"},
    "task": {"_target_": f"{CASES}.Classify"},
    "data": {"datasets": {"_target_": f"{CASES}.points"}, "global_batch_size": 12},
    "trainer": {
        "max_epochs": None,
        "max_steps": 14,
        "log_every_n_steps": 4,
        "val_check_interval": 6,
        "limit_test_batches": 0,
    },
    "checkpoint": {"every_n_steps": 5, "every_n_epochs": None, "save_top_k": -1},
}


@dataclass(frozen=True)
class Answer:
    status: int
    content: dict[str, Any]
    out: str
    err: str


Replayed = Callable[..., Answer]


@pytest.fixture
def replayed(fork_server, tmp_path, monkeypatch, capfd) -> Replayed:
    """Exit status, replay.json and what is printed. The run must be as it was."""
    monkeypatch.chdir(tmp_path)

    def replay(run: Path, *overrides: str) -> Answer:
        before = contents(run)
        capfd.readouterr()
        status = compose.main(["job=replay", f"run={run}", *overrides], fork_server=fork_server)
        printed = capfd.readouterr()
        assert contents(run) == before
        files = sorted(tmp_path.glob("outputs/*/replay/*/replay.json"))
        content = json.loads(files[-1].read_text()) if files else {}
        return Answer(status, content, printed.out, printed.err)

    return replay


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of all files; job=replay writes nothing to a run."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def assert_exact(answer: Answer) -> None:
    check = answer.content["check"]
    assert check["same_place"]
    assert check["tolerance"] is None
    assert check["equal"], check["values"]
    assert "train/loss" in check["values"] or len(check["values"]) > 1
    assert answer.status == 0


@pytest.fixture
def trained(train, tmp_path) -> Callable[..., Path]:
    """Train the recipe with other sections; return the run directory."""

    def run(*overrides: str, status: int = 0, **sections: Any) -> Path:
        write_recipe(tmp_path, "noisy", {**RECIPE, **sections})
        return train("recipe=noisy", *overrides, status=status)

    return run


@dataclass(frozen=True, kw_only=True)
class Kind:
    sections: dict[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    step: int = 7
    processes: int = 1


LIGHTNING = {
    "defaults": [{"override /task": "lightning"}, {"override /logger": "jsonl"}],
    "task": {},
    "model": {"_target_": "tests.features.lightning_cases.Classifier"},
    "data": {
        "datasets": {
            "_target_": "framework.tasks.lightning.datamodule",
            "module": {"_target_": "tests.features.lightning_cases.Data"},
        }
    },
}
OBJECTIVES = {
    "defaults": [{"override /optimizer": None}, {"override /logger": "jsonl"}],
    "model": {"_target_": "tests.features.optimizer_cases.Heads"},
    "task": {"_target_": "tests.features.optimizer_cases.Alternating"},
    "data": {"datasets": {"_target_": "tests.features.optimizer_cases.points"}, "global_batch_size": 12},
    "optimizer": {
        "copy": {"_target_": "torch.optim.Adam", "params": "^(body|copy)", "lr": 0.02},
        "guess": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9},
    },
}
STREAM = {"data": {"datasets": {"_target_": f"{CASES}.stream"}, "global_batch_size": 12, "shuffle": False}}
KINDS = {
    "accumulation on two processes": Kind(
        overrides=("topology.procs_per_node=2", "trainer.accumulate_grad_batches=2"), processes=2
    ),
    "objectives": Kind(sections=OBJECTIVES, step=9),
    "a stream": Kind(sections=STREAM, step=12),
    "a sampler": Kind(overrides=("+data.sampler={_target_: framework.samplers.RandomSampler}",)),
    "an average of weights": Kind(overrides=("callbacks=ema",), step=13),
    "a Lightning module": Kind(sections=LIGHTNING),
    "the first step": Kind(step=1),
}


@pytest.mark.multiproc
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_step_is_repeated_exactly(trained, replayed, kind):
    run = trained(*kind.overrides, **kind.sections)
    answer = replayed(run, f"step={kind.step}")
    assert_exact(answer)
    assert answer.content["processes"] == kind.processes
    (step,) = answer.content["steps"]
    assert step["step"] == kind.step
    assert {micro["rank"] for micro in step["micro_batches"]} == set(range(kind.processes))


def test_a_run_without_checkpoints_is_repeated_from_the_start(trained, replayed):
    run = trained("checkpoint=none")
    answer = replayed(run, "step=6")
    assert_exact(answer)
    assert answer.content["checkpoint"] is None
    assert "Repeating 8 steps" in answer.out
    assert "from the start" in answer.out


@pytest.fixture
def noisy(trained):
    """A run on two processes."""
    return trained("topology.procs_per_node=2")


@pytest.mark.multiproc
def test_another_number_of_processes_gets_the_same_batches(trained, replayed):
    sections = {"model": {"_target_": "torch.nn.Linear", "in_features": 8, "out_features": 4}}
    sections["data"] = {"datasets": {"_target_": f"{CASES}.points"}, "batch_size": 6}
    run = trained("topology.procs_per_node=2", **sections)
    answer = replayed(run, "step=7", "topology.procs_per_node=1")
    check = answer.content["check"]
    assert answer.status == 0
    assert not check["same_place"]
    assert 0 < check["tolerance"] < 1e-3
    assert "the run had 2 processes, here 1 on cpu" in answer.out
    (micro,) = answer.content["steps"][0]["micro_batches"]
    assert len(micro["indices"]) == 12


@pytest.mark.multiproc
def test_several_steps_and_one_rank_are_shown(noisy, replayed):
    answer = replayed(noisy, "step=8", "replay.steps=2", "rank=1")
    assert_exact(answer)
    assert [step["step"] for step in answer.content["steps"]] == [7, 8]
    names = answer.content["steps"][0]["micro_batches"][1]["names"]
    assert names[0].startswith("point_")
    assert names[0] in answer.out
    assert answer.content["steps"][0]["micro_batches"][0]["names"][0] not in answer.out


def test_a_step_that_gave_nan_shows_where(trained, replayed):
    bad = {"datasets": {"_target_": f"{CASES}.points", "bad": True}, "global_batch_size": 12, "shuffle": False}
    run = trained(data=bad, status=1)
    answer = replayed(run, "step=4")
    assert answer.status == 0
    (step,) = answer.content["steps"]
    assert BAD_SAMPLE in step["micro_batches"][0]["indices"]
    assert step["micro_batches"][0]["outputs"][0]["loss"] == "nan"
    modules = {module["name"]: module for module in step["modules"]}
    assert modules["one"]["activations"]["inf"] + modules["one"]["activations"]["nan"] > 0
    assert {weight["gradient_norm"] for weight in step["weights"]} == {"nan"}
    (before,) = replayed(run, "step=3").content["steps"]
    assert before["modules"][0]["activations"]["nan"] == 0


def test_anomalies_name_the_operation(trained, replayed):
    bad = {"datasets": {"_target_": f"{CASES}.points", "bad": True}, "global_batch_size": 12, "shuffle": False}
    run = trained(data=bad, status=1)
    answer = replayed(run, "step=4", "replay.detect_anomaly=true")
    (step,) = answer.content["steps"]
    assert "returned nan values" in step["anomaly"]
    assert "cross_entropy(logits, y)" in step["anomaly"]


@pytest.mark.multiproc
def test_the_file_of_a_step_needs_only_torch(noisy, replayed, tmp_path):
    answer = replayed(noisy, "step=7", "rank=1", "replay.output=step.pt")
    assert_exact(answer)
    step = torch.load(tmp_path / "step.pt", weights_only=False)
    model = Noisy()
    model.load_state_dict(step["model"])
    micro = step["micro_batches"][0]
    torch.set_rng_state(micro["generators"]["cpu"])
    loss = cross_entropy(model(micro["batch"][0]), micro["batch"][1])
    assert loss.item() == micro["loss"]
    assert loss.item() == answer.content["steps"][0]["micro_batches"][1]["outputs"][0]["loss"]


@pytest.mark.multiproc
def test_one_rank_alone_gives_the_same_loss_in_this_process(noisy, replayed, own_state, monkeypatch):
    calls = []
    forward = Noisy.forward

    def watched(model: Noisy, x: Tensor) -> Tensor:
        calls.append(os.getpid())
        return forward(model, x)

    # Ranks of the fork server have imported the class already.
    monkeypatch.setattr(Noisy, "forward", watched)
    answer = replayed(noisy, "step=7", "rank=1", "launcher=in_process")
    assert answer.status == 0
    alone = answer.content["alone"]
    assert alone["equal"]
    assert alone["rank"] == 1
    assert all(weight["gradient_norm"] > 0 for weight in alone["weights"] if "norm" not in weight["name"])
    assert calls == [os.getpid()]


def test_what_was_in_force_at_each_step_is_used(trained, train, replayed):
    """No checkpoint is left of the first settings, so both parts are repeated, each with its own."""
    run = trained("trainer.max_steps=8", "checkpoint.save_last_k=1", "checkpoint.save_top_k=1")
    train(f"resume={run}", "optimizer.lr=0.5", "trainer.max_steps=14")
    assert results.saved_steps(run) == [14]
    for step in (3, 12):
        answer = replayed(run, f"step={step}")
        assert_exact(answer)
        assert answer.content["from_step"] == 0


def test_a_trial_of_a_sweep_is_repeated(train, trained, tmp_path, replayed, fork_server):
    write_recipe(tmp_path, "noisy", RECIPE)
    assert compose.main(["-m", "recipe=noisy", "trainer.gpus=0", "optimizer.lr=0.1,0.01"], fork_server=fork_server) == 0
    (trial,) = tmp_path.glob("outputs/multirun/*/1")
    answer = replayed(trial, "step=7")
    assert_exact(answer)


def test_changed_code_is_said(trained, replayed, tmp_path, monkeypatch):
    own = tmp_path / "own_model.py"
    own.write_text("from torch import nn\n\n\ndef model():\n    return nn.Linear(8, 4)\n")
    monkeypatch.syspath_prepend(tmp_path)
    run = trained(model={"_target_": "own_model.model"})
    own.write_text("from torch import nn\n\n\ndef model():\n    return nn.Linear(8, 4).requires_grad_()\n")
    answer = replayed(run, "step=7")
    assert_exact(answer)
    assert answer.content["changes"] == ["the module own_model has changed"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("step=15",), "has made 14 steps"),
        ((), "job=replay needs step"),
        (("step=0",), "step=0: must be"),
        (("step=3", "replay.steps=4"), "there are only 3 steps"),
        (("step=3", "rank=1"), "ranks count from 0, and the run had 1"),
        (("step=3", "replay.output=step.txt"), "must end with .pt"),
        (("job=train", "step=3"), "step=3 is for job=replay"),
    ],
)
def test_wrong_requests_are_refused(trained, replayed, overrides, said, tmp_path):
    run = trained()
    answer = replayed(run, *overrides)
    assert answer.status == 2
    assert said in answer.err
    assert not list(tmp_path.glob("outputs/*/replay"))

"""`job=replay`: the steps of a run, made again, give what the run had, bit for bit; the run isn't touched."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.features.replay_cases import BAD_SAMPLE, Noisy
from tests.helpers import guards, results
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
def replayed(fork_server, monkeypatch, capfd) -> Replayed:
    """Exit status, replay.json and what is printed. The run must be as it was."""

    def replay(run: Path, *overrides: str) -> Answer:
        outputs = next(folder for folder in run.parents if folder.name == "outputs")
        monkeypatch.chdir(outputs.parent)
        before = contents(run)
        replays = set(outputs.glob("*/replay/*/replay.json"))
        capfd.readouterr()
        if not any(text.startswith("run=") for text in overrides):
            overrides = (f"run={run}", *overrides)
        status = compose.main(["job=replay", *overrides], fork_server=fork_server)
        printed = capfd.readouterr()
        assert contents(run) == before
        content = {}
        for file in set(outputs.glob("*/replay/*/replay.json")) - replays:
            content = json.loads(file.read_text())
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
    assert check["values"]
    assert answer.status == 0


@pytest.fixture
def trained(train, tmp_path) -> Callable[..., Path]:
    """Train the recipe with other sections; return the run directory."""

    def run(*overrides: str, status: int = 0, **sections: Any) -> Path:
        write_recipe(tmp_path, "noisy", {**RECIPE, **sections})
        return train("recipe=noisy", *overrides, status=status)

    return run


@pytest.fixture(scope="module")
def noisy(fork_server, tmp_path_factory) -> Path:
    """A run on two processes of two micro-batches each, with an average of weights."""
    folder = tmp_path_factory.mktemp("noisy")
    write_recipe(folder, "noisy", RECIPE)
    overrides = ("topology.procs_per_node=2", "trainer.accumulate_grad_batches=2", "callbacks=ema", "trainer.gpus=0")
    with guards.no_leaks(owns_state=True), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert compose.main(["recipe=noisy", *overrides], fork_server=fork_server) == 0
    (run,) = folder.glob("outputs/noisy/*")
    return run


# What it shows


@pytest.mark.multiproc
def test_steps_are_repeated_exactly_and_shown(noisy, replayed):
    answer = replayed(noisy, "step=8", "replay.steps=2", "rank=1")
    assert_exact(answer)
    assert set(answer.content["check"]["values"]) == {"train/loss", "train/accuracy"}
    assert "Repeating 3 steps" in answer.out
    assert "step_00000005" in answer.out
    first, last = answer.content["steps"]
    assert (first["step"], last["step"]) == (7, 8)

    places = [(micro["rank"], micro["micro_batch"]) for micro in first["micro_batches"]]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    samples = [index for micro in first["micro_batches"] for index in micro["indices"]]
    assert len(set(samples)) == 12
    for micro in first["micro_batches"]:
        assert micro["names"] == [f"point_{index}.png" for index in micro["indices"]]
        # Only those of rank 1 are printed.
        assert (micro["names"][0] in answer.out) == (micro["rank"] == 1)

    modules = {module["name"]: module for module in first["modules"]}
    assert list(modules) == ["one", "norm", "relu", "dropout", "two", ""]
    assert modules["relu"]["activations"]["zeros"] > 0
    assert modules["one"]["activations"]["count"] == modules["one"]["gradients"]["count"] == 12 * 16
    for weight in first["weights"]:
        assert weight["gradient_norm"] >= 0
        assert weight["update_norm"] > 0


def test_a_step_that_gave_nan_shows_where(trained, replayed):
    bad = {"datasets": {"_target_": f"{CASES}.points", "bad": True}, "global_batch_size": 12, "shuffle": False}
    run = trained(data=bad, status=1)
    answer = replayed(run, "step=4", "replay.steps=2")
    assert answer.status == 0
    before, step = answer.content["steps"]
    assert BAD_SAMPLE in step["micro_batches"][0]["indices"]
    assert step["micro_batches"][0]["outputs"][0]["loss"] == "nan"
    assert step["inputs"]["inf"] == 8
    assert step["modules"][0]["activations"]["nan"] > 0
    assert {weight["gradient_norm"] for weight in step["weights"]} == {"nan"}
    assert before["inputs"]["inf"] == 0
    assert before["modules"][0]["activations"]["nan"] == 0
    assert before["micro_batches"][0]["outputs"][0]["loss"] > 0

    answer = replayed(run, "step=4", "replay.detect_anomaly=true")
    assert answer.status == 1
    anomaly = answer.content["steps"][0]["anomaly"]
    assert "returned nan values" in anomaly
    assert "cross_entropy(logits, y)" in anomaly


@pytest.mark.multiproc
def test_the_file_of_a_step_needs_only_torch(noisy, replayed, tmp_path):
    # A run can be named as job=runs lists it.
    answer = replayed(noisy, f"run={noisy.name}", "step=7", "rank=1", f"replay.output={tmp_path}/step.pt")
    assert_exact(answer)
    step = torch.load(tmp_path / "step.pt", weights_only=False)
    model = Noisy()
    model.load_state_dict(step["model"])
    micro = step["micro_batches"][0]
    torch.set_rng_state(micro["generators"]["cpu"])
    loss = cross_entropy(model(micro["batch"][0]), micro["batch"][1])
    assert loss.item() == micro["loss"]
    assert loss.item() == answer.content["steps"][0]["micro_batches"][2]["outputs"][0]["loss"]


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
    assert any(weight["gradient_norm"] > 0 for weight in alone["weights"])
    assert calls == [os.getpid()] * 2


# Whatever the run is


@dataclass(frozen=True, kw_only=True)
class Kind:
    sections: dict[str, Any]
    step: int = 7


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
    "data": {
        "datasets": {"_target_": "tests.features.optimizer_cases.points"},
        "global_batch_size": 12,
        "sampler": {"_target_": "framework.samplers.RandomSampler"},
    },
    "optimizer": {
        "copy": {"_target_": "torch.optim.Adam", "params": "^(body|copy)", "lr": 0.02},
        "guess": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9},
    },
}
STREAM = {"data": {"datasets": {"_target_": f"{CASES}.stream"}, "global_batch_size": 12, "shuffle": False}}
KINDS = {
    "objectives and a sampler": Kind(sections=OBJECTIVES, step=9),
    "a stream": Kind(sections=STREAM, step=12),
    "a Lightning module": Kind(sections=LIGHTNING),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_step_of_any_kind_is_repeated_exactly(trained, replayed, kind):
    run = trained(**kind.sections)
    answer = replayed(run, f"step={kind.step}")
    assert_exact(answer)
    (step,) = answer.content["steps"]
    assert step["step"] == kind.step
    assert {micro["names"] for micro in step["micro_batches"]} == {None}


def test_what_was_in_force_at_each_step_is_used(trained, train, replayed):
    """No checkpoint is left of the first settings, so both parts are repeated, each with its own."""
    run = trained("trainer.max_steps=7", "checkpoint.save_last_k=1", "checkpoint.save_top_k=1", "seed=3")
    train(f"resume={run}", "optimizer.lr=0.5", "trainer.max_steps=14", "topology.procs_per_node=2")
    assert results.saved_steps(run) == [14]
    answer = replayed(run, "step=10")
    assert_exact(answer)
    assert answer.content["checkpoint"] is None
    assert answer.content["processes"] == 2
    assert "from the start" in answer.out
    (first,) = replayed(run, "step=1").content["steps"]
    assert len(first["micro_batches"]) == 1


def test_steps_after_a_rollback_have_the_samples_that_they_had(trained, train, replayed):
    """Until the run is resumed, its last step is the one that was rolled back."""
    bad = {"datasets": {"_target_": f"{CASES}.points", "bad": True}, "global_batch_size": 12, "shuffle": False}
    guard = ("callbacks=[spike_guard]", "callbacks.spike_guard.action=rollback")
    run = trained(*guard, "checkpoint.every_n_steps=2", "trainer.max_steps=7", data=bad, status=1)
    (step,) = replayed(run, "step=4").content["steps"]
    assert BAD_SAMPLE in step["micro_batches"][0]["indices"]
    assert step["micro_batches"][0]["outputs"][0]["loss"] == "nan"

    train(f"resume={run}")
    answer = replayed(run, "step=6", "replay.steps=4")
    assert_exact(answer)
    samples = [step["micro_batches"][0]["indices"][0] for step in answer.content["steps"]]
    # The fourth batch is left out, and an epoch has five.
    assert samples == [24, 48, 0, 12]


@pytest.mark.exhaustive
def test_a_run_of_an_earlier_version_is_repeated_as_far_as_its_records_allow(trained, train, replayed):
    """It doesn't say what was in force from which step, but its checkpoints do."""
    run = trained("trainer.max_steps=7", "seed=3")
    train(f"resume={run}", "optimizer.lr=0.5", "trainer.max_steps=14")
    record = results.run_file(run)
    for name in ("segments", "modules"):
        del record[name]
    (run / "run.json").write_text(json.dumps(record))

    answer = replayed(run, "step=4")
    assert_exact(answer)
    (change,) = answer.content["changes"]
    assert "It isn't recorded what was in force at step 4: the configuration is that of step_00000005" in change
    assert f"Warning: {change}" in answer.out
    assert_exact(replayed(run, "step=12"))

    # A checkpoint that is damaged is passed over.
    (run / "checkpoints" / "step_00000010" / "model.pt").write_bytes(b"damaged")
    answer = replayed(run, "step=12")
    assert_exact(answer)
    assert answer.content["checkpoint"] == "step_00000007"


@pytest.mark.exhaustive
def test_a_trial_of_a_sweep_is_repeated(tmp_path, replayed, fork_server, monkeypatch):
    write_recipe(tmp_path, "noisy", RECIPE)
    monkeypatch.chdir(tmp_path)
    assert compose.main(["-m", "recipe=noisy", "trainer.gpus=0", "optimizer.lr=0.1,0.01"], fork_server=fork_server) == 0
    (trial,) = tmp_path.glob("outputs/multirun/*/1")
    assert_exact(replayed(trial, "step=7"))


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


def test_code_that_gives_other_numbers_is_named(trained, replayed, tmp_path, monkeypatch):
    own = tmp_path / "own_model.py"
    own.write_text("from torch import nn\n\n\ndef model():\n    return nn.Linear(8, 4)\n")
    monkeypatch.syspath_prepend(tmp_path)
    run = trained(model={"_target_": "own_model.model"})
    # It draws its weights later.
    own.write_text(own.read_text().replace("    return", "    nn.Linear(1, 1)\n    return"))
    answer = replayed(run, "step=3")
    assert answer.status == 1
    assert not answer.content["check"]["equal"]
    assert "Not as logged at step 4, bit for bit" in answer.out
    assert answer.content["changes"] == ["the module own_model has changed"]


# What can't be repeated


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("step=15",), "has made 14 steps"),
        ((), "job=replay needs step"),
        (("step=0",), "step=0: must be"),
        (("step=3", "replay.steps=4"), "there are only 3 steps"),
        (("step=3", "rank=2"), "ranks count from 0, and the run had 2"),
        (("step=3", "launcher=in_process"), "Type rank=0"),
        (("step=3", "rank=0", "launcher=in_process", "strategy=fsdp"), "strategy=fsdp: the processes exchange"),
        (("step=3", "replay.output=step.txt"), "must end with .pt"),
        (("job=train", "step=3"), "step=3 is for job=replay"),
    ],
)
def test_wrong_requests_are_refused(noisy, replayed, overrides, said):
    answer = replayed(noisy, *overrides)
    assert answer.status == 2
    assert said in answer.err
    assert not answer.content

"""Tasks that copy the model (a momentum encoder, a reference model) begin, resume and evaluate with the right copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.optim import SGD

from tests.features.copying_task_cases import parts
from tests.features.optimizer_cases import BATCH, Guess
from tests.helpers import results
from tests.helpers.recipes import write_recipe

CASES = "tests.features.copying_task_cases"
TWO = ("trainer.gpus=0", "topology.procs_per_node=2")


@pytest.fixture
def pretrained(tmp_path) -> dict[str, torch.Tensor]:
    """Write the weights of a model to pretrained.pt, under other names; return them."""
    torch.manual_seed(5)
    weights = Guess().double().state_dict()
    torch.save({f"net.{name}": tensor for name, tensor in weights.items()}, tmp_path / "pretrained.pt")
    return weights


@pytest.fixture
def run(tmp_path, train):
    """Train with this task on the points, with these further parts; return the run directory."""

    def run(task: str, *overrides: str, also: tuple[str, ...] = (), status: int = 0) -> Path:
        recipe: dict[str, Any] = {
            "defaults": [{"override /optimizer": "sgd"}, {"override /logger": "jsonl"}],
            "model": {"_target_": "tests.features.optimizer_cases.Guess"},
            "task": {"_target_": f"{CASES}.{task}"},
            "data": {
                "datasets": {"_target_": f"{CASES}.parts", "_args_": list(also)},
                "global_batch_size": BATCH,
                "shuffle": False,
            },
            "trainer": {"precision": "64-true", "max_epochs": 2},
            "optimizer": {"lr": 0.1},
        }
        write_recipe(tmp_path, "copying", recipe)
        return train("recipe=copying", *overrides, status=status)

    return run


PRETRAINED = ("init_from=pretrained.pt", "init.rename={net.:''}")


def test_a_copy_begins_with_the_weights_of_init_from(run, pretrained):
    trained = run("Follower", *PRETRAINED, "+task.momentum=1.0")
    state = results.saved(trained)["training"]["task"]
    found = {name.removeprefix("target."): tensor for name, tensor in state.items()}
    results.assert_same(found, pretrained)


def test_a_part_that_init_skips_is_copied_as_it_was_built(run, pretrained):
    fresh = results.saved(run("Follower", "+task.momentum=1.0"))["training"]["task"]
    state = results.saved(run("Follower", *PRETRAINED, "init.skip=[bias]", "+task.momentum=1.0"))["training"]["task"]
    for name, tensor in state.items():
        expected = fresh[name] if "bias" in name else pretrained[name.removeprefix("target.")]
        assert torch.equal(tensor, expected), name


def with_a_reference(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights that a plain loop trains near those that it begins with."""
    model = Guess().double()
    model.load_state_dict(weights)
    reference = Guess().double()
    reference.load_state_dict(weights)
    optimizer = SGD(model.parameters(), lr=0.1)
    x, y = (tensor.double() for tensor in parts().train.tensors)
    for _ in range(2):
        for inputs, targets in zip(x.split(BATCH), y.split(BATCH), strict=True):
            guesses = model(inputs)
            loss = mse_loss(guesses, targets) + mse_loss(guesses, reference(inputs).detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.state_dict()


def test_a_reference_that_is_not_saved_is_the_same_after_a_resume(run, train, pretrained):
    stopped = run("Reference", *PRETRAINED, "trainer.max_steps=3")
    resumed = train(f"resume={stopped}", "trainer.max_steps=null")
    results.assert_same(results.weights(resumed), with_a_reference(pretrained), tolerance=1e-12)


@pytest.mark.multiproc
@pytest.mark.parametrize("processes", [(), TWO], ids=["one process", "two"])
def test_an_evaluation_has_the_state_of_the_task(run, train, processes):
    trained = run("Follower", *processes, also=("val",))
    evaluated = train("job=eval", f"checkpoint.path={trained}", "eval.part=val")
    assert results.metrics(evaluated) == pytest.approx(results.metrics(trained), rel=1e-12)


def test_the_test_has_the_state_of_the_task_with_the_best_weights(run, train):
    """The loss that is monitored is the lowest when the copy hasn't moved yet, as with this learning rate."""
    trained = run(
        "Follower", "checkpoint.monitor=val/loss", "optimizer.lr=5.0", "trainer.max_epochs=4", also=("val", "test")
    )
    assert results.results(trained)["best"]["step"] < results.results(trained)["steps"]
    evaluated = train("job=eval", f"checkpoint.path={trained}/checkpoints/best")
    tested = results.results(trained)["test"]["metrics"]
    assert results.metrics(evaluated) == pytest.approx(tested, rel=1e-12)


def test_another_task_evaluates_without_that_state(run, train):
    trained = run("Follower", also=("val",))
    other = train(
        "job=eval", f"checkpoint.path={trained}", "eval.part=val", f"task._target_={CASES}.Other", "trust=true"
    )
    assert results.metrics(other)["val/loss"] != pytest.approx(results.metrics(trained)["val/loss"])


def test_without_data_to_evaluate_no_validation_step_is_needed(run):
    assert results.results(run("Reference"))["steps"] == 8


@pytest.mark.parametrize("part", ["val", "test"])
def test_data_to_evaluate_needs_a_validation_step(run, capfd, part):
    run("Reference", also=(part,), status=2)
    said = f"task: Reference has no method validation_step, and there is data to evaluate: {part}."
    assert said in capfd.readouterr().err


def test_an_evaluation_needs_a_validation_step(run, train, capfd):
    trained = run("Reference")
    train("job=eval", f"checkpoint.path={trained}", "eval.part=train", status=2)
    said = "task: Reference has no method validation_step, and there is data to evaluate: train."
    assert said in capfd.readouterr().err

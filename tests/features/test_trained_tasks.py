"""Parameters of the task are trained, saved and evaluated with the model's: the weights of a plain loop."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from tests.features.optimizer_cases import BATCH, SIZE, Guess, points
from tests.features.trained_task_cases import LearnedWeights, WithCritic, loss_of
from tests.helpers import results
from tests.helpers.internals import GlobalOrder, seed_everything
from tests.helpers.recipes import write_recipe

CASES = "tests.features.trained_task_cases"
STEPS = 9
EXHAUSTIVE = (pytest.mark.multiproc, pytest.mark.exhaustive)


@pytest.fixture
def run(tmp_path, train):
    """Train with this task; return the run directory."""

    def run(task: str, *overrides: str, status: int = 0) -> Path:
        recipe = {
            "defaults": [{"override /optimizer": "sgd_momentum"}, {"override /logger": "jsonl"}],
            "model": {"_target_": "tests.features.optimizer_cases.Guess"},
            "task": {"_target_": f"{CASES}.{task}"},
            "data": {"datasets": {"_target_": "tests.features.optimizer_cases.points"}, "global_batch_size": BATCH},
            "trainer": {"precision": "64-true", "max_epochs": None, "max_steps": STEPS, "log_every_n_steps": 3},
            "optimizer": {"lr": 0.1, "groups": [{"name": "task", "params": "^task\\.", "lr": 0.3}]},
        }
        write_recipe(tmp_path, "trained", recipe)
        return train("recipe=trained", *overrides, status=status)

    return run


def plain_loop(name: str) -> dict[str, Tensor]:
    """Return the model's and the task's weights after `STEPS`."""
    seed_everything(0, rank=0)
    model = Guess()
    task = LearnedWeights(model=model) if name == "LearnedWeights" else WithCritic()
    held = nn.Module()
    if isinstance(task, LearnedWeights):
        held.log_variances = task.log_variances
    else:
        held.critic = task.critic
        held.scale = task.scale
    both = nn.ModuleDict({"model": model, "task": held}).double()
    groups: list[Any] = [{"params": model.parameters()}, {"params": held.parameters(), "lr": 0.3}]
    optimizer = SGD(groups, lr=0.1, momentum=0.9)
    data = [tensor.double() for tensor in points().train.tensors]
    order = GlobalOrder(SIZE, seed=0, shuffle=True)
    batches = itertools.chain.from_iterable(order.indices(epoch)[:].split(BATCH) for epoch in itertools.count())
    for indices in itertools.islice(batches, STEPS):
        loss_of(task, model, (data[0][indices], data[1][indices])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name.removeprefix("model."): value for name, value in both.state_dict().items()}


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="one"),
        pytest.param(("trainer.accumulate_grad_batches=3",), id="accumulated", marks=pytest.mark.exhaustive),
        pytest.param(("topology.procs_per_node=2",), id="2 ddp", marks=pytest.mark.multiproc),
        pytest.param(("topology.procs_per_node=3", "strategy=ddp"), id="3 ddp", marks=EXHAUSTIVE),
        pytest.param(("topology.procs_per_node=2", "strategy=allreduce"), id="2 allreduce", marks=EXHAUSTIVE),
    ],
)
@pytest.mark.parametrize("task", ["LearnedWeights", "WithCritic"])
def test_task_parameters_train_as_in_a_plain_loop(run, train, task, overrides):
    whole = run(task, *overrides)
    results.assert_same(results.weights(whole), plain_loop(task), tolerance=1e-12)
    part = run(task, "trainer.max_steps=5", *overrides)
    train(f"resume={part}", f"trainer.max_steps={STEPS}")
    results.assert_same(results.weights(part), results.weights(whole), tolerance=0)


def test_the_average_of_task_parameters_is_evaluated(run, train):
    """The learned weights are averaged as the model's are, and an evaluation of the checkpoint has them."""
    run_dir = run("LearnedWeights", "callbacks=ema", "callbacks.ema.decay=0.5", "trainer.max_steps=8")
    saved = results.weights(run_dir)["task.log_variances"]
    trained = results.saved(run_dir)["training"]["model"]["task.log_variances"]
    assert not torch.equal(saved, trained)
    assert not torch.equal(trained, torch.zeros_like(trained))
    evaluated = train("job=eval", f"checkpoint.path={run_dir}", "eval.part=val")
    assert results.metrics(evaluated)["val/loss"] == pytest.approx(results.metrics(run_dir)["val/loss"], rel=1e-12)


def test_a_checkpoint_has_each_parameter_once(run):
    run_dir = run("LearnedWeights", "trainer.max_steps=1")
    assert results.saved(run_dir)["training"]["task"].keys() == {"steps", "frozen.weight", "frozen.bias"}
    assert "task.log_variances" in results.weights(run_dir)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("InAList", "InAList.critics contains a Linear with parameters that require gradients (weight, bias)"),
        ("LooseTensor", "LooseTensor.temperature has a tensor that requires gradients and isn't trained"),
    ],
)
def test_what_would_not_be_trained_is_refused(run, capfd, task, said):
    run(task, status=2)
    assert said in capfd.readouterr().err


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("task", "strategy", "said"),
    [
        ("WithCritic", "fsdp", "under strategy=fsdp only what the model's forward computes with is trained"),
        ("CallsItsOwn", "ddp", "The training step never called the `model` that it was given"),
    ],
)
def test_what_no_strategy_would_average_is_refused(run, capfd, task, strategy, said):
    run(task, "topology.procs_per_node=2", f"strategy={strategy}", status=2)
    assert said in capfd.readouterr().err

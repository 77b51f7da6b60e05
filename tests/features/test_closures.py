"""LBFGS and SAM: the weights of a plain loop, on any number of processes, and exact resuming."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.features.closure_cases import SAM, Weighted
from tests.features.optimizer_cases import BATCH, SIZE, Guess, points
from tests.helpers import results
from tests.helpers.internals import GlobalOrder, seed_everything
from tests.helpers.recipes import write_recipe

CASES = "tests.features.closure_cases"
STEPS = 7
LBFGS: dict[str, Any] = {"_target_": "torch.optim.LBFGS", "max_iter": 4, "line_search_fn": "strong_wolfe"}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "LBFGS": LBFGS,
    "SAM": {"_target_": f"{CASES}.SAM", "lr": 0.1, "closure": True},
}


@pytest.fixture
def run(tmp_path, train):
    """Train with this optimizer; return the run directory."""

    def run(optimizer: dict[str, Any], *overrides: str, noise: float = 0.0, status: int = 0) -> Path:
        recipe = {
            "defaults": [{"override /optimizer": None}, {"override /logger": "jsonl"}],
            "model": {"_target_": "tests.features.optimizer_cases.Guess"},
            "task": {"_target_": f"{CASES}.Weighted", "noise": noise},
            "data": {"datasets": {"_target_": "tests.features.optimizer_cases.points"}, "global_batch_size": BATCH},
            "trainer": {"precision": "64-true", "max_epochs": None, "max_steps": STEPS, "log_every_n_steps": 1},
            "optimizer": optimizer,
        }
        write_recipe(tmp_path, "closures", recipe)
        return train("recipe=closures", *overrides, status=status)

    return run


def plain_loop(name: str, *, noise: float = 0.0) -> tuple[dict[str, Tensor], list[float]]:
    """Return the weights after `STEPS`, and the loss of each step's first call."""
    seed_everything(0, rank=0)
    model = Guess().double()
    task = Weighted(noise)
    seed_everything(0, rank=0)
    optimizer: torch.optim.Optimizer = SAM(model.parameters(), lr=0.1)
    if name == "LBFGS":
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    data = [tensor.double() for tensor in points().train.tensors]
    order = GlobalOrder(SIZE, seed=0, shuffle=True)
    batches = itertools.chain.from_iterable(order.indices(epoch)[:].split(BATCH) for epoch in itertools.count())
    losses = []
    for indices in itertools.islice(batches, STEPS):
        calls: list[float] = []
        generator_state = torch.get_rng_state()

        def closure(batch=(data[0][indices], data[1][indices]), calls=calls, generator_state=generator_state):
            torch.set_rng_state(generator_state)
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = task.training_step(model, batch).loss
                loss.backward()
            calls.append(loss.item())
            return loss

        if name == "SAM":
            closure()
        optimizer.step(closure)
        losses.append(calls[0])
    return model.state_dict(), losses


@pytest.mark.parametrize(
    ("overrides", "tolerance"),
    [
        pytest.param((), 0.0, id="one"),
        pytest.param(("trainer.accumulate_grad_batches=3",), 1e-9, id="accumulated", marks=pytest.mark.exhaustive),
        pytest.param(
            ("topology.procs_per_node=2",), 1e-9, id="2 ddp", marks=[pytest.mark.multiproc, pytest.mark.exhaustive]
        ),
        pytest.param(
            ("topology.procs_per_node=3", "strategy=allreduce"), 1e-9, id="3 allreduce", marks=pytest.mark.multiproc
        ),
    ],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_closures_train_as_in_a_plain_loop_and_resume(run, train, name, overrides, tolerance):
    whole = run(OPTIMIZERS[name], *overrides)
    weights, losses = plain_loop(name)
    results.assert_same(results.weights(whole), weights, tolerance=tolerance)
    assert list(results.curve(whole, "train/loss").values()) == pytest.approx(losses, rel=1e-6)
    part = run(OPTIMIZERS[name], "trainer.max_steps=3", *overrides)
    train(f"resume={part}", f"trainer.max_steps={STEPS}")
    results.assert_same(results.weights(part), results.weights(whole))


def test_each_call_of_a_step_draws_the_same_numbers(run, train):
    """With other masks in each call, LBFGS would compare losses of different functions."""
    whole = run(LBFGS, noise=0.3)
    part = run(LBFGS, "trainer.max_steps=3", noise=0.3)
    train(f"resume={part}", f"trainer.max_steps={STEPS}")
    results.assert_same(results.weights(part), results.weights(whole))
    results.assert_same(results.weights(whole), plain_loop("LBFGS", noise=0.3)[0])


@pytest.mark.parametrize(
    ("optimizer", "overrides", "said"),
    [
        (LBFGS, ("trainer.precision=16-mixed",), "can't go with the scaled losses of trainer.precision=16-mixed"),
        ({"a": LBFGS | {"params": "^body"}, "b": LBFGS}, (), "LBFGS computes the loss in its step, so it must be the"),
        (LBFGS | {"closure": 3}, (), "optimizer.closure=3: must be true or false"),
        pytest.param(
            LBFGS,
            ("topology.procs_per_node=2", "strategy=fsdp"),
            "needs whole gradients each time, which strategy=fsdp doesn't give",
            marks=pytest.mark.multiproc,
        ),
    ],
)
def test_what_cannot_be_computed_again_is_refused(run, capfd, optimizer, overrides, said):
    run(optimizer, *overrides, status=2)
    assert said in capfd.readouterr().err

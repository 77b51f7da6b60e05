"""Train parts whose samples depend on the model: what is made after each step, resumed exactly, on any topology."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from recipes.cartpole import ActorCritic, play
from tests.helpers import results
from tests.helpers.documents import write_shown_files
from tests.helpers.internals import seed_everything
from tests.helpers.recipes import write_recipe
from tests.helpers.source import ROOT

pytestmark = pytest.mark.multiproc

CASES = "tests.features.source_cases"
UPDATES = 20
CARTPOLE = (
    "recipe=cartpole",
    "trainer.precision=64-true",
    "trainer.max_epochs=1",
    "data.datasets.max_moves=100",
    "optimizer.lr=0.003",
)


def cartpole_by_loop() -> dict[str, Tensor]:
    seed_everything(0, rank=0)
    model = ActorCritic().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for step in range(UPDATES):
        with torch.no_grad():
            episodes = play(model, [[0, step, place] for place in range(16)], max_moves=100, greedy=False)
        losses = []
        for states, actions, is_made in zip(*episodes, strict=True):
            length = int(is_made.sum())
            returns = torch.tensor([(1 - 0.99 ** (length - move)) / (1 - 0.99) / 50 for move in range(length)]).double()
            logits, values = model(states[:length])
            chosen = logits.log_softmax(dim=1)[torch.arange(length), actions[:length]]
            losses.append(smooth_l1_loss(values, returns, reduction="none") - (returns - values.detach()) * chosen)
        optimizer.zero_grad()
        torch.cat(losses).mean().backward()
        optimizer.step()
    return model.state_dict()


def test_cartpole_is_the_same_on_any_number_of_processes(train):
    one = train(*CARTPOLE)
    # The loop computes one episode after another, and Adam enlarges what that changes.
    results.assert_same(results.weights(one), cartpole_by_loop(), tolerance=1e-7)
    for ranks in (2, 3):
        run_dir = train(*CARTPOLE, f"topology.procs_per_node={ranks}")
        results.assert_same(results.weights(run_dir), results.weights(one), tolerance=1e-9)
        assert results.metrics(run_dir) == pytest.approx(results.metrics(one))


def write_cases(folder: Any) -> None:
    common = {"precision": "64-true", "max_epochs": 2}
    ppo = {
        "model": {"_target_": "recipes.cartpole.ActorCritic"},
        "task": {"_target_": f"{CASES}.PPO"},
        "data": {"datasets": {"_target_": f"{CASES}.rollouts"}, "global_batch_size": 6, "eval_batch_size": 4},
        "trainer": common,
        "optimizer": {"lr": 0.02},
    }
    mining = {
        "model": {"_target_": "torch.nn.Linear", "in_features": 6, "out_features": 2},
        "task": {"_target_": f"{CASES}.Classify"},
        # The last global batch of an epoch has 1 sample: the other processes have stand-ins.
        "data": {"datasets": {"_target_": f"{CASES}.hardest"}, "global_batch_size": 10},
        "trainer": common,
        "optimizer": {"lr": 0.5},
    }
    write_recipe(folder, "ppo", ppo)
    write_recipe(folder, "mining", mining)


@pytest.mark.parametrize(("recipe", "stop"), [("ppo", 14), ("mining", 7)])
def test_a_stopped_run_resumes_exactly(train, tmp_path, recipe, stop):
    """Within the second epoch: PPO in the third step of a rollout, whose states belong to the places of the batch."""
    write_cases(tmp_path)
    wholes = []
    for ranks in (1, 2, 3):
        on_ranks = (f"recipe={recipe}", f"topology.procs_per_node={ranks}")
        whole = train(*on_ranks)
        wholes.append(whole)
        results.assert_same(results.weights(whole), results.weights(wholes[0]), tolerance=1e-9)
        stopped = train(*on_ranks, f"+trainer.max_steps={stop}")
        same = train(f"resume={stopped}", "trainer.max_steps=null")
        results.assert_same(results.weights(same), results.weights(whole))
        other = train(f"resume={stopped}", "trainer.max_steps=null", f"topology.procs_per_node={ranks % 3 + 1}")
        results.assert_same(results.weights(other), results.weights(whole), tolerance=1e-9)
        if recipe == "mining":
            taken = [results.saved(run_dir)["training"]["source"]["taken"] for run_dir in (whole, other)]
            assert int(taken[0].sum()) == 2 * 41
            assert torch.equal(taken[0], taken[1])


def test_the_documented_source(train, tmp_path):
    write_shown_files(tmp_path, pages=[ROOT / "docs/data.md"])
    short = ["recipe=hardest", "model.dropout=0", "model.conv_dropout=0", "trainer.max_epochs=1"]
    short += ["trainer.limit_train_batches=4", "trainer.precision=64-true", "data.global_batch_size=30"]
    one = train(*short)
    two = train(*short, "topology.procs_per_node=2")
    results.assert_same(results.weights(two), results.weights(one), tolerance=1e-9)


def test_what_cannot_go_with_a_source_is_refused(train, tmp_path, capfd):
    two = "topology.procs_per_node=2"
    sampler = "data.sampler._target_=framework.samplers.SequentialSampler"
    train("recipe=cartpole", two, "strategy=fsdp", f"+{sampler}", "+trainer.overfit_batches=1", status=2)
    printed = capfd.readouterr().err
    for fact in (
        "CartPole is a framework.Source",
        "FSDP doesn't allow that",
        "data.sampler can't go",
        "overfit_batches",
    ):
        assert fact in printed
    train("recipe=cartpole", "job=tune", status=2)
    assert "job=tune repeats batches, which CartPole" in capfd.readouterr().err
    train("recipe=cartpole", "data.folds=5", "data.fold=0", status=2)
    assert "data.folds=5 can't go with a framework.Source" in capfd.readouterr().err

    run_dir = train("recipe=cartpole", "trainer.max_epochs=1", "trainer.limit_train_batches=1")
    train("job=eval", f"checkpoint.path={run_dir}", "eval.part=train", status=2)
    assert "can't be evaluated. Use the val or test part" in capfd.readouterr().err
    train("job=eval", f"checkpoint.path={run_dir}", "eval.part=val")

"""Losses that are means over tokens or sample weights: those of the whole global batch, however it is split."""

from __future__ import annotations

import re
from itertools import chain, islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from tests.features.weight_cases import BATCH, PADDING, SIZE, SampleWeights, Tagger, sequences
from tests.helpers import results
from tests.helpers.internals import GlobalOrder, compose, seed_everything
from tests.helpers.recipes import write_recipe

CASES = "tests.features.weight_cases"
STEPS = 9
CROSS_ENTROPY: dict[str, Any] = {"_target_": "torch.nn.CrossEntropyLoss", "ignore_index": PADDING}
CLASS_WEIGHTS = CROSS_ENTROPY | {"weight": {"_target_": "torch.tensor", "data": [0.5, 3.0, 1.0]}}
SUPERVISED = "framework.tasks.Supervised"
TASKS: dict[str, dict[str, Any]] = {
    "padding": {"_target_": SUPERVISED, "loss": CROSS_ENTROPY},
    "class weights": {"_target_": SUPERVISED, "loss": CLASS_WEIGHTS},
    "sample weights": {"_target_": f"{CASES}.SampleWeights"},
}


@pytest.fixture
def write(tmp_path):
    """Write a recipe with this task."""

    def write(task):
        recipe = {
            "defaults": [{"override /optimizer": "sgd_momentum"}, {"override /logger": "jsonl"}],
            "model": {"_target_": f"{CASES}.Tagger"},
            "task": task,
            "data": {"datasets": {"_target_": f"{CASES}.sequences"}, "global_batch_size": BATCH},
            "trainer": {"precision": "64-true", "max_epochs": None, "max_steps": STEPS, "log_every_n_steps": 3},
            "optimizer": {"lr": 0.3},
        }
        write_recipe(tmp_path, "padded", recipe)

    return write


@pytest.fixture
def run(write, train):
    """Train with this task; return the run directory."""

    def run(task, *overrides, status=0):
        write(task)
        return train("recipe=padded", *overrides, status=status)

    return run


def plain_loop(name: str) -> tuple[dict[str, Tensor], list[float], float]:
    """Return the weights, the mean loss of each three steps, and that of all samples after two epochs."""
    seed_everything(0, rank=0)
    model = Tagger().double()
    data = sequences().train
    order = GlobalOrder(SIZE, seed=0, shuffle=True)
    tokens = data.tensors[0].double()
    classes = data.tensors[1]
    optimizer = SGD(model.parameters(), lr=0.3, momentum=0.9)

    def mean(indices: Tensor) -> tuple[Tensor, float]:
        x = tokens[indices]
        y = classes[indices]
        if name == "sample weights":
            output = SampleWeights().training_step(model, (x, y))
            return output.loss, float(output.weight)  # type: ignore[arg-type]
        weight = torch.tensor(CLASS_WEIGHTS["weight"]["data"] if name == "class weights" else [1.0] * 3).double()
        loss = nn.functional.cross_entropy(model(x), y, weight, ignore_index=PADDING)
        return loss, float(weight[y[y != PADDING]].sum())

    losses: list[tuple[float, float]] = []
    batches = chain.from_iterable(order.indices(epoch)[:].split(BATCH) for epoch in range(3))
    for step, batch in enumerate(islice(batches, STEPS)):
        if step == 2 * SIZE // BATCH + 1:
            whole = mean(torch.arange(SIZE))[0].item()
        loss, weight = mean(batch)
        losses.append((loss.item(), weight))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    means = []
    for part in (losses[:3], losses[3:6], losses[6:]):
        total = sum(loss * weight for loss, weight in part)
        means.append(total / sum(weight for _, weight in part))
    return model.state_dict(), means, whole


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("data.eval_batch_size=1",), id="one"),
        pytest.param(("trainer.accumulate_grad_batches=5",), id="accumulated"),
        *(
            pytest.param(
                (f"topology.procs_per_node={ranks}", f"strategy={strategy}", "data.eval_batch_size=2", *others),
                id=f"{ranks} {strategy}",
                marks=[pytest.mark.multiproc, *([] if ranks == 2 else [pytest.mark.exhaustive])],
            )
            for ranks in (2, 3)
            for strategy, *others in (
                ("ddp", "trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=1e6"),
                ("fsdp",),
                ("allreduce",),
                ("pipeline", f"strategy.num_stages=2 strategy.num_microbatches={ranks}")
                if ranks == 2
                else ("butterfly",),
            )
        ),
    ],
)
@pytest.mark.parametrize("name", TASKS)
def test_weighted_losses_train_as_in_a_plain_loop(run, name, overrides):
    run_dir = run(TASKS[name], *" ".join(overrides).split())
    weights, means, whole = plain_loop(name)
    # Weights are summed in single precision.
    results.assert_same(results.weights(run_dir), weights, tolerance=1e-6)
    assert list(results.curve(run_dir, "train/loss").values()) == pytest.approx(means, rel=1e-5)
    assert results.curve(run_dir, "val/loss")[8] == pytest.approx(whole, rel=1e-5)


def test_micro_batches_without_weight_have_no_gradient(run):
    loss = CROSS_ENTROPY | {"weight": {"_target_": "torch.tensor", "data": [0.0, 1.0, 0.0]}}
    whole, split = (
        results.weights(run({"_target_": SUPERVISED, "loss": loss}, f"trainer.accumulate_grad_batches={number}"))
        for number in (1, 12)
    )
    results.assert_same(split, whole, tolerance=1e-6)


@pytest.mark.multiproc
def test_parity_finds_missing_weights(write, fork_server, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    short = ["recipe=padded", "job=parity", "trainer.gpus=0", "parity.processes=3", "parity.steps=3"]
    for task, status in (
        (TASKS["padding"], 0),
        (TASKS["sample weights"], 0),
        (TASKS["sample weights"] | {"has_weights": False}, 1),
    ):
        write(task)
        assert compose.main([*short, "trainer.precision=32-true"], fork_server=fork_server) == status, (
            capfd.readouterr()
        )


@pytest.mark.parametrize(
    ("task", "overrides", "said"),
    [
        ("Sometimes", (), "returned a StepOutput with"),
        ("Wrong", (), "a weight that is a tensor of shape \\(2,\\)"),
        pytest.param(
            "SampleWeights",
            ("strategy=local_sgd", "topology.procs_per_node=2"),
            "each process steps by itself",
            marks=pytest.mark.multiproc,
        ),
    ],
)
def test_wrong_weights_are_refused(run, capfd, task, overrides, said):
    run({"_target_": f"{CASES}.{task}"}, "trainer.num_sanity_val_steps=0", *overrides, status=2)
    assert re.search(said, capfd.readouterr().err)

"""Parameter groups, several optimizers and objectives: the weights of a plain loop, on any number of processes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from schedulefree import AdamWScheduleFree
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam

from tests.features.optimizer_cases import BATCH, SIZE, Heads, points
from tests.helpers import results
from tests.helpers.internals import GlobalOrder, compose, seed_everything
from tests.helpers.recipes import write_recipe

CASES = "tests.features.optimizer_cases"
HEAD = {"name": "head", "params": "^guess", "lr": 0.5}
GROUPED = {
    "_target_": "torch.optim.SGD",
    "lr": 0.1,
    "momentum": 0.9,
    "weight_decay": 0.3,
    "groups": [{"params": "ndim<2", "weight_decay": 0}, HEAD],
}
COSINE = {"_target_": "framework.optim.cosine", "total_steps": 30}
NAMED = {
    "copy": {"_target_": "torch.optim.Adam", "params": "^(body|copy)", "lr": 0.02},
    "guess": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9, "schedule": COSINE},
}


@pytest.fixture
def write(tmp_path):
    """Write a recipe with this section `optimizer`."""

    def write(optimizer, *, task="Single", freeze=(), callbacks=None):
        recipe = {
            "defaults": [{"override /optimizer": None}, {"override /logger": "jsonl"}],
            "model": {"_target_": f"{CASES}.Heads"} | ({"freeze": list(freeze)} if freeze else {}),
            "task": {"_target_": f"{CASES}.{task}"},
            "data": {"datasets": {"_target_": f"{CASES}.points"}, "global_batch_size": BATCH},
            "trainer": {"precision": "64-true", "max_epochs": None, "log_every_n_steps": 2, "limit_val_batches": 0},
            "optimizer": optimizer,
            "callbacks": callbacks or {},
            "scheduler": {"interval": "step"},
        }
        write_recipe(tmp_path, "heads", recipe)

    return write


@pytest.fixture
def run(write, train):
    """Train a recipe with this section `optimizer`; return the run directory."""

    def run(optimizer, *overrides, status=0, **options):
        write(optimizer, **options)
        return train("recipe=heads", *overrides, status=status)

    return run


def on_ranks(ranks, strategy, *marks):
    overrides = (f"topology.procs_per_node={ranks}", f"strategy={strategy}")
    return pytest.param(overrides, id=f"{ranks} {strategy}", marks=[pytest.mark.multiproc, *marks])


PROCESSES = [
    pytest.param((), id="one"),
    on_ranks(2, "ddp"),
    on_ranks(2, "fsdp"),
    on_ranks(2, "allreduce"),
    on_ranks(3, "ddp"),
    on_ranks(3, "fsdp", pytest.mark.exhaustive),
    on_ranks(3, "allreduce", pytest.mark.exhaustive),
]


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    data = points().train
    order = GlobalOrder(SIZE, seed=0, shuffle=True)
    epoch = 0
    tensors = [tensor.double() for tensor in data.tensors]
    while True:
        for indices in order.indices(epoch)[:].split(BATCH):
            yield tensors[0][indices], tensors[1][indices]
            steps -= 1
            if steps == 0:
                return
        epoch += 1


def heads() -> Heads:
    seed_everything(0, rank=0)
    return Heads().double()


def groups_loop(steps: int) -> dict[str, Tensor]:
    model = heads()
    flat = [each for each in model.parameters() if each.ndim < 2]
    rest = [model.body[0].weight, model.copy.weight]
    head = {"params": [model.guess.weight], "lr": 0.5}
    groups: list[Any] = [{"params": rest}, {"params": flat, "weight_decay": 0}, head]
    optimizer = SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.3)
    for x, y in batches(steps):
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def objectives_loop(steps: int) -> dict[str, Tensor]:
    model = heads()
    copying = Adam([*model.body.parameters(), *model.copy.parameters()], lr=0.02)
    guessing = SGD(model.guess.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        guessing, lambda step: (1 + torch.cos(torch.tensor(torch.pi * step / 30, dtype=torch.float64)).item()) / 2
    )
    for step, (x, y) in enumerate(batches(steps), start=1):
        mse_loss(model(x, "copy"), x).backward()
        copying.step()
        model.zero_grad()
        if step % 3 == 0:
            mse_loss(model(x), y).backward()
            guessing.step()
            schedule.step()
            model.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("overrides", PROCESSES)
def test_groups_train_as_in_a_plain_loop(run, overrides):
    unused = ("strategy.find_unused_parameters=true",) if "strategy=ddp" in overrides else ()
    run_dir = run(GROUPED, "trainer.max_steps=9", *overrides, *unused)
    results.assert_same(results.weights(run_dir), groups_loop(9), tolerance=1e-12)
    rates = {name: set(results.curve(run_dir, f"train/lr{name}").values()) for name in ("", "/0", "/head")}
    assert rates == {"": {0.1}, "/0": {0.1}, "/head": {0.5}}


BY_LAYER = {"_target_": f"{CASES}.by_layer", "lr": 0.2, "decay": 0.5}


def layers_loop(steps: int) -> dict[str, Tensor]:
    model = heads()
    rates = {model.guess: 0.2, model.copy: 0.1, model.body[1]: 0.05, model.body[0]: 0.025}
    optimizer = SGD([{"params": layer.parameters(), "lr": lr} for layer, lr in rates.items()], lr=0.2, momentum=0.9)
    for x, y in batches(steps):
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("overrides", [pytest.param((), id="one"), on_ranks(2, "fsdp")])
def test_a_target_may_make_its_groups_from_the_model(run, train, overrides):
    run_dir = run(BY_LAYER, "trainer.max_steps=4", *overrides)
    train(f"resume={run_dir}", "trainer.max_steps=9")
    results.assert_same(results.weights(run_dir), layers_loop(9), tolerance=1e-12)
    assert set(results.curve(run_dir, "train/lr/3").values()) == {0.025}
    # A new rate holds for all groups.
    train(f"resume={run_dir}", "trainer.max_steps=12", "optimizer.lr=0.02")
    assert results.curve(run_dir, "train/lr/3")[12] == pytest.approx(0.0025)


@pytest.mark.parametrize("overrides", PROCESSES)
def test_objectives_equal_a_plain_loop_and_resume_exactly(run, train, overrides):
    whole = run(NAMED, "trainer.max_steps=14", *overrides, task="Alternating")
    results.assert_same(results.weights(whole), objectives_loop(14), tolerance=1e-12)
    part = run(NAMED, "trainer.max_steps=7", *overrides, task="Alternating")
    train(f"resume={part}", "trainer.max_steps=14")
    results.assert_same(results.weights(part), results.weights(whole), tolerance=0)
    names = ("train/copy/loss", "train/guess/loss", "train/guess/first", "train/lr/copy", "train/lr/guess")
    for name in names:
        assert results.curve(part, name).items() >= results.curve(whole, name).items()
    # Those of steps 3 and 9 are in the logs of the next even steps.
    assert list(results.curve(whole, "train/guess/loss")) == [4, 6, 10, 12]
    assert list(results.curve(whole, "train/copy/loss")) == [2, 4, 6, 8, 10, 12, 14]


@pytest.mark.parametrize("overrides", [pytest.param((), id="one"), on_ranks(2, "allreduce")])
def test_schedule_free_weights_are_evaluated_and_others_trained(run, train, overrides):
    """A run that is validated and saved in every step trains exactly as one that isn't, and resumes exactly."""
    adamw = {"_target_": "schedulefree.AdamWScheduleFree", "lr": 0.05, "warmup_steps": 3}
    validated = ("trainer.limit_val_batches=null", "trainer.val_check_interval=1", "checkpoint.every_n_steps=1")
    whole = run(adamw, "trainer.max_steps=9", *overrides, *validated)
    rarely = run(adamw, "trainer.max_steps=9", *overrides)
    part = run(adamw, "trainer.max_steps=4", *overrides, *validated)
    train(f"resume={part}", "trainer.max_steps=9")

    model = heads()
    optimizer = AdamWScheduleFree([*model.body.parameters(), *model.guess.parameters()], lr=0.05, warmup_steps=3)
    optimizer.train()
    for x, y in batches(9):
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.eval()
    for run_dir in (whole, rarely, part):
        results.assert_same(results.saved(run_dir)["training"]["model"], trained, tolerance=1e-12)
        results.assert_same(results.weights(run_dir), model.state_dict(), tolerance=1e-12)
    results.assert_same(results.weights(rarely), results.weights(whole))
    results.assert_same(results.weights(part), results.weights(whole))
    x, y = points().train.tensors
    with torch.no_grad():
        loss = mse_loss(model(x.double()), y.double()).item()
    assert results.curve(whole, "val/loss")[9] == pytest.approx(loss, rel=1e-12)


@pytest.mark.multiproc
def test_stages_have_the_groups_of_the_whole_model(run, train):
    """Each rank of the pipeline has parameters of some groups only."""
    model = f"model._target_={CASES}.Guess"
    one = run(GROUPED, "trainer.max_steps=6", model)
    two = ("topology.procs_per_node=2", "strategy=pipeline", "strategy.num_microbatches=2")
    part = run(GROUPED, "trainer.max_steps=3", model, *two)
    train(f"resume={part}", "trainer.max_steps=6")
    results.assert_same(results.weights(part), results.weights(one), tolerance=1e-12)


def test_muon_trains_matrices_and_another_the_rest(run):
    matrices = {"_target_": "torch.optim.Muon", "params": ["^body", "ndim==2"], "lr": 0.02}
    run_dir = run({"matrices": matrices, "rest": {"_target_": "torch.optim.AdamW"}}, "trainer.max_steps=4")
    model = heads()
    rest = [each for each in model.parameters() if each is not model.body[0].weight]
    optimizers = torch.optim.Muon([model.get_parameter("body.0.weight")], lr=0.02), torch.optim.AdamW(rest)
    for x, y in batches(4):
        mse_loss(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    results.assert_same(results.weights(run_dir), model.state_dict(), tolerance=1e-12)


def test_a_changed_group_key_applies_after_resuming(run, train, capfd):
    part = run(GROUPED, "trainer.max_steps=2")
    train(
        f"resume={part}",
        "trainer.max_steps=4",
        "optimizer.groups=[{params:'ndim<2',weight_decay:0},{name:head,params:'^guess',lr:0.25}]",
    )
    assert results.curve(part, "train/lr/head") == {2: 0.5, 4: 0.25}
    assert results.curve(part, "train/lr") == {2: 0.1, 4: 0.1}
    train(f"resume={part}", "trainer.max_steps=6", "optimizer.groups=[{params:'ndim<2',weight_decay:0}]", status=2)
    assert "which optimizer or group a parameter belongs to" in capfd.readouterr().err


def test_a_wrong_unfreezing_is_refused(run, capfd):
    for changes, said in (
        ({"at_step": 1, "at_epoch": 1}, "Give one of them"),
        ({"params": "bdoy", "at_step": 1}, "Did you"),
    ):
        run(GROUPED, "trainer.max_steps=1", callbacks={"thaw": UNFREEZE | changes}, status=2)
        assert said in capfd.readouterr().err


def test_frozen_parameters_keep_their_values(run):
    begun = heads().state_dict()
    run_dir = run(GROUPED, "trainer.max_steps=4", freeze=["^copy", r"^body\.0", ["guess", "ndim<2"]])
    kept = {name for name, value in results.weights(run_dir).items() if torch.equal(value, begun[name])}
    assert kept == {"copy.weight", "copy.bias", "body.0.weight", "body.0.bias", "guess.bias"}


UNFREEZE = {"_target_": "framework.callbacks.Unfreeze", "params": [r"^body\.0"]}


def test_phases_of_earlier_versions_are_objectives(run):
    run_dir = run(NAMED, "trainer.max_steps=3", task="Earlier")
    results.assert_same(results.weights(run_dir), objectives_loop(3), tolerance=1e-12)
    assert "Earlier.phases is now Earlier.objectives" in (run_dir / "logs" / "rank_0.log").read_text()


@pytest.mark.parametrize("overrides", PROCESSES[:4])
@pytest.mark.parametrize("when", [{"at_epoch": 1}, {"at_step": 4}], ids=["epoch", "step"])
def test_frozen_parameters_train_from_a_given_step(run, train, overrides, when):
    """An epoch has four steps."""
    unused = ("strategy.find_unused_parameters=true",) if "strategy=ddp" in overrides else ()
    callbacks = {"thaw": UNFREEZE | when}
    part = run(GROUPED, "trainer.max_steps=3", *overrides, *unused, freeze=[r"^body\.0"], callbacks=callbacks)
    assert torch.equal(results.weights(part)["body.0.weight"], heads().get_parameter("body.0.weight"))
    train(f"resume={part}", "trainer.max_steps=7")
    model = heads()
    model.body[0].requires_grad_(False)
    flat = [each for each in model.parameters() if each.ndim < 2]
    head = {"params": [model.guess.weight], "lr": 0.5}
    groups: list[Any] = [{"params": [model.body[0].weight]}, {"params": flat, "weight_decay": 0}, head]
    optimizer = SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.3)
    for step, (x, y) in enumerate(batches(7), start=1):
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 4:
            model.body[0].requires_grad_(True)
    trained = {name: value for name, value in results.weights(part).items() if not name.startswith("copy")}
    results.assert_same(trained, {name: model.state_dict()[name] for name in trained}, tolerance=1e-12)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([{"params": r"gues\b", "lr": 1}], r"optimizer\.groups\.0\.params: no parameter matches gues"),
        ([{"params": "gusss.weight"}], r"Did you mean guess\.weight\?"),
        ([{"params": "ndim<9"}, {"params": "body"}], r"groups\.1\.params: .*an earlier pattern takes all"),
        ([{"params": "body", "wieght_decay": 0}], r"Did you mean optimizer\.groups\.0\.weight_decay\?"),
        ([{"params": "(body"}], "is no regular expression"),
        ([{"params": []}], "must be a regular expression"),
        ([{"lr": 1}], "must be a mapping with `params`"),
        ({"params": "body"}, "must be a list of mappings"),
        ([{"params": "body", "name": "a"}, {"params": "copy", "name": "a"}], "the names a, a must differ"),
    ],
)
def test_wrong_groups_are_refused(run, capfd, groups, said):
    run({**GROUPED, "groups": groups}, "trainer.max_steps=1", status=2)
    assert re.search(said, capfd.readouterr().err)


@pytest.mark.parametrize(
    ("freeze", "said"),
    [
        (["bdoy"], r"model\.freeze\.0: no parameter matches bdoy.*Did you mean body\.0\.\w+\?"),
        (["."], "nothing to train"),
    ],
)
def test_freezing_nothing_or_everything_is_refused(run, capfd, freeze, said):
    run(GROUPED, "trainer.max_steps=1", freeze=freeze, status=2)
    assert re.search(said, capfd.readouterr().err)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("optimizer.guess.params='^guess'", "optimizer.copy.params='^body'"),
            "no optimizer takes copy.weight and 1 other",
        ),
        (("optimizer.copy.params='.'",), "optimizer.guess gets no parameter"),
        (("+task.optimizer=gues",), r"Did you mean guess\?"),
        ((f"task._target_={CASES}.Wrong",), "none that is due in step 1"),
        pytest.param(
            ("strategy=pipeline", "topology.procs_per_node=2"),
            "strategy=pipeline can't go with a task that has objectives",
            marks=pytest.mark.multiproc,
        ),
        (("job=tune",), "there are several optimizers: copy, guess"),
        (
            ("+optimizer.copy.schedule={_target_:torch.optim.lr_scheduler.StepLR}",),
            r"optimizer\.copy\.schedule\.step_size",
        ),
        (("+optimizer.lr=0.1",), r"optimizer\.lr=0\.1: must be a mapping"),
    ],
)
def test_wrong_optimizers_and_objectives_are_refused(run, capfd, overrides, said):
    named = {**NAMED, "guess": {**NAMED["guess"], "params": "guess"}} if "guess.params" in overrides[0] else NAMED
    run(named, "trainer.max_steps=1", *overrides, task="Alternating", status=2)
    assert re.search(said, capfd.readouterr().err)


def test_the_plan_lists_groups_with_their_state(write, fork_server, tmp_path, monkeypatch, capfd):
    write(GROUPED, freeze=["^copy"])
    monkeypatch.chdir(tmp_path)
    command = ["job=plan", "recipe=heads", "trainer.gpus=0", "trainer.max_steps=1", "plan.format=json"]
    assert compose.main(command, fork_server=fork_server) == 0
    plan = json.loads(capfd.readouterr().out)
    keys = ("name", "tensors", "parameters", "trainable", "state")
    rows = [("", 2, 96, 48, 384), ("0", 5, 32, 26, 208), ("head", 1, 16, 16, 128)]
    for group, row in zip(plan["groups"], rows, strict=True):
        assert tuple(group[key] for key in keys) == row
    assert {group["optimizer"] for group in plan["groups"]} == {"SGD"}
    assert plan["memory"]["optimizer"] == sum(row[-1] for row in rows)

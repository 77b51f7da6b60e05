"""Unchanged LightningModules: the losses, metrics and weights of Lightning's own Trainer; what has no counterpart."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from tests.helpers import results
from tests.helpers.modules import run_module
from tests.helpers.recipes import write_recipe

CASES = "tests.features.lightning_cases"
HABITS = "tests.features.lightning_habits"
PRELOADED = (CASES, HABITS)
# The names are those of `lightning_cases.CASES`, which takes seconds to import.
TRAINER: dict[str, dict[str, Any]] = {
    "Regression": {},
    "ConvNet": {},
    "LanguageModel": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    "Autoencoder": {},
    "Classifier": {},
    "Reductions": {},
}
KINDS = {"ConvNet": "images", "LanguageModel": "tokens"}
QUICK = ("LanguageModel", "Classifier")
SOME = [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in TRAINER]
TWO = ("topology.procs_per_node=2", "data.batch_size=8", "data.eval_batch_size=8")


@pytest.fixture(scope="module")
def reference(request, fork_server, tmp_path_factory):
    """What Lightning's own Trainer computes, by the name of the module."""
    selected = " ".join(item.nodeid for item in request.session.items)
    names = [name for name in TRAINER if name in selected]
    file = tmp_path_factory.mktemp("lightning") / "reference.pt"
    run_module(fork_server, "tests.helpers.lightning_reference", str(file), *names, folder=file.parent)
    return torch.load(file)


@pytest.fixture
def run(train, tmp_path):
    """Train a module; return the run directory."""

    def run(model, *overrides, kind="vectors", several=False, status=0, trainer=None, task=True):
        recipe = {
            "defaults": [{"override /task": "lightning"}, {"override /logger": "jsonl"}],
            "model": {"_target_": f"{CASES}.{model}"} if isinstance(model, str) else model,
            "data": {
                "shuffle": False,
                "datasets": {
                    "_target_": "framework.tasks.lightning.datamodule",
                    "module": {"_target_": f"{CASES}.Data", "kind": kind, "several": several},
                },
            },
            "trainer": {"max_epochs": 3, "num_threads": 1, "log_every_n_steps": 1, **(trainer or {})},
        }
        write_recipe(tmp_path, "lit", recipe)
        return train("recipe=lit", *overrides, status=status)

    return run


def trained(run, name, *overrides):
    return run(name, *overrides, kind=KINDS.get(name, "vectors"), trainer=TRAINER[name])


def same_metrics(run_dir, wanted, *, part, names, rel=2e-6):
    """Compare the curves of a run with what Lightning had at the end of each epoch."""
    for theirs, ours in names.items():
        values = [each[theirs] for each in wanted]
        assert list(results.curve(run_dir, f"{part}/{ours}").values()) == pytest.approx(
            values, rel=rel, abs=rel / 1e3
        ), theirs


VALIDATED = {
    "Regression": {"val_loss": "loss"},
    "ConvNet": {"val/loss": "loss", "val/acc": "acc"},
    "LanguageModel": {"val/loss": "loss"},
    "Autoencoder": {"recon": "recon"},
    "Classifier": {"val_acc": "acc", "val_f1": "f1", "val_loss": "loss"},
    "Reductions": {f"val_{name}": name for name in ("least", "most", "number", "weighted", "mean", "first")},
}
EPOCHS = {
    "ConvNet": {"loss_epoch": "loss_epoch"},
    "Classifier": {"train_acc_epoch": "acc_epoch"},
    "Reductions": {f"train_{name}": name for name in ("least", "most", "number", "mean")},
}


@pytest.mark.parametrize("name", SOME)
def test_one_process_equals_lightnings_trainer_exactly(run, reference, name):
    run_dir = trained(run, name)
    wanted = reference[name]
    weights = results.weights(run_dir)
    assert weights.keys() == wanted["weights"].keys()
    for key, value in wanted["weights"].items():
        assert torch.equal(weights[key], value), key
    accumulated = TRAINER[name].get("accumulate_grad_batches", 1)
    # Lightning divides losses by the number of batches in a step.
    batches = iter(wanted["losses"])
    losses = [sum(each) for each in zip(*[batches] * accumulated, strict=True)]
    assert list(results.curve(run_dir, "train/loss").values()) == losses
    rates = results.curve(run_dir, "train/lr/0" if name == "Autoencoder" else "train/lr").values()
    assert list(rates) == wanted["lrs"][::accumulated]
    same_metrics(run_dir, wanted["validations"], part="val", names=VALIDATED[name])
    same_metrics(run_dir, wanted["epochs"], part="train", names=EPOCHS.get(name, {}))


@pytest.mark.multiproc
@pytest.mark.parametrize(
    # BatchNorm sees each process's part of a batch, as it does in Lightning.
    "name",
    ["Classifier", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in TRAINER if name[0] not in "C")],
)
def test_two_processes_compute_the_same(run, reference, name):
    run_dir = trained(run, name, *TWO)
    wanted = reference[name]
    for key, value in wanted["weights"].items():
        if not key.endswith("in_proj_bias"):
            # A third of this bias has no gradient: Adam turns rounding errors into steps.
            torch.testing.assert_close(results.weights(run_dir)[key], value, atol=2e-6, rtol=1e-5)
    names = {theirs: ours for theirs, ours in VALIDATED[name].items() if ours not in ("first", "weighted")}
    same_metrics(run_dir, wanted["validations"], part="val", names=names, rel=1e-5)
    same_metrics(run_dir, wanted["epochs"], part="train", names=EPOCHS.get(name, {}), rel=1e-5)


@pytest.mark.multiproc
@pytest.mark.parametrize("overrides", [(), pytest.param(TWO, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", ["Classifier", pytest.param("Reductions", marks=pytest.mark.exhaustive)])
def test_a_run_stopped_within_an_epoch_resumes_exactly(run, train, name, overrides):
    whole = trained(run, name, *overrides)
    stopped = trained(run, name, *overrides, "trainer.max_steps=8")
    train(f"resume={stopped}", "trainer.max_steps=null")
    for key, value in results.weights(whole).items():
        assert torch.equal(results.weights(stopped)[key], value), key
    for part, names in (("val", VALIDATED), ("train", EPOCHS)):
        for each in names[name].values():
            assert results.curve(stopped, f"{part}/{each}") == results.curve(whole, f"{part}/{each}")


@pytest.mark.exhaustive
@pytest.mark.multiproc
def test_another_number_of_processes_resumes_what_was_logged(run, train):
    whole = trained(run, "Classifier")
    stopped = trained(run, "Classifier", "trainer.max_steps=8", *TWO)
    train(
        f"resume={stopped}",
        "trainer.max_steps=null",
        "topology.procs_per_node=1",
        "data.batch_size=16",
        "data.eval_batch_size=16",
    )
    wanted = results.curve(whole, "train/acc_epoch")
    assert results.curve(stopped, "train/acc_epoch") == pytest.approx(wanted, rel=1e-6)


@pytest.mark.exhaustive
@pytest.mark.multiproc
@pytest.mark.parametrize(
    "overrides",
    [
        # Stand-ins replace the last samples.
        ("strategy=fsdp", *TWO[:2], "data.eval_batch_size=3"),
        ("strategy=allreduce", *TWO),
        ("trainer.precision=64-true", "callbacks=ema", "callbacks.ema.decay=0"),
        ("trainer.compile=default",),
        ("trainer.compile=default", *TWO),
    ],
)
def test_strategies_and_options(run, reference, overrides):
    run_dir = trained(run, "Classifier", *overrides)
    wanted = reference["Classifier"]
    names = {"val_acc": "acc", "val_f1": "f1"}
    for theirs, ours in names.items():
        values = [each[theirs] for each in wanted["validations"]]
        assert list(results.curve(run_dir, f"val/{ours}").values()) == pytest.approx(values, abs=1e-5)


def test_hooks_and_what_they_see_of_the_trainer(run, tmp_path):
    file = tmp_path / "hooks"
    run_dir = run({"_target_": f"{CASES}.Watched", "file": str(file)}, "trainer.max_epochs=9", several=True)
    # Hooks are called once, though there are two sets.
    validation = ["start", "epoch_start", "epoch_end", "end"]

    def validated(step, epoch, also=""):
        return [f"on_validation_{each} {epoch} {step}{also}" for each in validation]

    assert file.read_text().splitlines() == [
        "setup 0 0",
        "on_fit_start 0 0",
        *validated(0, 0, " sanity"),
        "on_train_start 0 0",
        "on_train_epoch_start 0 0",
        *validated(6, 0),
        "on_train_epoch_end 0 6",
        "on_train_epoch_start 1 6",
        *validated(12, 1),
        "on_train_epoch_end 1 12",
        "on_train_end 1 12",
        "on_fit_end 1 12",
        "on_test_start 1 12",
        "on_test_end 1 12",
        "teardown 1 12",
    ]
    assert results.results(run_dir)["ended_by"] == "self.trainer.should_stop was set"
    metrics = results.results(run_dir)["last"]["metrics"]
    assert metrics == {"val/0/index": 0, "val/0/size": 40, "val/1/index": 1, "val/1/size": 24}
    assert any(key.startswith("extra.") for key in results.weights(run_dir))


@pytest.fixture(scope="module")
def lightnings_notes(fork_server, tmp_path_factory):
    """What `lightning_habits` notes when Lightning's own Trainer trains it, and the metrics."""
    file = tmp_path_factory.mktemp("habits") / "notes"
    run_module(fork_server, HABITS, str(file), folder=file.parent)
    return notes_in(file), notes_in(file.with_name("notes.metrics"))


@pytest.fixture
def habits(train, tmp_path):
    """Train `lightning_habits`; return the run directory and what it noted."""

    def run(*overrides):
        file = tmp_path / "notes"
        recipe = {
            "defaults": [{"override /task": "lightning"}, {"override /logger": "jsonl"}],
            "model": {"_target_": f"{HABITS}.Module", "file": str(file)},
            "data": {
                "shuffle": False,
                "datasets": {
                    "_target_": "framework.tasks.lightning.datamodule",
                    "module": {"_target_": f"{HABITS}.Data", "file": str(file)},
                },
            },
            "trainer": {"max_epochs": 2, "num_threads": 1, "log_every_n_steps": 1, "accumulate_grad_batches": 2},
        }
        write_recipe(tmp_path, "habits", recipe)
        return train("recipe=habits", *overrides), notes_in(file)

    return run


def notes_in(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def after_sanity(notes):
    """Leave out the sanity check, whose number of batches differs, and the graphs of outputs, which Lightning keeps."""
    first = next(number for number, each in enumerate(notes) if each[0] == "on_train_epoch_start")
    compared = [note for note in notes[:first] if note[0] in ("prepare_data", "setup", "has")]
    for note in notes[first:]:
        if note[0] == "outputs":
            note = [*note[:2], *note[3:]]
        compared.append(note)
    return compared


def test_hooks_and_attributes_of_the_trainer_are_lightnings(habits, lightnings_notes):
    run_dir, notes = habits()
    wanted, metrics = lightnings_notes
    assert after_sanity(notes) == after_sanity(wanted)
    sanity = notes[: [each[0] for each in notes].index("on_train_epoch_start")]
    assert [each[0] for each in sanity if each[0].startswith("on_")] == [
        "on_validation_start",
        "on_validation_epoch_start",
        "on_validation_epoch_end",
        "on_validation_end",
    ]
    seen = [each[1] for each in sanity if each[0].startswith("on_")]
    assert all(each["sanity_checking"] and each["evaluating"] for each in seen)
    # No output keeps its graph.
    assert {tuple(each[2]) for each in notes if each[0] == "outputs"} == {(False, False, False)}

    names = {
        "val_loss/dataloader_idx_0": "val/0/loss",
        "val_loss/dataloader_idx_1": "val/1/loss",
        "val_mean": "val/mean",
        "train_loss": "train/loss_epoch",
        "train_size": "train/size",
    }
    for theirs, ours in names.items():
        values = [each[theirs] for _, each in metrics if theirs in each]
        assert list(results.curve(run_dir, ours).values()) == pytest.approx(values, abs=1e-5), theirs
    assert list(results.curve(run_dir, "train/seen_epoch").values()) == [7.0, 7.0]
    assert list(results.curve(run_dir, "train/lr_epoch").values()) == [3.0, 3.0]
    assert set(results.curve(run_dir, "train/lr_step").values()) == {5.0}
    assert 5.0 not in results.curve(run_dir, "train/lr").values()
    assert results.repeated(run_dir) == {}


@pytest.mark.multiproc
def test_a_data_module_divides_its_batch_size(habits):
    run_dir, notes = habits("topology.procs_per_node=2", "trainer.accumulate_grad_batches=1")
    assert {each[1]["world_size"] for each in notes if each[0] in ("prepare_data", "setup")} == {2}
    assert results.results(run_dir)["steps"] == 2 * 96 // 16
    assert "global batch 16" in results.log(run_dir)


@pytest.mark.multiproc
def test_a_module_may_keep_its_optimizer(run):
    """The optimizer is made once, with the number of steps; the size of its state is measured with a copy."""
    run_dir = run("Keeping", "topology.procs_per_node=2")
    assert list(results.curve(run_dir, "train/lr").values()) == [0.5] * len(results.curve(run_dir, "train/lr"))
    assert "optimizer unknown" not in results.log(run_dir)


def test_evaluation_and_predictions(run, train, tmp_path, capfd):
    run_dir = run("Regression", "+model.hidden=5", "checkpoint.monitor=val/loss")
    evaluated = train("job=eval", f"checkpoint.path={run_dir}", "eval.part=test")
    assert results.metrics(evaluated)["test/loss"] == results.results(run_dir)["test"]["metrics"]["test/loss"]
    train("job=predict", f"checkpoint.path={run_dir}", "predict.output=out.pt", "predict.part=test")
    predicted = torch.load(tmp_path / "out.pt")["output"]
    weights = results.weights(run_dir)
    assert weights["net.0.weight"].shape == (5, 8)
    x = torch.randn(24, 8, generator=torch.Generator().manual_seed(2))
    hidden = (x @ weights["net.0.weight"].T + weights["net.0.bias"]).tanh()
    wanted = (hidden @ weights["net.2.weight"].T + weights["net.2.bias"]).squeeze(1)
    torch.testing.assert_close(predicted, wanted)
    run_dir = run({"_target_": f"{CASES}.changed", "name": "on_predict_start"}, "trainer.max_epochs=1")
    train("job=predict", f"checkpoint.path={run_dir}", status=2)
    assert "no counterpart here:\n  on_predict_start" in capfd.readouterr().err
    # A test part is evaluated by validation_step, if there is no test_step.
    assert "test/acc" in results.results(run("ConvNet", "trainer.max_epochs=1", kind="images"))["test"]["metrics"]


@pytest.mark.exhaustive
def test_schedules_keep_their_frequency_and_strictness(run, train):
    run_dir = run({"_target_": f"{CASES}.changed", "name": "every fourth"}, "trainer.max_steps=6")
    train(f"resume={run_dir}", "trainer.max_steps=10")
    rates = [0.1] * 4 + [0.05] * 4 + [0.025] * 2
    assert list(results.curve(run_dir, "train/lr").values()) == pytest.approx(rates)
    assert results.curve(run({"_target_": f"{CASES}.changed", "name": "not strict"}), "train/lr")[18] == 0.1


@pytest.mark.exhaustive
def test_another_optimizer_and_schedule(run, capfd):
    run_dir = run("Regression", "optimizer=sgd", "optimizer.lr=0.5", "scheduler=step", "trainer.max_epochs=1")
    assert results.curve(run_dir, "train/lr")[1] == 0.5
    run("ConvNet", "scheduler=cosine", kind="images", status=2)
    assert "configure_optimizers returns a schedule, and scheduler.schedule chooses another" in capfd.readouterr().err


def test_two_names_that_differ_by_the_part_are_both_logged(run):
    run_dir = run({"_target_": f"{CASES}.changed", "name": "one name"}, "trainer.max_epochs=1")
    assert set(results.curve(run_dir, "train/v").values()) == {1.0}
    assert set(results.curve(run_dir, "train/v_2").values()) == {2.0}


@pytest.mark.exhaustive
def test_steps_of_an_evaluation_are_logged_as_their_mean(run):
    run_dir = run({"_target_": f"{CASES}.changed", "name": "only step"}, "trainer.max_epochs=1")
    assert list(results.curve(run_dir, "val/v").values()) == [1.0]


REFUSED = {
    "optimizers": r"configure_optimizers returned 2 optimizers.*automatic_optimization = False.*docs/optimizers.md",
    "none": r"returned None, so nothing would be trained.*optimizer=adam",
    "nonsense": r"Changed\.configure_optimizers: Unknown configuration for model optimizers",
    "no monitor": r"must include a monitor",
    "train monitor": r"the learning-rate schedule monitors train_los, which training doesn't log",
    "unknown monitor": r"monitors val/los, which validation doesn't compute: .* Did you mean val/loss\?",
    "callbacks": r"returned callbacks that can't be used as they are.*StochasticWeightAveraging: use callbacks=swa",
    "no experiment": r"no self\.logger\.experiment with these loggers: jsonl.*logger=tensorboard",
    "steps itself": r"Changed calls optimizer\.step, and the framework steps.*automatic_optimization = False",
    "vector": r"self\.log\('v'\): the value is a tensor of shape \(16, 8\)",
    "median": r"reduce_fx=median. Use one of mean, sum, min, max",
    **{hook: rf"no counterpart here:\n  {hook}: " for hook in ("clip_gradients", "on_validation_model_zero_grad")},
}
QUICK_ONES = ("optimizers", "clip_gradients")


@pytest.mark.parametrize(
    "name", [each if each in QUICK_ONES else pytest.param(each, marks=pytest.mark.exhaustive) for each in REFUSED]
)
def test_what_has_no_counterpart_is_refused_by_name(run, capfd, name):
    run({"_target_": f"{CASES}.changed", "name": name}, status=2)
    assert re.search(REFUSED[name], capfd.readouterr().err, re.DOTALL)


@pytest.mark.exhaustive
def test_another_model_is_refused(run, capfd):
    run({"_target_": "torch.nn.Linear", "in_features": 8, "out_features": 1}, status=2)
    assert "task=lightning trains a LightningModule, and the model is a torch.nn" in capfd.readouterr().err


@pytest.mark.exhaustive
def test_modules_of_the_package_pytorch_lightning(run):
    run_dir = run({"_target_": "tests.features.pytorch_lightning_case.Old"})
    assert list(results.curve(run_dir, "val/loss")) == [6, 12, 18]

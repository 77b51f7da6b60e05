"""LightningModules that take part in the optimization, against Lightning's own Trainer."""

from __future__ import annotations

import json

import pytest
import torch

from tests.features.lightning_step_settings import SETTINGS, STEPS, recipe_of
from tests.helpers import results
from tests.helpers.modules import run_module
from tests.helpers.recipes import write_recipe
from tests.helpers.trackers import wandb_curve, wandb_run

PRELOADED = (STEPS,)
QUICK = ("Hooked", "Gan", "PlainLBFGS", "WithCallbacks", "Stopping", "Averaged")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in SETTINGS]
TWO = ("topology.procs_per_node=2", "data.batch_size=4", "data.eval_batch_size=4")
# The last process has no sample in the last batch of each four.
THREE = ("topology.procs_per_node=3", "data.global_batch_size=8", "data.eval_batch_size=4")


@pytest.fixture(scope="module")
def lightning(request, fork_server, tmp_path_factory):
    """The folder with what Lightning's own Trainer computes."""
    selected = " ".join(item.nodeid for item in request.session.items)
    names = [name for name in SETTINGS if name in selected]
    folder = tmp_path_factory.mktemp("lightning")
    run_module(fork_server, STEPS, "train", str(folder), *names, folder=folder)
    return folder


@pytest.fixture
def run(train, tmp_path):
    """Train a module; return the run directory."""

    def run(name, *overrides, status=0):
        write_recipe(tmp_path, "steps", recipe_of(name, tmp_path))
        return train("recipe=steps", *overrides, status=status)

    return run


def notes_in(folder, name):
    file = folder / f"{name}.notes"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_hooks_are_lightnings(run, lightning, tmp_path, name):
    weights = results.weights(run(name))
    wanted = torch.load(lightning / f"{name}.pt")
    assert weights.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(weights[key], value), key
    assert notes_in(tmp_path, name) == notes_in(lightning, name)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        pytest.param("Gan", THREE, id="Gan-3"),
        pytest.param("Accumulating", TWO, id="Accumulating-2", marks=pytest.mark.exhaustive),
        pytest.param("Accumulating", THREE, id="Accumulating-3", marks=pytest.mark.exhaustive),
        pytest.param("Schedules", TWO, id="Schedules-2", marks=pytest.mark.exhaustive),
        pytest.param("Averaged", TWO, id="Averaged-2", marks=pytest.mark.exhaustive),
        pytest.param("Stopping", TWO, id="Stopping-2", marks=pytest.mark.exhaustive),
    ],
)
def test_several_processes_compute_the_same(run, lightning, name, overrides):
    weights = results.weights(run(name, *overrides))
    for key, value in torch.load(lightning / f"{name}.pt").items():
        torch.testing.assert_close(weights[key], value, atol=1e-6, rtol=1e-5, msg=key)


@pytest.mark.multiproc
@pytest.mark.parametrize("overrides", [TWO, pytest.param(THREE, marks=pytest.mark.exhaustive)])
def test_lbfgs_follows_the_loss_of_all_processes(run, tmp_path, overrides):
    one = run("PlainLBFGS", "trainer.precision=64-true")
    (tmp_path / "PlainLBFGS.notes").unlink()
    several = run("PlainLBFGS", "trainer.precision=64-true", *overrides)
    for key, value in results.weights(one).items():
        torch.testing.assert_close(results.weights(several)[key], value, atol=1e-9, rtol=1e-9, msg=key)
    # A batch that was computed several times is logged once.
    assert list(results.curve(one, "train/number").values()) == [66] * 3


def test_lbfgs_with_hooks_of_the_steps_on_two_processes_is_refused(run, capfd):
    run("LBFGS", *TWO, status=2)
    error = capfd.readouterr().err
    assert "LBFGS overrides hooks of its steps, and configure_optimizers returned LBFGS" in error


@pytest.mark.exhaustive
@pytest.mark.multiproc
def test_hooks_of_steps_on_two_processes(run):
    one = results.weights(run("Hooked", "trainer.accumulate_grad_batches=1"))
    two = results.weights(run("Hooked", "trainer.accumulate_grad_batches=1", *TWO))
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, atol=1e-6, rtol=1e-5, msg=key)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("name", "overrides", "stop"),
    [
        ("Accumulating", (), 6),
        ("WithCallbacks", (), 17),
        ("WarmingUp", (), 5),
        ("PlainLBFGS", (), 17),
        ("Averaged", (), 17),
        pytest.param("Stopping", (), 17, marks=pytest.mark.exhaustive),
        pytest.param("Averaged", TWO, 17, marks=pytest.mark.exhaustive),
        pytest.param("PlainLBFGS", TWO, 17, marks=pytest.mark.exhaustive),
        pytest.param("NormedGan", TWO, 17, marks=pytest.mark.exhaustive),
        pytest.param("Hooked", (), 5, marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_stopped_within_an_epoch_resumes_exactly(run, train, name, overrides, stop):
    whole = run(name, *overrides)
    stopped = run(name, *overrides, f"trainer.max_steps={stop}")
    train(f"resume={stopped}", "trainer.max_steps=null")
    for key, value in results.weights(whole).items():
        assert torch.equal(results.weights(stopped)[key], value), key


def test_configured_callbacks_stop_and_find_the_best_checkpoint_as_lightnings(run, lightning):
    run_dir = run("Stopping")
    best = torch.load(lightning / "Stopping.best.ckpt", weights_only=True)
    found = results.results(run_dir)
    assert found["best"]["step"] == best["global_step"] == 24
    assert found["ended_by"].startswith("EarlyStopping: val/loss did not improve in 2 evaluations")
    weights = torch.load(run_dir / "checkpoints" / "best" / "model.pt", weights_only=True)
    for key, value in best["state_dict"].items():
        assert torch.equal(weights[key], value), key
    assert "dirpath and filename of ModelCheckpoint have no effect" in results.log(run_dir)


def test_callbacks_and_options_without_a_counterpart_are_refused(run, capfd):
    run("Unmatched", status=2)
    error = capfd.readouterr().err
    for refused in (
        "EarlyStopping(monitor='train_loss'): monitor a metric that validation_step logs",
        "EarlyStopping(strict=False): log train_loss in every validation",
        "Patient inherits from Lightning's EarlyStopping",
        "Swapping.on_train_end: of WeightAveraging, override should_update only",
        "WeightAveraging(device=...): leave it out",
        "ModelCheckpoint(every_n_train_steps=...) with a monitor: set trainer.val_check_interval",
        "a second ModelCheckpoint",
        "ModelCheckpoint(save_on_exception=True): leave it out, and set checkpoint.every_n_minutes",
        "LearningRateMonitor(log_momentum=True): leave it out",
        "StochasticWeightAveraging: use callbacks=swa",
        "GradientAccumulationScheduler: no counterpart",
    ):
        assert refused in error
    run("Misspelt", status=2)
    error = capfd.readouterr().err
    assert "callbacks.EarlyStopping.monitor=val/los is never computed. Use one of val/loss" in error
    run("Averaged", "strategy=fsdp", *TWO, status=2)
    assert "callbacks.EMAWeightAveraging keeps a whole copy of the model" in capfd.readouterr().err


@pytest.mark.exhaustive
def test_layers_made_in_on_load_checkpoint_are_refused(run, train, capfd):
    stopped = run("Rebuilding", "trainer.max_steps=5")
    train(f"resume={stopped}", "trainer.max_steps=null", status=2)
    assert "Rebuilding.on_load_checkpoint replaces parameters: net.0.bias, net.0.weight" in capfd.readouterr().err


def test_settings_that_manual_optimization_refuses(run, capfd):
    settings = ("strategy=fsdp", "trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=1")
    run("Gan", *settings, status=2)
    error = capfd.readouterr().err
    assert "Gan has automatic_optimization = False, which can't go with:\n  strategy=FSDP" in error
    assert "trainer.accumulate_grad_batches: " in error
    assert "trainer.gradient_clip_val: call self.clip_gradients" in error


def test_a_module_logs_through_its_logger(run):
    run_dir = run("Logging", "logger=[jsonl,tensorboard]", "trainer.max_epochs=1")
    assert list(results.curve(run_dir, "mine").values()) == list(range(12))
    (file,) = run_dir.glob("events.out.tfevents.*")
    assert b"direct" in file.read_bytes()


def test_a_module_logs_through_the_run_of_wandb(run, train, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracked = ("logger=[jsonl,tensorboard,wandb]", "trainer.max_epochs=2")
    run_dir = run("Tracked", *tracked, "trainer.max_steps=14")
    train(f"resume={run_dir}", "trainer.max_steps=null")
    of_wandb, history, summary = wandb_run(run_dir)
    assert wandb_curve(run_dir, "mine") == {step: float(step % 12) for step in range(24)}
    # Of the second epoch: the process that resumes offline has no objects of the first one's.
    assert [row["_step"] for row in history if row.get("pictures/_type") == "images/separated"] == [15]
    assert summary["seen"] == 3
    assert "early" in str(of_wandb.config)
    events = b"".join(file.read_bytes() for file in run_dir.glob("events.out.tfevents.*"))
    assert events.count(b"direct") >= 24


def test_a_callback_of_lightning_in_the_section_callbacks(run, capfd):
    run("Skipping", f"+callbacks.counter._target_={STEPS}.Counter", status=2)
    assert "is a callback of Lightning" in capfd.readouterr().err


@pytest.mark.multiproc
def test_all_gather_returns_the_values_of_all_processes(run, capfd):
    run_dir = run("Gathering", *TWO, "trainer.max_epochs=1")
    assert set(results.curve(run_dir, "train/number").values()) == {2}
    means = results.curve(run_dir, "train/gathered")
    assert means == pytest.approx(results.curve(run_dir, "train/loss"), rel=1e-6)
    run("GatheringInEvaluation", *TWO, status=2)
    assert "GatheringInEvaluation calls all_gather in an evaluation step" in capfd.readouterr().err

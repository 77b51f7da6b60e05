"""Checkpoints of Lightning's own Trainer: trainings that one of both begins and the other continues."""

from __future__ import annotations

import pytest
import torch

from tests.features.lightning_step_settings import SETTINGS, STEPS, recipe_of
from tests.helpers import results
from tests.helpers.internals import compose
from tests.helpers.modules import run_module
from tests.helpers.recipes import write_recipe

PRELOADED = (STEPS,)
# Two parameter groups and an epoch's schedule; two optimizers and steps within the module; hooks that keep a state.
QUICK = ("EpochSchedule", "Gan", "WithCallbacks")
NAMES = [*QUICK, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("Hooked", "Schedules"))]


def by_lightning(fork_server, action, folder, *names):
    run_module(fork_server, STEPS, action, str(folder), *names, folder=folder)


@pytest.fixture(scope="module")
def lightning(request, fork_server, tmp_path_factory):
    """The folder with the weights of Lightning's whole trainings, and checkpoints after two of three epochs."""
    folder = tmp_path_factory.mktemp("lightning")
    selected = " ".join(item.nodeid for item in request.session.items)
    # Some tests have no module in their name.
    names = [name for name in SETTINGS if name in selected or name == "EpochSchedule"]
    by_lightning(fork_server, "train_and_begin", folder, *names)
    return folder


@pytest.fixture
def run(train, tmp_path):
    """Train a module; return the run directory."""

    def run(name, *overrides, status=0):
        write_recipe(tmp_path, "continued", recipe_of(name, tmp_path))
        return train("recipe=continued", *overrides, status=status)

    return run


@pytest.fixture
def export(train, fork_server, tmp_path):
    """Export a run as a checkpoint of Lightning's."""

    def export(run_dir, output):
        format_ = ("export.format=lightning", f"export.output={output}")
        assert compose.main(["job=export", f"checkpoint.path={run_dir}", *format_], fork_server=fork_server) == 0

    return export


def same(weights, wanted):
    assert weights.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(weights[key], value), key


@pytest.mark.parametrize("name", NAMES)
def test_a_training_of_lightning_continues_here(run, lightning, name):
    wanted = torch.load(lightning / f"{name}.pt")
    continued = run(name, f"init_from={lightning}/{name}.ckpt", "init.training=true")
    same(results.weights(continued), wanted)
    assert results.results(continued)["epochs"] == 3


@pytest.mark.multiproc
def test_what_continues_resumes_exactly_and_on_two_processes(run, train, lightning):
    begins = (f"init_from={lightning}/EpochSchedule.epoch.ckpt", "init.training=true")
    stopped = run("EpochSchedule", *begins, "trainer.max_steps=14")
    assert results.results(stopped)["steps"] == 14
    train(f"resume={stopped}", "trainer.max_steps=null")
    wanted = torch.load(lightning / "EpochSchedule.pt")
    same(results.weights(stopped), wanted)
    two = run("EpochSchedule", *begins, "topology.procs_per_node=2", "data.batch_size=4", "data.eval_batch_size=4")
    for key, value in results.weights(two).items():
        torch.testing.assert_close(value, wanted[key], atol=1e-6, rtol=1e-5, msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_lightning_continues_what_was_exported(run, export, fork_server, lightning, tmp_path, name):
    run_dir = run(name, "trainer.max_epochs=2")
    output = tmp_path / f"{name}.exported.ckpt"
    export(run_dir, output)
    by_lightning(fork_server, "go_on", tmp_path, name)
    same(torch.load(tmp_path / f"{name}.read.pt"), results.weights(run_dir))
    continued = torch.load(tmp_path / f"{name}.gone_on.pt")
    steps = continued.pop("steps")
    same(continued, torch.load(lightning / f"{name}.pt"))
    assert steps == torch.load(output, weights_only=True)["global_step"] * 3 // 2


@pytest.mark.exhaustive
def test_exports_keep_averages_and_settings(run, export, tmp_path):
    run_dir = run("EpochSchedule", "+model.hidden=5", "callbacks=ema", "callbacks.ema.decay=0.5")
    output = tmp_path / "out.ckpt"
    export(run_dir, output)
    written = torch.load(output, weights_only=True)
    assert written["hyper_parameters"] == {"folder": str(tmp_path), "hidden": 5}
    same(written["state_dict"], results.weights(run_dir))
    assert not torch.equal(written["current_model_state"]["net.0.bias"], written["state_dict"]["net.0.bias"])
    assert written["averaging_state"]["n_averaged"] == 18
    # Another optimizer isn't the module's.
    run_dir = run("EpochSchedule", "optimizer=sgd", "scheduler=none")
    output = tmp_path / "plain.ckpt"
    export(run_dir, output)
    assert "optimizer_states" not in torch.load(output, weights_only=True)
    run("EpochSchedule", f"init_from={output}", "init.training=true", status=2)


def test_what_cannot_be_continued_is_refused(run, lightning, tmp_path, capfd):
    continuing = ("init.training=true", "trainer.max_epochs=3")

    def refused(name, *, module="EpochSchedule", **changes):
        content = torch.load(lightning / "EpochSchedule.ckpt", weights_only=True)
        file = tmp_path / f"{name}.ckpt"
        content.update(changes)
        torch.save({key: value for key, value in content.items() if value is not None}, file)
        run(module, f"init_from={file}", *continuing, status=2)
        return capfd.readouterr().err

    assert "has no optimizer_states: it isn't a checkpoint of Lightning's, or one with the" in refused(
        "weights", optimizer_states=None
    )
    loops = torch.load(lightning / "EpochSchedule.ckpt", weights_only=True)["loops"]
    loops["fit_loop"]["epoch_progress"]["total"]["started"] = 3
    assert "was saved within an epoch" in refused("within", loops=loops)
    assert "continued here" in refused("averaged", averaging_state={"n_averaged": torch.tensor(1)})
    assert "has 0 optimizers and 1 schedules, and this run has 1 and 1" in refused("none", optimizer_states=[])
    loops["fit_loop"]["epoch_progress"]["total"].update(started=2, completed=1)
    assert "saved before its ReduceLROnPlateau" in refused("plateau", module="Schedules", loops=loops)
    longer = [{**torch.load(lightning / "EpochSchedule.ckpt", weights_only=True)["lr_schedulers"][0], "total_steps": 9}]
    assert "has a StepLR of 9 steps, and this run has one of None" in refused("longer", lr_schedulers=longer)
    states = torch.load(lightning / "EpochSchedule.ckpt", weights_only=True)["optimizer_states"]
    states[0]["param_groups"].pop()
    assert "The optimizers in" in refused("groups", optimizer_states=states)

    run("EpochSchedule", "init.training=true", status=2)
    assert "init.training=true needs init_from" in capfd.readouterr().err

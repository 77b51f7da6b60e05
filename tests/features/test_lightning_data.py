"""The loaders of Lightning's data modules, against Lightning's own Trainer."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests.features.lightning_data_settings import CASES, MODULE
from tests.helpers import results
from tests.helpers.recipes import write_recipe
from tests.helpers.source import ROOT

QUICK = ("HalfOfSeven", "DropLast")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in CASES]


@pytest.fixture(scope="module")
def fork_server():
    """Ranks that have imported Lightning."""
    from tests.helpers.internals import PRELOAD, OwnForkServer

    server = OwnForkServer((*PRELOAD, MODULE))
    yield server
    server.close()


@pytest.fixture(scope="module")
def lightning(request, tmp_path_factory):
    """The folder with what Lightning's own Trainer computes."""
    selected = " ".join(item.nodeid for item in request.session.items)
    names = [name for name in CASES if name in selected]
    folder = tmp_path_factory.mktemp("lightning")
    command = [sys.executable, "-W", "ignore", "-m", MODULE, str(folder), *names]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=100)
    return folder


@pytest.fixture
def run(train, tmp_path):
    """Train a case; return the run directory."""

    def run(name, *overrides, status=0):
        case = CASES[name]
        recipe = {
            "defaults": [{"override /task": "lightning"}, {"override /logger": "jsonl"}],
            "model": {"_target_": f"{MODULE}.{case.model}", "folder": str(tmp_path), "name": name},
            "data": {
                "shuffle": False,
                "datasets": {
                    "_target_": "framework.tasks.lightning.datamodule",
                    "module": {"_target_": f"{MODULE}.{case.data}", **case.keywords},
                },
            },
            "trainer": {"max_epochs": 4, "num_threads": 1, "log_every_n_steps": 1, **case.trainer},
        }
        write_recipe(tmp_path, "data", recipe)
        return train("recipe=data", *overrides, status=status)

    return run


def notes_in(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.notes").read_text().splitlines()]


@pytest.mark.parametrize("name", NAMES)
def test_weights_batches_and_validations_are_lightnings(run, lightning, tmp_path, name):
    weights = results.weights(run(name))
    wanted = torch.load(lightning / f"{name}.pt")
    assert notes_in(tmp_path, name) == notes_in(lightning, name)
    for key, value in wanted.items():
        assert torch.equal(weights[key], value), key


@pytest.mark.multiproc
def test_validations_by_a_share_are_the_same_after_a_resume(run, train):
    """Between two validations of an epoch of seven steps."""
    whole = run("HalfOfSeven")
    stopped = run("HalfOfSeven", "trainer.max_steps=12")
    train(f"resume={stopped}", "trainer.max_steps=null")
    assert list(results.curve(whole, "val/loss")) == [3, 6, 10, 13, 17, 20, 24, 27]
    assert results.curve(stopped, "val/loss") == results.curve(whole, "val/loss")
    two = run("HalfOfSeven", "topology.procs_per_node=2", "data.batch_size=4", "data.eval_batch_size=4")
    assert results.curve(two, "val/loss") == pytest.approx(results.curve(whole, "val/loss"), rel=1e-5)


@pytest.mark.multiproc
@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_drop_last_leaves_the_same_samples_on_any_number_of_processes(run, lightning, processes):
    several = (f"topology.procs_per_node={processes}", "data.global_batch_size=8")
    run_dir = run("DropLast", *several)
    metrics = results.results(run_dir)["last"]["metrics"]
    assert [metrics[f"val/{number}/count"] for number in range(3)] == [16, 8, 8]
    for key, value in torch.load(lightning / "DropLast.pt").items():
        torch.testing.assert_close(results.weights(run_dir)[key], value, atol=1e-6, rtol=1e-5, msg=key)

"""The loaders of Lightning's data modules, against Lightning's own Trainer."""

from __future__ import annotations

import json
import re

import pytest
import torch

from tests.features.lightning_data_settings import CASES, MODULE
from tests.helpers import results
from tests.helpers.modules import run_module
from tests.helpers.recipes import write_recipe

PRELOADED = (MODULE,)
QUICK = ("HalfOfSeven", "DropLast", "Buckets", "LoadersInDict", "Transfers")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in CASES]


@pytest.fixture(scope="module")
def lightning(request, fork_server, tmp_path_factory):
    """The folder with what Lightning's own Trainer computes."""
    selected = " ".join(item.nodeid for item in request.session.items)
    names = [name for name in CASES if name in selected]
    folder = tmp_path_factory.mktemp("lightning")
    run_module(fork_server, MODULE, str(folder), *names, folder=folder)
    return folder


@pytest.fixture
def run(train, tmp_path):
    """Train a case; return the run directory."""

    def run(name, *overrides, status=0, **keywords):
        case = CASES[name]
        recipe = {
            "defaults": [{"override /task": "lightning"}, {"override /logger": "jsonl"}],
            "model": {"_target_": f"{MODULE}.{case.model}", "folder": str(tmp_path), "name": name},
            "data": {
                "shuffle": False,
                "datasets": {
                    "_target_": "framework.tasks.lightning.datamodule",
                    "module": {"_target_": f"{MODULE}.{case.data}", **(case.keywords | keywords)},
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
    assert_near(run_dir, lightning, "DropLast")


def assert_near(run_dir, lightning, name):
    for key, value in torch.load(lightning / f"{name}.pt").items():
        torch.testing.assert_close(results.weights(run_dir)[key], value, atol=1e-6, rtol=1e-5, msg=key)


@pytest.mark.multiproc
@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_processes_share_each_batch_of_a_batch_sampler(run, train, lightning, processes):
    several = f"topology.procs_per_node={processes}"
    assert_near(run("Buckets", several), lightning, "Buckets")
    # From three processes, or two, to one, in the middle of an epoch.
    stopped = run("Buckets", several, "trainer.max_steps=13")
    train(f"resume={stopped}", "trainer.max_steps=null", "topology.procs_per_node=1")
    assert_near(stopped, lightning, "Buckets")


def test_batches_of_a_batch_sampler_resume_exactly(run, train):
    whole = run("Buckets")
    stopped = run("Buckets", "trainer.max_steps=13")
    train(f"resume={stopped}", "trainer.max_steps=null")
    assert results.curve(stopped, "train/loss") == results.curve(whole, "train/loss")
    for key, value in results.weights(whole).items():
        assert torch.equal(results.weights(stopped)[key], value), key
    assert "global batches of batch_sampler=Buckets, 10 steps an epoch" in results.log(whole)


@pytest.mark.exhaustive
@pytest.mark.multiproc
def test_batches_of_a_batch_sampler_accumulate(run):
    one = run("Buckets", "trainer.accumulate_grad_batches=3")
    assert results.results(one)["steps"] == 16
    three = run("Buckets", "trainer.accumulate_grad_batches=3", "topology.procs_per_node=3")
    for key, value in results.weights(one).items():
        torch.testing.assert_close(results.weights(three)[key], value, atol=1e-6, rtol=1e-5, msg=key)


@pytest.mark.parametrize(
    ("keywords", "overrides", "said"),
    [
        ({"kind": "Stateful"}, (), r"batch_sampler=Stateful gives other batches when it is iterated again"),
        ({"kind": "Longer"}, (), r"batch_sampler=Longer gave 10 batches, and its length is 11"),
        ({"kind": "One"}, (), r"batch_sampler=ForOneProcess: .*num_replicas=1"),
        ({"kind": "Unsized"}, (), r"batch_sampler=Unsized: Give it __len__"),
        ({"kind": "Named"}, (), r"batch_sampler=Named gave \[\(0, 'left'\).*lists of indices"),
        (
            {"evaluates": True},
            (),
            r"The val part is a DataLoader.*batch_sampler=Buckets: Every sample is",
        ),
        ({}, ("data.batch_size=4",), r"data\.batch_size=4 can't go with batch_sampler=Buckets"),
        ({}, ("data.global_batch_size=4",), r"data\.global_batch_size=4 can't go with batch_sampler=Buckets"),
    ],
)
def test_batch_samplers_that_are_refused(run, capfd, keywords, overrides, said):
    run("Buckets", *overrides, status=2, **keywords)
    assert re.search(said, capfd.readouterr().err, re.DOTALL)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("name", "processes"),
    [
        ("LoadersInDict", 2),
        pytest.param("LoadersInDict", 3, marks=pytest.mark.exhaustive),
        pytest.param("MaxSize", 3, marks=pytest.mark.exhaustive),
        pytest.param("MinSize", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_processes_share_the_batches_of_several_loaders(run, train, lightning, name, processes):
    several = f"topology.procs_per_node={processes}"
    assert_near(run(name, several), lightning, name)
    stopped = run(name, several, "trainer.max_steps=7")
    train(f"resume={stopped}", "trainer.max_steps=null", "topology.procs_per_node=1")
    assert_near(stopped, lightning, name)


def test_several_loaders_resume_exactly(run, train):
    # Shuffled by the framework: the loaders' own orders are drawn from the seed.
    whole = run("LoadersInDict", shuffles=True)
    stopped = run("LoadersInDict", "trainer.max_steps=7", shuffles=True)
    train(f"resume={stopped}", "trainer.max_steps=null")
    assert results.curve(stopped, "train/loss") == results.curve(whole, "train/loss")
    for key, value in results.weights(whole).items():
        assert torch.equal(results.weights(stopped)[key], value), key
    unshuffled = run("LoadersInDict")
    assert results.curve(unshuffled, "train/loss") != results.curve(whole, "train/loss")


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("keywords", "overrides", "said"),
    [
        ({"mode": "sequential"}, (), r"with mode=sequential: use one of min_size, max_size, max_size_cycle"),
        ({"val_mode": "min_size"}, (), r"The val part is a CombinedLoader with mode=min_size"),
        (
            {"short": True},
            ("topology.procs_per_node=3",),
            r"train loader \['large'\] has 2 samples, which 3 processes can't share evenly",
        ),
        ({}, ("data.batch_size=4",), r"data\.batch_size=4 can't go with several train loaders"),
    ],
)
def test_several_loaders_that_are_refused(run, capfd, keywords, overrides, said):
    run("LoadersInDict", *overrides, status=2, **keywords)
    assert re.search(said, capfd.readouterr().err, re.DOTALL)

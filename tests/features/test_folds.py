"""K-fold cross-validation: which samples each run trains on and validates, on any topology and after a resume."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.features.fold_cases import AUGMENTED, CLASSES, OWN_VAL, SIZE
from tests.helpers import results
from tests.helpers.internals import compose
from tests.helpers.recipes import write_recipe

CASES = "tests.features.fold_cases"
FOLDS = 5


@pytest.fixture(autouse=True)
def recipe(tmp_path):
    """`recipe=folded`, which notes the samples of each run by its fold."""
    content = {
        "defaults": [{"override /logger": "jsonl"}],
        "model": {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1},
        "task": {"_target_": f"{CASES}.Notes", "folder": str(tmp_path), "run": "${data.fold}"},
        "data": {"datasets": {"_target_": f"{CASES}.data", "kind": "tensors"}, "global_batch_size": 6},
        "trainer": {
            "max_epochs": 1,
            "log_every_n_steps": 1,
            "num_sanity_val_steps": 0,
            "limit_test_batches": 0,
        },
    }
    write_recipe(tmp_path, "folded", content)


def of_kind(kind: str) -> tuple[str, str]:
    return "recipe=folded", f"data.datasets.kind={kind}"


def seen(folder: Path, fold: int | None, part: str) -> list[int]:
    """The numbers of the samples that a run has seen on all its ranks, as often as it has."""
    numbers: list[int] = []
    for file in sorted(folder.glob(f"{fold}_{part}_*")):
        numbers += map(int, file.read_text().split())
    return numbers


# Which samples


@pytest.mark.parametrize("kind", ["tensors", "map_style", "without_targets", "loaders"])
def test_each_sample_is_held_out_once(fork_server, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    swept = (f"data.folds={FOLDS}", f"data.fold=range({FOLDS})")
    assert compose.main(["-m", "trainer.gpus=0", *of_kind(kind), *swept], fork_server=fork_server) == 0

    held_out = [seen(tmp_path, fold, "val") for fold in range(FOLDS)]
    assert sorted(number for fold in held_out for number in fold) == list(range(SIZE))
    for fold in range(FOLDS):
        assert set(seen(tmp_path, fold, "train")) == set(range(SIZE)) - set(held_out[fold])
    sizes = [len(fold) for fold in held_out]
    assert max(sizes) - min(sizes) <= 1
    if kind != "without_targets":
        for label in set(CLASSES):
            counts = [sum(CLASSES[number] == label for number in fold) for fold in held_out]
            assert max(counts) - min(counts) <= 1


def test_folds_are_the_same_for_every_seed(train, tmp_path):
    common = (*of_kind("tensors"), f"data.folds={FOLDS}", "data.fold=1")
    train(*common, "seed=1")
    first = seen(tmp_path, 1, "val")
    orders = [seen(tmp_path, 1, "train")]
    train(*common, "seed=2")
    assert seen(tmp_path, 1, "val") == first + first
    orders.append(seen(tmp_path, 1, "train")[len(orders[0]) :])
    assert Counter(orders[0]) == Counter(orders[1])
    assert orders[0] != orders[1]


def test_without_folds_the_recipes_own_part_is_validated(train, tmp_path):
    train(*of_kind("tensors"))
    assert sorted(seen(tmp_path, None, "train")) == list(range(SIZE))
    assert sorted(seen(tmp_path, None, "val")) == list(range(OWN_VAL, OWN_VAL + 9))


@pytest.mark.parametrize("kind", ["rows", "subsets"])
def test_held_out_samples_are_not_augmented(train, tmp_path, kind):
    run_dir = train(*of_kind(kind), "data.folds=3", "data.fold=2")
    trained = seen(tmp_path, 2, "train")
    validated = seen(tmp_path, 2, "val")
    assert min(trained) >= AUGMENTED
    assert max(validated) < SIZE
    numbers = {number - AUGMENTED for number in trained} | set(validated)
    # The recipe's own validation part isn't looked at.
    assert numbers == set(range(SIZE if kind == "rows" else SIZE - 9))
    assert "data: val is fold 2 of 3" in results.log(run_dir)


def test_data_that_may_differ_keeps_its_own_transform(train, tmp_path):
    train(*of_kind("other_rows"), "data.folds=3", "data.fold=0")
    validated = seen(tmp_path, 0, "val")
    assert min(validated) >= AUGMENTED
    trained = seen(tmp_path, 0, "train")
    assert sorted({*trained, *validated}) == list(range(AUGMENTED, AUGMENTED + SIZE))


# The same numbers


@pytest.mark.multiproc
@pytest.mark.parametrize("kind", ["rows", "map_style"])
def test_two_processes_give_the_same_numbers(train, kind):
    common = (*of_kind(kind), "trainer.max_epochs=2", "data.folds=4", "data.fold=1", "optimizer.lr=0.01")
    one = train(*common)
    two = train(*common, "topology.procs_per_node=2")
    for name in ("train/loss", "val/loss", "val/number"):
        assert results.curve(two, name) == pytest.approx(results.curve(one, name), rel=1e-5)
    results.assert_same(results.weights(two), results.weights(one), tolerance=1e-6)


@pytest.mark.parametrize("kind", ["rows", "map_style"])
def test_a_run_of_a_fold_resumes_exactly(train, kind):
    common = (*of_kind(kind), "trainer.max_epochs=2", "data.folds=4", "data.fold=1", "optimizer.lr=0.01")
    whole = train(*common)
    stopped = train(*common, "trainer.max_steps=3")
    assert results.pointed(stopped, "last") == 3
    train(f"resume={stopped}", "trainer.max_steps=null")
    results.assert_same(results.weights(stopped), results.weights(whole))
    assert results.curve(stopped, "train/loss") == results.curve(whole, "train/loss")
    # At the end of the run that was stopped, its weights were validated once more.
    assert results.curve(whole, "val/loss").items() <= results.curve(stopped, "val/loss").items()


def test_the_fold_of_a_run_is_evaluated(train):
    trained = train(*of_kind("rows"), "data.folds=3", "data.fold=1")
    evaluated = train("job=eval", "eval.part=val", f"checkpoint.path={trained}")
    assert results.metrics(evaluated) == results.results(trained)["last"]["metrics"]


def test_another_fold_is_not_resumed_with(train, capfd):
    trained = train(*of_kind("tensors"), "data.folds=3", "data.fold=1")
    train(f"resume={trained}", "trainer.max_epochs=2", "data.fold=2", status=2)
    err = capfd.readouterr().err
    assert "it would validate on samples that were trained on. The run has data.folds=3 data.fold=1" in err


# What is planned and refused


def test_the_plan_counts_the_folds(fork_server, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    plan = ["job=plan", "plan.format=json", "trainer.gpus=0", "data.folds=5", "data.fold=4"]
    assert compose.main([*plan, "recipe=toy"], fork_server=fork_server) == 0
    planned = json.loads(capfd.readouterr().out)
    assert planned["data"] == {"train": 1280, "val": 320, "test": 200, "streams": [], "source": "data"}
    assert planned["steps"]["per_epoch"] == 1280 // 20

    # Without the files, the number of samples is known.
    assert compose.main([*plan, "recipe=mnist", "data.root=nowhere"], fork_server=fork_server) == 0
    planned = json.loads(capfd.readouterr().out)
    assert (planned["data"]["train"], planned["data"]["val"]) == (44_000, 11_000)
    assert planned["data"]["source"] == "plan.train_samples"


@pytest.mark.parametrize(
    ("kind", "folds", "said"),
    [
        ("stream", 3, "data.folds=3 can't go with a stream to train on"),
        ("tensors", SIZE + 1, f"the train part has {SIZE} samples. Use {SIZE} folds or fewer"),
        ("weighted", 3, "can't go with the WeightedRandomSampler that data.datasets brings along"),
    ],
)
def test_data_without_folds_is_refused(train, capfd, kind, folds, said):
    train(*of_kind(kind), f"data.folds={folds}", "data.fold=0", "data.shuffle=false", status=2)
    assert said in capfd.readouterr().err


def test_a_sampler_of_the_configuration_draws_from_the_folds(train, tmp_path):
    sampler = ("data.sampler={_target_:framework.samplers.BalancedSampler,num_samples:60}",)
    train(*of_kind("map_style"), *sampler, "data.folds=3", "data.fold=0")
    trained = seen(tmp_path, 0, "train")
    assert len(trained) == 60
    assert not set(trained) & set(seen(tmp_path, 0, "val"))
    counts = Counter(CLASSES[number] for number in trained)
    assert min(counts.values()) >= 10

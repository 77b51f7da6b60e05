"""Collate functions, samplers, DataLoaders and Hugging Face's data sets: which samples each step takes."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from itertools import chain

import pytest

from tests.features.data_cases import SIZE, Sequences
from tests.helpers import results
from tests.helpers.internals import compose
from tests.helpers.recipes import write_recipe

CASES = "tests.features.data_cases"
SAMPLERS = "framework.samplers"
PAD = {"_target_": f"{CASES}.pad", "value": 0.5}
BATCH = 6


@pytest.fixture
def write(tmp_path):
    """Write a recipe with this section `data`."""

    def write(data):
        recipe = {
            "defaults": [{"override /logger": "jsonl"}],
            "model": {"_target_": f"{CASES}.Mean"},
            "task": {"_target_": f"{CASES}.Notes", "folder": str(tmp_path)},
            "data": {"datasets": {"_target_": f"{CASES}.sequences"}, "global_batch_size": BATCH, **data},
            "trainer": {"max_epochs": 2, "log_every_n_steps": 1},
        }
        write_recipe(tmp_path, "given", recipe)

    return write


@pytest.fixture
def run(write, train):
    def run(data, *overrides, status=0):
        write(data)
        return train("recipe=given", *overrides, status=status)

    return run


@pytest.fixture
def taken(run, train, tmp_path):
    """Train; return the samples of each step of all ranks, and the longest sequence in it."""

    def taken(data, *overrides, ranks=1, resumed_at=None):
        for file in tmp_path.glob("rank_*"):
            file.unlink()
        several = (f"topology.procs_per_node={ranks}", *overrides)
        if resumed_at is None:
            run(data, *several)
        else:
            part = run(data, *several, f"trainer.max_steps={resumed_at}")
            train(f"resume={part}", "trainer.max_steps=null")
        of_ranks = []
        for rank in range(ranks):
            lines = [line.rpartition(" ") for line in (tmp_path / f"rank_{rank}").read_text().splitlines()]
            of_ranks.append([(ast.literal_eval(samples), int(length)) for samples, _, length in lines])
        steps = []
        for parts in zip(*of_ranks, strict=True):
            samples = chain.from_iterable(samples for samples, _ in parts)
            steps.append((list(samples), max(length for _, length in parts)))
        return steps

    return taken


def all_samples(steps):
    """Return the samples of all steps, one after another."""
    return list(chain.from_iterable(samples for samples, _ in steps))


def sampler(name, **keywords):
    return {"collate_fn": PAD, "sampler": {"_target_": f"{SAMPLERS}.{name}", **keywords}}


DATA: Mapping[str, dict] = {
    "shuffled": {"collate_fn": PAD},
    "weighted": sampler("WeightedRandomSampler", weights="weights", num_samples=21),
    "balanced": sampler("BalancedSampler"),
    "by length": sampler("LengthSampler"),
    "mixed": sampler("MixtureSampler", weights=[3, 1]) | {"datasets": {"_target_": f"{CASES}.mixed"}},
}
OF_AN_EPOCH = {"weighted": 21}


@pytest.mark.multiproc
@pytest.mark.parametrize("name", DATA)
def test_steps_take_the_same_samples_on_any_topology(taken, name):
    one = taken(DATA[name])
    samples = all_samples(one)
    size = OF_AN_EPOCH.get(name, SIZE)
    assert len(samples) == 2 * size
    assert [len(step) for step, _ in one][: -(-size // BATCH)] == [
        *[BATCH] * (size // BATCH),
        *filter(None, [size % BATCH]),
    ]
    for ranks in (2, 3):
        for (step, _), (same, _) in zip(taken(DATA[name], ranks=ranks), one, strict=True):
            assert sorted(step) == sorted(same)
    assert taken(DATA[name], resumed_at=3) == one
    epochs = samples[:size], samples[size:]
    assert epochs[0] != epochs[1]
    kept = Sequences()
    if name == "weighted":
        assert all(kept.weights[each] for each in samples)
    elif name == "balanced":
        assert 0.3 < sum(kept.targets[each] for each in samples) / len(samples) < 0.7
    elif name == "mixed":
        assert 0.6 < sum(each < 100 for each in samples) / len(samples) < 0.9
    else:
        assert sorted(epochs[0]) == list(range(SIZE))
    if name == "by length":
        longest = [length * len(step) for step, length in one]
        shuffled = [length * len(step) for step, length in taken(DATA["shuffled"])]
        assert sum(longest) < 0.8 * sum(shuffled)


def growing(**keywords):
    """A curriculum of 7, 20, 33, 40, 40, … samples, which are 2, 4, 6, 7, 7, … steps."""
    return {"collate_fn": PAD, "sampler": {"_target_": f"{CASES}.Growing", **keywords}}


@pytest.mark.multiproc
def test_epochs_may_differ_in_length(taken, train, tmp_path):
    three = "trainer.max_epochs=3"
    one = taken(growing(), three)
    assert [len(step) for step, _ in one] == [6, 1, 6, 6, 6, 2, 6, 6, 6, 6, 6, 3]
    samples = all_samples(one)
    for begin, size in ((0, 7), (7, 20), (27, 33)):
        assert sorted(samples[begin : begin + size]) == list(range(size))
    # In the middle of epochs 0, 1 and 2.
    for step in (1, 3, 8):
        assert taken(growing(), three, resumed_at=step) == one
    assert taken(growing(computes=True), three, resumed_at=3) == one
    for (step, _), (same, _) in zip(taken(growing(computes=True), three, ranks=2), one, strict=True):
        # The step of a single sample gives the second rank the same one, at weight 0.
        assert set(step) == set(same)

    # From one process to two, in the middle of epoch 1.
    part = train("recipe=given", three, "trainer.max_steps=3", "topology.procs_per_node=1")
    for file in tmp_path.glob("rank_*"):
        file.unlink()
    train(f"resume={part}", "trainer.max_steps=null", "topology.procs_per_node=2")
    ranks = [(tmp_path / f"rank_{rank}").read_text() for rank in range(2)]
    left = [int(number) for text in ranks for number in re.findall(r"\d+(?=[,\]])", text)]
    assert sorted(left) == sorted(all_samples(one[3:]))


def test_schedules_and_plans_follow_the_length_of_each_epoch(run, train, fork_server, tmp_path, monkeypatch, capfd):
    whole = run(growing(), "trainer.max_epochs=3", "scheduler=cosine", "optimizer.lr=1")
    rates = results.curve(whole, "train/lr")
    assert rates == pytest.approx({step: (1 + math.cos(math.pi * (step - 1) / 12)) / 2 for step in range(1, 13)})
    part = run(
        growing(),
        "trainer.max_epochs=3",
        "scheduler=cosine",
        "optimizer.lr=1",
        f"+callbacks.stop._target_={CASES}.StopAt",
    )
    assert results.results(part)["steps"] == 3
    resumed = train(f"resume={part}", "callbacks=none")
    assert results.curve(resumed, "train/lr") == rates
    by_epoch = run(
        growing(), "trainer.max_epochs=null", "trainer.max_steps=7", "scheduler=cosine", "scheduler.interval=epoch"
    )
    # Three epochs are begun.
    assert len(set(results.curve(by_epoch, "train/lr").values())) == 3

    monkeypatch.chdir(tmp_path)
    capfd.readouterr()
    plan = ["job=plan", "recipe=given", "trainer.gpus=0", "plan.format=json"]
    assert (
        compose.main([*plan, "trainer.max_epochs=4", "trainer.limit_train_batches=0.5"], fork_server=fork_server) == 0
    )
    planned = json.loads(capfd.readouterr().out)
    assert planned["steps"]["per_epoch"] is None
    assert planned["steps"]["total"] == 1 + 2 + 3 + 3
    assert "1, 2, 3, 3 steps" in " ".join(planned["notes"])


@pytest.mark.parametrize(
    ("keywords", "overrides", "said"),
    [
        ({"wrong": "nothing"}, (), r"Growing\.length\(0\) returned 0\. It must return the samples of that epoch"),
        ({"wrong": "float"}, (), r"Growing\.length\(0\) returned 7\.0\."),
        ({"wrong": "changing"}, (), r"returned 1, and 2 when it was called again"),
        ({"wrong": "fewer"}, (), r"shape \(6,\), torch\.int64\. It must return int64 indices of shape \(7,\)"),
        ({"wrong": "fewer", "computes": True}, (), "returned 6 indices for an epoch of 7 samples"),
        ({"wrong": "slices", "computes": True}, (), r"has a tensor of shape \(7,\), torch\.int32 at \[0:7\]"),
        ({}, ("data.drop_last=true", "data.global_batch_size=8"), "leaves nothing of epoch 0: it has 7 samples"),
    ],
)
def test_a_wrong_length_or_order_is_refused(run, capfd, keywords, overrides, said):
    run(growing(**keywords), *overrides, status=2)
    assert re.search(said, capfd.readouterr().err.replace("\n", " "))


LOADERS = {
    "plain": list(range(SIZE)),
    "shuffled": list(range(SIZE)),
    "stateful": list(range(SIZE)),
    "weighted": list(range(1, SIZE, 2)),
    "subset": list(range(5, 15)),
    "drawn": list(range(SIZE)),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_gives_its_data_order_and_batches(taken, kind):
    data = {"datasets": {"_target_": f"{CASES}.loader", "kind": kind}, "global_batch_size": None}
    steps = [step for step, _ in taken(data, "trainer.max_epochs=1")]
    samples = list(chain.from_iterable(steps))
    assert {len(step) for step in steps[:-1]} == {4}
    if kind == "plain":
        assert samples == LOADERS[kind]
    elif kind in ("shuffled", "stateful", "subset"):
        assert samples != sorted(samples) == LOADERS[kind]
    elif kind == "weighted":
        assert len(samples) == 20
        assert set(samples) <= set(LOADERS[kind])
    else:
        assert len(samples) == 8


@pytest.mark.multiproc
@pytest.mark.parametrize("streams", [False, True])
def test_an_incomplete_global_batch_is_dropped(taken, streams):
    data = {"collate_fn": PAD, "drop_last": True, "global_batch_size": 12}
    if streams:
        data = {
            "datasets": {"_target_": f"{CASES}.huggingface", "streams": True},
            "shuffle": False,
            "drop_last": True,
            "global_batch_size": 12,
        }
    one = taken(data)
    assert [len(step) for step, _ in one] == [12] * (SIZE // 12) * 2
    split = taken(data, "trainer.accumulate_grad_batches=2", ranks=2)
    assert sorted(all_samples(split)) == sorted(all_samples(one))
    assert taken(data, resumed_at=2) == one


def test_a_loader_reports_that_it_drops_a_batch(taken):
    data = {"datasets": {"_target_": f"{CASES}.loader", "kind": "dropping"}, "global_batch_size": None}
    assert [len(step) for step, _ in taken(data, "trainer.max_epochs=1")] == [4] * 6
    assert len(taken(data, "trainer.max_epochs=1", "data.drop_last=false")) == 7


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.multiproc)])
def test_data_sets_of_hugging_face(taken, streams, ranks):
    data = {"datasets": {"_target_": f"{CASES}.huggingface", "streams": streams}, "shuffle": False}
    steps = taken(data, "trainer.max_epochs=1", ranks=ranks)
    assert sorted(all_samples(steps)) == list(range(SIZE))


def loader(kind):
    return {"datasets": {"_target_": f"{CASES}.loader", "kind": kind}}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (loader("distributed"), r"The train part is a DataLoader.*sampler=DistributedSampler: .*leave"),
        (loader("initialised"), r"worker_init_fn=print: Leave it out"),
        ({"drop_last": True, "global_batch_size": SIZE + 1}, r"data\.drop_last=true leaves nothing of the train part"),
        (loader("dropping a stream"), r"The val part is a DataLoader.*drop_last=True: .*of a stream"),
        (loader("dropping all"), r"drop_last=True leaves nothing of the val part: it has 9 samples, and a batch 10"),
        (loader("batches"), r"data\.global_batch_size=6 can't go with batch_sampler=Batches"),
        (sampler("WeightedRandomSampler", weights=[1.0, 2.0]), r"2 weights for 40 samples"),
        (sampler("WeightedRandomSampler", weights=[-1.0] * SIZE), r"not negative"),
        (sampler("WeightedRandomSampler", weights=[0.0] * SIZE), r"some above 0"),
        (sampler("WeightedRandomSampler", weights="weihgts"), r"data\.sampler\.weights=weihgts: Sequences has no such"),
        (sampler("WeightedSampler", weights="weights"), r"Did you mean framework\.samplers\.WeightedRandomSampler"),
        (sampler("MixtureSampler", weights=[1, 2]), r"ConcatDataset, and got a Sequences"),
        (sampler("LengthSampler", lengths=[1, 2]), r"lengths of shape \(2,\) for 40 samples"),
        ({"collate_fn": PAD | {"valeu": 1}}, r"Did you mean data\.collate_fn\.value\?"),
        ({"collate_fn": {"_target_": f"{CASES}.pda"}}, r"Did you mean tests\.features\.data_cases\.pad\?"),
        ({"collate_fn": PAD, "loader": "resident"}, r"data\.loader=resident keeps .*collate function"),
        *(
            ({"collate_fn": PAD, "sampler": {"_target_": f"{CASES}.OwnSampler", "kind": kind}}, said)
            for kind, said in (
                ("list", r"OwnSampler\.order returned \[0, 1"),
                ("short", r"a tensor of shape \(7,\)"),
                ("outside", r"indices outside of the 40 samples"),
                ("floats", r"torch\.float32"),
            )
        ),
    ],
)
def test_what_cannot_be_taken_is_refused(run, capfd, data, said):
    run(data, status=2)
    assert re.search(said, capfd.readouterr().err, re.DOTALL)


def test_a_failing_collate_function_is_named(run, capfd):
    run({"collate_fn": {"_target_": f"{CASES}.fails"}}, status=1)
    err = capfd.readouterr().err
    assert "The collate function, given samples" in err
    assert "in fails: raise ValueError" in err
    # The samples have different lengths.
    run({}, status=1)
    assert "data.collate_fn" in capfd.readouterr().err


def test_the_plan_counts_what_the_sampler_draws(write, fork_server, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for data, per_epoch in ((DATA["weighted"], 4), (loader("weighted") | {"global_batch_size": None}, 5)):
        write(data)
        assert (
            compose.main(["job=plan", "recipe=given", "trainer.gpus=0", "plan.format=json"], fork_server=fork_server)
            == 0
        )
        assert json.loads(capfd.readouterr().out)["steps"]["per_epoch"] == per_epoch


def test_weighted_samples_are_logged_and_evaluated(run):
    run_dir = run(DATA["weighted"], "trainer.max_epochs=1")
    metrics = results.results(run_dir)["last"]["metrics"]
    assert metrics["val/all/number"] == sum(range(SIZE)) / SIZE
    assert metrics["val/few/number"] == 101


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("trainer.precision=bf16-true", "data.num_workers=1"),
    ],
    ids=str,
)
def test_batches_may_be_records_of_packed_sequences(run, overrides):
    task = ("~task.folder", f"task._target_={CASES}.OfPacked", "trainer.max_epochs=1")
    run_dir = run({"collate_fn": {"_target_": f"{CASES}.pack"}}, *task, *overrides)
    losses = results.curve(run_dir, "train/loss")
    assert len(losses) == -(-SIZE // BATCH)

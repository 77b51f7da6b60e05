"""A strategy of a user's own whose ranks share a batch: the numbers of one process."""

from __future__ import annotations

import pytest

from tests.helpers import results
from tests.helpers.recipes import write_recipe

CASES = "tests.features.tensor_parallel_case"
SUPERVISED = {
    "_target_": "framework.tasks.Supervised",
    "loss": {"_target_": "torch.nn.CrossEntropyLoss"},
    "metrics": {"counted": {"_target_": f"{CASES}.Counted"}, "accuracy": {"_target_": "framework.tasks.Accuracy"}},
}
PLAN = {"wide": "col", "narrow": "row"}
STEPS = 12


@pytest.fixture
def run(train, tmp_path):
    """Train on one process, or tensor-parallel on several."""

    def run(*overrides, processes, ranks=2, task=SUPERVISED, dropout=0.0):
        recipe = {
            "defaults": [{"override /optimizer": "adam"}, {"override /logger": "jsonl"}],
            "model": {"_target_": f"{CASES}.Network", "dropout": dropout},
            "task": task,
            "data": {"datasets": {"_target_": f"{CASES}.points"}, "global_batch_size": 12, "eval_batch_size": 4},
            "trainer": {
                "precision": "64-true",
                "max_epochs": None,
                "max_steps": STEPS,
                "log_every_n_steps": 3,
                "gradient_clip_val": 0.5,
            },
            "optimizer": {"lr": 0.05},
        }
        if processes > 1:
            recipe["strategy"] = {"_target_": f"{CASES}.TensorParallel", "plan": PLAN, "ranks": ranks}
        write_recipe(tmp_path, "parallel", recipe)
        return train("recipe=parallel", f"topology.procs_per_node={processes}", *overrides)

    return run


def assert_same(run_dir, whole):
    results.assert_same(results.weights(run_dir), results.weights(whole), tolerance=1e-6)
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        assert results.curve(run_dir, name) == pytest.approx(results.curve(whole, name), abs=1e-6)
    assert results.metrics(run_dir) == pytest.approx(results.metrics(whole), abs=1e-6)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("processes", "overrides"),
    [
        pytest.param(2, (), id="one copy"),
        pytest.param(4, ("trainer.accumulate_grad_batches=2",), id="two copies"),
    ],
)
def test_it_trains_as_one_process(run, processes, overrides):
    run_dir = run(*overrides, processes=processes)
    assert_same(run_dir, run(processes=1))
    assert results.metrics(run_dir)["val/counted"] == 23


@pytest.mark.multiproc
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_its_weights_are_counted_once_and_it_resumes(run, train, processes):
    task = {"_target_": f"{CASES}.Weighted"}
    whole = run(processes=1, task=task)
    part = run(f"trainer.max_steps={STEPS // 2}", processes=processes, task=task)
    train(f"resume={part}", f"trainer.max_steps={STEPS}")
    assert_same(part, whole)


@pytest.mark.multiproc
def test_ranks_of_a_copy_draw_the_same_dropout(run):
    assert_same(run(processes=2, dropout=0.3), run(processes=1, dropout=0.3))

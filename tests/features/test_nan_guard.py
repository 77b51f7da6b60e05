"""callbacks=[nan_guard]: where a training that isn't finite any more went wrong, through the command."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import results
from tests.helpers.recipes import write_recipe

CASES = "tests.features.fault_cases"
LIGHTNING_CASE = "tests.features.lightning_fault_case"
GUARDED = (
    "recipe=toy",
    "callbacks=[nan_guard]",
    "logger={}",
    "checkpoint.enabled=false",
    "data.shuffle=false",
    "data.global_batch_size=20",
    "trainer.max_steps=12",
    "trainer.log_every_n_steps=4",
    "trainer.limit_val_batches=0",
    "trainer.limit_test_batches=0",
)
ON_TWO = ("topology.procs_per_node=2",)
ACCUMULATED = ("trainer.accumulate_grad_batches=2",)


def fault(kind: str, **settings: Any) -> tuple[str, ...]:
    node = {"_target_": f"{CASES}.Fault", "kind": kind, **settings}
    return tuple(f"+callbacks.fault.{key}={value}" for key, value in node.items())


def poisoned(index: int, **settings: Any) -> tuple[str, ...]:
    added = {"index": index, **settings}
    keys = [f"+data.datasets.{key}={value}" for key, value in added.items()]
    return (f"data.datasets._target_={CASES}.poisoned", *keys)


def explanation(run_dir: Any) -> str:
    """Return what the guard has added to the error that ended the run."""
    cause = results.failure(run_dir)["cause"]
    (line,) = [line for line in cause.splitlines() if line.startswith("nan_guard: ")]
    return line.removeprefix("nan_guard: ")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        pytest.param(
            fault("layer"),
            "step 7, rank 0: the output of `net2` (Linear) is infinite or above 1e19 in the float32 forward for all 20 "
            "samples of micro-batch 0. Its input is as in the steps before.",
            id="layer",
        ),
        pytest.param(
            fault("activation", layer="net1"),
            "step 7, rank 0: the output of `net1` (Linear) is NaN in the float32 forward for sample 123. "
            "Its input is as in the steps before.",
            id="activation",
        ),
        pytest.param(
            fault("gradient"),
            "step 7, rank 0: the gradient of `net2.weight` is NaN in the float32 backward, in micro-batch 0 "
            "(20 samples). The forward is as in the steps before.",
            id="gradient",
        ),
        pytest.param(
            fault("backward"),
            "step 7, rank 0: the gradient of `net2.bias` is NaN in the float32 backward, in micro-batch 0",
            id="backward",
        ),
        pytest.param(
            fault("learning_rate"),
            "step 7, rank 0: the update makes `net2.weight` too large. The learning rate went from 0.001 to 1e+10.",
            id="learning rate",
        ),
        pytest.param(
            poisoned(130),
            "step 7, rank 0: `batch[0]` is NaN for sample 130. The data has these values.",
            id="sample",
        ),
        pytest.param(
            poisoned(130, value=1e30),
            "step 7, rank 0: `batch[0]` is infinite or above 1e19 for sample 130. The data has",
            id="large sample",
        ),
        pytest.param(
            poisoned(10, value=1e30),
            "step 1, rank 0: `batch[0]` is infinite or above 1e19 for sample 10. The data has these values.",
            id="in the first step",
        ),
        pytest.param(
            poisoned(130, target="true"),
            "step 7, rank 0: `batch[1]` is NaN for sample 130. The data has these values.",
            id="target",
        ),
        pytest.param(
            poisoned(130, value=1e30, target="true"),
            "step 7, rank 0: `batch[1]` is infinite or above 1e19 for sample 130. The data has these values.",
            id="large target",
        ),
        pytest.param(
            (f"model._target_={CASES}.Masked", *poisoned(130)),
            "step 7, rank 0: `batch[0]` is NaN for sample 130.",
            id="with a mask",
        ),
        pytest.param(
            (f"model._target_={CASES}.Normed", *fault("activation", layer="net1")),
            "step 7, rank 0: the output of `net1` (Linear) is NaN in the float32 forward for sample 123.",
            id="before a BatchNorm",
        ),
        pytest.param(
            (f"model._target_={CASES}.Queried", *poisoned(130)),
            "step 7, rank 0: `batch[0]` is NaN for sample 130.",
            id="a module that returns its parameter",
        ),
        pytest.param(
            (*ACCUMULATED, *poisoned(133)),
            "step 7, rank 0: `batch[0]` is NaN for sample 133.",
            id="accumulated",
        ),
        pytest.param(
            ("trainer.precision=bf16-mixed", *fault("layer", layer="net1")),
            "step 7, rank 0: the output of `net1` (Linear) is infinite or above 1e19 in the bf16 forward for all 20",
            id="bf16",
        ),
    ],
)
def test_names_where_a_value_is_not_finite_first(train, overrides, says):
    assert says in explanation(train(*GUARDED, *overrides, status=1))


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        pytest.param(
            fault("gradient", rank=1),
            "step 7, rank 1: the gradient of `net2.weight` is NaN in the float32 backward, in micro-batch 0 "
            "(10 samples).",
            id="gradient",
        ),
        pytest.param(
            (*ACCUMULATED, *fault("activation", layer="net1", rank=1)),
            "step 7, rank 1: the output of `net1` (Linear) is NaN in the float32 forward for sample 133.",
            id="activation",
        ),
        pytest.param(
            ("strategy=fsdp", *poisoned(135)),
            "step 7, rank 1: `batch[0]` is NaN for sample 135.",
            id="fsdp",
        ),
    ],
)
def test_names_the_rank_on_which_it_began(train, overrides, says):
    assert says in explanation(train(*GUARDED, *ON_TWO, *overrides, status=1))


@pytest.mark.multiproc
def test_names_the_rank_of_a_fault_that_all_have_in_the_next_objective(train, tmp_path):
    recipe = {
        "defaults": [{"override /optimizer": None}, {"override /callbacks": "nan_guard"}],
        "model": {"_target_": "tests.features.optimizer_cases.Heads"},
        "task": {"_target_": "tests.features.optimizer_cases.Alternating", "every": 1},
        "data": {"datasets": {"_target_": "tests.features.optimizer_cases.points"}, "global_batch_size": 12},
        "optimizer": {
            "copy": {"_target_": "torch.optim.SGD", "params": "^(body|copy)", "lr": 0.01},
            "guess": {"_target_": "torch.optim.SGD", "lr": 0.01},
        },
        "trainer": {"max_epochs": None, "max_steps": 8, "log_every_n_steps": 4, "limit_val_batches": 0},
        "checkpoint": {"enabled": False},
    }
    write_recipe(tmp_path, "heads", recipe)
    run_dir = train("recipe=heads", *ON_TWO, *fault("gradient", layer="body.0", rank=1), status=1)
    assert "step 7, rank 1: the gradient of `body.0.weight` is NaN in the float32 backward" in explanation(run_dir)


@pytest.mark.parametrize("automatic", [True, False])
def test_a_sample_of_a_lightning_module_is_named(train, tmp_path, automatic):
    recipe = {
        "defaults": [{"override /task": "lightning"}, {"override /callbacks": "nan_guard"}],
        "model": {"_target_": f"{LIGHTNING_CASE}.Lit", "automatic": automatic},
        "data": {"datasets": {"_target_": f"{LIGHTNING_CASE}.rootless"}, "batch_size": 8, "shuffle": False},
        "trainer": {"max_epochs": 1, "log_every_n_steps": 4},
        "checkpoint": {"enabled": False},
    }
    write_recipe(tmp_path, "lit", recipe)
    run_dir = train("recipe=lit", status=1)
    assert "step 7, rank 0: `batch[1]` is NaN for sample 50." in explanation(run_dir)


def test_a_guarded_run_is_the_same(train):
    runs = [train("recipe=toy", "trainer.max_steps=12", "logger={}", *extra) for extra in ((), GUARDED[1:2])]
    results.assert_same(results.weights(runs[0]), results.weights(runs[1]))


def test_a_resumed_run_is_guarded(train):
    overrides = [text for text in GUARDED if text != "checkpoint.enabled=false"]
    stopped = train(*overrides, *fault("activation", step=11), "checkpoint.monitor=null", "trainer.max_steps=8")
    resumed = train(f"resume={stopped}", "trainer.max_steps=12", status=1)
    assert "step 11, rank 0: the output of `net2` (Linear) is NaN in the float32 forward for sample 203" in (
        explanation(resumed)
    )

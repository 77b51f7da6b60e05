"""`job=why`: the fault of a run, or the first difference of two, by repeating their steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.features.test_nan_guard import ACCUMULATED, CASES, LIGHTNING_CASE, ON_TWO, fault, poisoned
from tests.helpers.internals import compose, guilty_rows
from tests.helpers.recipes import write_recipe

RUN = (
    "recipe=toy",
    "logger=jsonl",
    "data.shuffle=false",
    "data.global_batch_size=20",
    "trainer.max_steps=20",
    "trainer.log_every_n_steps=4",
    "trainer.limit_val_batches=0",
    "trainer.limit_test_batches=0",
    "checkpoint.monitor=null",
    "checkpoint.every_n_steps=5",
    "checkpoint.save_top_k=-1",
)
Asked = Callable[..., dict[str, Any]]


@pytest.fixture
def why(fork_server, tmp_path, monkeypatch, capfd) -> Asked:
    """Run job=why; return why.json, with what was printed as `out`."""

    def ask(*overrides: str, status: int = 0) -> dict[str, Any]:
        monkeypatch.chdir(tmp_path)
        before = set(tmp_path.glob("outputs/**/why.json"))
        capfd.readouterr()
        assert compose.main(["job=why", *overrides], fork_server=fork_server) == status
        (file,) = set(tmp_path.glob("outputs/**/why.json")) - before
        content: dict[str, Any] = json.loads(file.read_text())
        return {**content, "out": capfd.readouterr().out}

    return ask


def facts(answer: dict[str, Any], *names: str) -> tuple[Any, ...]:
    """Return some facts of the fault; of the samples, the indices."""
    found = answer["fault"]
    values = []
    for name in names:
        if name == "samples":
            values.append([sample["index"] for sample in found["samples"]])
        else:
            values.append(found[name])
    return tuple(values)


# One run


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        pytest.param(
            (*fault("layer", step=13), *ACCUMULATED),
            {"step": 13, "direction": "forward", "layer": "net2", "cause": "layer"},
            id="layer",
        ),
        pytest.param(
            fault("learning_rate", step=12),
            {"step": 12, "direction": "update", "cause": "learning_rate"},
            id="learning rate",
        ),
        pytest.param(
            (*ON_TWO, *fault("gradient", step=13, rank=1)),
            {"step": 13, "rank": 1, "direction": "backward", "layer": "net2.weight", "cause": "gradient"},
            id="gradient of a rank",
        ),
        pytest.param(
            (*ON_TWO, *ACCUMULATED, *poisoned(237, value=1e30)),
            {"step": 12, "rank": 1, "micro_batch": 1, "samples": [237], "kind": "batch", "cause": "sample"},
            id="sample",
        ),
    ],
)
def test_the_fault_of_a_run_is_found(train, why, capfd, overrides, wanted):
    run = train(*RUN, *overrides, status=1)
    assert "job=why run=outputs/toy/" in capfd.readouterr().out
    answer = why(f"run={run}")
    assert facts(answer, *wanted) == tuple(wanted.values())
    assert f"Step {wanted['step']}" in answer["out"]
    assert answer["repeated"][0]["from_step"] == 10


@pytest.mark.exhaustive
def test_the_fault_of_a_lightning_module_is_found(train, tmp_path, why):
    recipe = {
        "defaults": [{"override /task": "lightning"}, {"override /logger": "jsonl"}],
        "model": {"_target_": f"{LIGHTNING_CASE}.Lit"},
        "data": {"datasets": {"_target_": f"{LIGHTNING_CASE}.rootless"}, "batch_size": 8, "shuffle": False},
        "trainer": {"max_epochs": 1, "log_every_n_steps": 4},
        "checkpoint": {"every_n_steps": 2},
    }
    write_recipe(tmp_path, "lit", recipe)
    answer = why(f"run={train('recipe=lit', status=1)}")
    assert facts(answer, "step", "kind", "samples", "cause") == (7, "batch", [50], "sample")


def test_a_fault_from_before_a_checkpoint_is_found(train, why):
    # The learning rate is out of range from step 9 on; the checkpoint of step 10 is finite.
    run = train(*RUN, *fault("learning_rate", step=9, value=1e3), status=1)
    answer = why(f"run={run}")
    assert facts(answer, "step", "cause") == (9, "learning_rate")
    assert [repeated["from_step"] for repeated in answer["repeated"]] == [10, 5]


def test_a_fault_some_steps_before_what_it_leads_to_is_found(train, why):
    # BatchNorm keeps the values finite for some steps after the checkpoint of step 5.
    run = train(*RUN, f"model._target_={CASES}.Normed", *fault("learning_rate", step=5, value=1e3), status=1)
    answer = why(f"run={run}")
    assert facts(answer, "step", "cause") == (5, "learning_rate")
    assert [repeated["from_step"] for repeated in answer["repeated"]] == [5, 0]


def test_a_sample_of_the_first_step_is_found(train, why):
    # There is no step before to compare with, only the other samples.
    answer = why(f"run={train(*RUN, *poisoned(7, value=1e30), status=1)}")
    assert facts(answer, "step", "layer", "samples", "cause") == (1, "batch[0]", [7], "sample")


@pytest.mark.parametrize("named", ["why.step=14", "why.metric=train/loss"])
def test_a_wrong_value_of_a_finite_step_is_found(train, why, named):
    run = train(*RUN, *fault("activation", step=14, layer="net1", value=100.0))
    answer = why(f"run={run}", named)
    wanted = (14, "forward", "net1", [263], "activation")
    assert facts(answer, "step", "direction", "layer", "samples", "cause") == wanted


def test_a_branch_is_repeated_from_where_it_begins(train, why, capfd):
    """It has no earlier checkpoint, and its run has none at that step."""
    run = train(*RUN, *fault("activation", step=14, layer="net1", value=100.0))
    made = train("job=branch", f"run={run}", "step=12", "optimizer.lr=0.002")
    answer = why(f"run={made}", "why.step=14")
    assert facts(answer, "step", "layer", "samples") == (14, "net1", [263])
    answer = why(f"runs=[{run},{made}]")
    assert (answer["difference"]["step"], answer["difference"]["place"]["direction"]) == (13, "update")
    assert [repeated["from_step"] for repeated in answer["repeated"]] == [10, 12]

    ended = train("job=branch", f"run={made}", "step=20", "trainer.max_steps=24")
    assert compose.main(["job=why", f"runs=[{made},{ended}]"]) == 2
    assert "there is no step after it in both runs" in capfd.readouterr().err


CONTRAST = (
    f"model._target_={CASES}.Embedding",
    f"task._target_={CASES}.Contrast",
    "~task.loss",
    "~task.metrics",
)
BLANK = (f"data.datasets._target_={CASES}.blank", "+data.datasets.index=263")


def test_a_sample_that_spoils_all_others_is_found(train, why):
    answer = why(f"run={train(*RUN, *CONTRAST, *BLANK, status=1)}")
    assert facts(answer, "step", "kind", "samples", "cause") == (14, "loss", [263], "loss")
    assert "the loss is NaN for sample 263" in answer["out"]
    assert "without that sample, the rest of the micro-batch is as usual" in answer["out"]


@pytest.mark.multiproc
@pytest.mark.exhaustive
def test_no_sample_is_named_where_ranks_exchange_values(train, why):
    answer = why(f"run={train(*RUN, *ON_TWO, *CONTRAST, '+task.gathers=true', *BLANK, status=1)}")
    assert facts(answer, "step", "kind", "num_samples") == (14, "loss", 10)
    assert len(answer["fault"]["samples"]) == 10


@pytest.mark.parametrize("guilty", [[], [0], [23], [11], [0, 1], [22, 23], [3, 9, 17], list(range(24))])
def test_guilty_rows_are_found_by_leaving_rows_out(guilty):
    def is_wrong(rows: Sequence[int]) -> bool | None:
        # A model that mixes samples may refuse fewer than three.
        if len(rows) < 3:
            return None
        return not {*guilty}.isdisjoint(rows)

    found = guilty_rows(is_wrong, num_rows=24)
    assert found == (guilty if 0 < len(guilty) < 24 else None)


def test_a_usual_step_has_no_fault(train, why):
    answer = why(f"run={train(*RUN)}", "why.step=18", status=1)
    assert answer["fault"] is None
    assert "Nothing stands out in step 18" in answer["out"]


# Two runs


def different(train: Any, why: Asked, one: tuple[str, ...], other: tuple[str, ...]) -> dict[str, Any]:
    runs = [train(*RUN, *one), train(*RUN, *other)]
    return why(f"runs=[{runs[0]},{runs[1]}]", status=1 if one == other else 0)


@pytest.mark.exhaustive
def test_equal_runs_are_the_same(train, why):
    answer = different(train, why, (), ())
    assert answer["difference"] is None
    assert "The same" in answer["out"]


def test_another_seed_of_dropout_differs_in_its_layer(train, why):
    model = f"model._target_={CASES}.Dropped"
    answer = different(train, why, (model,), (model, "+model.seed=1"))
    difference = answer["difference"]
    assert (difference["what"], difference["step"], difference["rank"]) == ("tensor", 1, 0)
    assert (difference["place"]["layer"], difference["place"]["kind"]) == ("drop", "output")
    assert answer["sections"]["configuration"]["model.seed"] == [None, 1]


@pytest.mark.multiproc
def test_another_value_of_a_sample_differs_in_the_sample(train, why):
    one = (*ON_TWO, *poisoned(251, value=0.0))
    other = (*ON_TWO, *poisoned(251, value=3.0))
    difference = different(train, why, one, other)["difference"]
    assert (difference["what"], difference["step"], difference["rank"]) == ("tensor", 13, 1)
    assert (difference["place"]["kind"], difference["samples"]) == ("batch", [251])
    assert difference["logged"]["step"] == 16


@pytest.mark.exhaustive
def test_another_order_differs_in_its_samples(train, why):
    difference = different(train, why, (), ("data.shuffle=true",))["difference"]
    assert (difference["what"], difference["step"]) == ("data", 1)
    assert difference["samples"][0]


def test_another_learning_rate_differs_in_the_update(train, why):
    answer = different(train, why, (), ("optimizer.lr=0.002",))
    difference = answer["difference"]
    assert (difference["step"], difference["place"]["direction"]) == (1, "update")
    assert "optimizer.lr is 0.001, and 0.002 in the second run" in answer["out"]


def test_a_changed_line_is_named_by_its_module(train, why, tmp_path):
    module = Path(tmp_path / "own_model.py")
    source = "from recipes.toy import ToyModel\nclass Model(ToyModel):\n    def forward(self, x): return {}\n"
    runs = []
    for line in ("super().forward(x)", "super().forward(x) * 1.01"):
        module.write_text(source.format(line))
        runs.append(train(*RUN, "model._target_=own_model.Model"))
    answer = why(f"runs=[{runs[0]},{runs[1]}]")
    assert (answer["difference"]["what"], answer["difference"]["step"]) == ("logged", 4)
    assert list(answer["sections"]["modules"]) == ["own_model"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((), "job=why needs run=RUN, or two runs"),
        (("run={run}",), "didn't end because a loss or weight wasn't finite"),
        (("run={run}", "why.step=99"), "has made 20 steps"),
        (("run={run}", "why.metric=train/los"), "hasn't logged it"),
        (("run={run}", "why.step=1", "why.metric=train/loss"), "Leave one of them out"),
        (("runs=[{run}]",), "job=why compares two runs"),
    ],
)
def test_what_cannot_be_looked_into_is_refused(shared_run, fork_server, monkeypatch, capfd, overrides, says):
    run = shared_run(*RUN)
    monkeypatch.chdir(run.parents[2])
    arguments = [text.replace("{run}", str(run)) for text in overrides]
    assert compose.main(["job=why", *arguments], fork_server=fork_server) == 2
    assert says in capfd.readouterr().err

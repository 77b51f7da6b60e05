"""`job=parity` as it is typed: recipes that are the same on any number of processes, and those that aren't."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.features.lightning_recipes import MANUAL
from tests.helpers.internals import compose
from tests.helpers.recipes import write_recipe
from tests.helpers.trust import trusting

pytestmark = pytest.mark.multiproc

Compared = Callable[..., tuple[int, dict[str, Any], str]]

CASES = "tests.features.parity_cases"
OPTIONAL = pytest.mark.exhaustive
POINTS = ("recipe=toy", f"data.datasets._target_={CASES}.points", "data.batch_size=16", "optimizer=adam")


def model(name: str) -> str:
    return f"model={{_target_: {CASES}.{name}}}"


def task(what: str) -> list[str]:
    """Return the overrides of a task whose model is the same on any number of processes."""
    return [model("Around"), f"task._target_={CASES}.Task", f"+task.what={what}", "~task.loss", "~task.metrics"]


@pytest.fixture
def compared(fork_server, tmp_path, monkeypatch, capfd) -> Compared:
    """Exit status, parity.json and what is printed; nothing else is left of it."""
    monkeypatch.chdir(tmp_path)

    def run(*overrides: str) -> tuple[int, dict[str, Any], str]:
        status = compose.main(["job=parity", "trainer.gpus=0", *trusting(overrides)], fork_server=fork_server)
        (folder,) = tmp_path.glob("outputs/*/parity/*")
        assert list(folder.rglob("*.pt")) == []
        printed = capfd.readouterr()
        assert printed.err == ""
        return status, json.loads((folder / "parity.json").read_text()), printed.out

    return run


@dataclass(frozen=True, kw_only=True)
class Same:
    overrides: tuple[str, ...]
    layers: int
    steps: int = 3
    unsure: list[str] = field(default_factory=list)


@pytest.mark.parametrize(
    "same",
    [
        # Adam, an epoch whose last batch is of 13 samples, and then of the next epoch; the average copies the model.
        Same(
            overrides=(*POINTS, model("Plain"), "parity.processes=3", "parity.steps=4", "callbacks=ema"),
            layers=7,
            steps=4,
        ),
        # The last step has one sample: one of two processes has none.
        pytest.param(
            Same(
                overrides=(
                    *POINTS,
                    model("Plain"),
                    "trainer.accumulate_grad_batches=2",
                    "data.global_batch_size=16",
                    "+data.datasets.size=33",
                    "optimizer=sgd",
                ),
                layers=7,
            ),
            marks=OPTIONAL,
        ),
        pytest.param(Same(overrides=(*POINTS, model("SequenceFirst")), layers=4), marks=OPTIONAL),
        pytest.param(
            Same(overrides=(*POINTS, model("Softmaxed"), "parity.processes=3"), layers=3, unsure=["shift"]),
            marks=OPTIONAL,
        ),
    ],
    ids=["uneven", "accumulated", "sequence first", "rounding"],
)
def test_the_same(compared: Compared, same: Same) -> None:
    status, answer, printed = compared(*same.overrides)
    assert status == 0
    assert answer["same"] is True
    assert answer["first_difference"] is None
    assert answer["unsure"] == same.unsure
    assert answer["steps"] == same.steps
    assert "The same: " in printed
    # Modules; not those that are never called.
    assert answer["parts"]["layers"]["compared"] == same.layers
    for part in ("layers", "gradients", "weights"):
        greatest = answer["parts"][part]["greatest"]
        # Far from what is allowed: another order of a sum must not turn it over.
        assert greatest["difference"] < 0.5 * greatest["allowed"] < 0.05


# What is between two layers is computed by the model itself.
def test_a_lightning_module_that_steps_itself_is_compared(compared, tmp_path):
    write_recipe(tmp_path, "lit", MANUAL)
    status, answer, printed = compared("recipe=lit")
    assert status == 0, printed
    assert answer["steps"] == 3
    assert answer["parts"]["gradients"]["compared"] == 4


HEAD = ("two", "Linear", "input")


@pytest.mark.parametrize(
    ("reason", "overrides", "layer"),
    [
        ("batch_norm", [model("Normed")], ("1", "BatchNorm1d", "output")),
        pytest.param("factor", task("sum"), None, marks=OPTIONAL),
        pytest.param("random", [model("Around"), "+model.what=dropout"], HEAD, marks=OPTIONAL),
        pytest.param("optimizer", [model("Around"), f"optimizer._target_={CASES}.scaled"], None, marks=OPTIONAL),
        pytest.param("mixing", [model("Around"), "+model.what=mean"], HEAD, marks=OPTIONAL),
        pytest.param("input", task("input"), ("", "Around", "input"), marks=OPTIONAL),
        pytest.param("replicas", [model("Around"), f"optimizer._target_={CASES}.noisy"], None, marks=OPTIONAL),
        pytest.param("buffers", [model("Counting")], None, marks=OPTIONAL),
        pytest.param("backward", [model("Hooked"), "optimizer=sgd"], None, marks=OPTIONAL),
        pytest.param("start", [model("Drawn")], None, marks=OPTIONAL),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_first_difference_is_found_and_explained(
    compared: Compared, reason: str, overrides: list[str], layer: tuple[str, str, str] | None
) -> None:
    status, answer, printed = compared(*POINTS, "parity.steps=1", *overrides)
    first_difference = answer["first_difference"]
    assert (status, answer["same"], first_difference["reason"]) == (1, False, reason)
    assert first_difference["step"] == int(reason != "start")
    found = first_difference["layer"]
    assert (found and (found["name"], found["type"], found["kind"])) == layer
    assert "Not the same: " in printed
    assert "Probably:" in printed
    match reason:
        case "batch_norm":
            assert found["difference"] > 0.01
            assert "the output of 1 (BatchNorm1d)" in printed
            assert "strategy.sync_batchnorm=true" in printed
            assert "8 of 16" in printed
        case "random":
            assert found["before"] == "one"
            assert "Around draws random numbers" in printed
        case "factor":
            assert first_difference["factor"] == pytest.approx(0.5, abs=1e-4)
        case "backward":
            assert first_difference["names"] == ["0.weight"]
            assert first_difference["parts"]["gradients"]["first"]["difference"] == pytest.approx(0.03, rel=0.3)
        case "start":
            assert first_difference["names"] == ["two.weight"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-m", "seed=0,1"), "can't go with a sweep"),
        (("parity.processes=1",), "parity.processes=1"),
        (("topology.nnodes=2",), "compares on one machine"),
        (("launcher=in_process",), "launcher=local"),
        (("parity.processes=20", "data.batch_size=8"), "data.global_batch_size=8"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_compared_is_refused(fork_server, tmp_path, monkeypatch, capfd, arguments, said) -> None:
    monkeypatch.chdir(tmp_path)
    capfd.readouterr()
    assert compose.main(["job=parity", "recipe=toy", "trainer.gpus=0", *arguments], fork_server=fork_server) == 2
    assert said in capfd.readouterr().err
    assert list(tmp_path.rglob("*")) == []

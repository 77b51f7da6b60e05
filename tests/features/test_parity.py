"""`job=parity` as it is typed: recipes that are the same on any number of processes, and those that aren't."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from framework import cli
from tests.helpers.command import run_framework

pytestmark = pytest.mark.multiproc

Compared = Callable[..., tuple[int, dict[str, Any], str]]

CASES = "tests.features.parity_cases"
OPTIONAL = pytest.mark.exhaustive
POINTS = ("recipe=toy", f"data.datasets._target_={CASES}.points", "data.batch_size=16", "optimizer=adam")


def model(name: str) -> str:
    return f"model={{_target_: {CASES}.{name}}}"


def task(what: str) -> list[str]:
    """With a model that is the same on any number of processes."""
    return [model("Around"), f"task._target_={CASES}.Task", f"+task.what={what}", "~task.loss", "~task.metrics"]


@pytest.fixture
def compared(warm, tmp_path, monkeypatch, capfd) -> Compared:
    """Exit status, parity.json and what is printed; nothing else is left of it."""
    monkeypatch.chdir(tmp_path)

    def run(*overrides: str) -> tuple[int, dict[str, Any], str]:
        status = cli.main(["job=parity", "trainer.gpus=0", *overrides], warm=warm)
        (folder,) = tmp_path.glob("outputs/*/parity/*")
        assert list(folder.rglob("*.pt")) == []
        printed = capfd.readouterr()
        assert printed.err == ""
        return status, json.loads((folder / "parity.json").read_text()), printed.out

    return run


@pytest.mark.parametrize(
    ("overrides", "layers", "steps", "unsure"),
    [
        # Adam, an epoch whose last batch is of 13 samples, and then of the next epoch; the average copies the model.
        ((*POINTS, model("Plain"), "parity.processes=3", "parity.steps=4", "callbacks=ema"), 6, 4, []),
        pytest.param(  # the last step has one sample: of two processes one has none
            (*POINTS, model("Plain"), "trainer.accumulate_grad_batches=2", "data.global_batch_size=16",
             "+data.datasets.size=33", "optimizer=sgd"), 6, 3, [], marks=OPTIONAL,
        ),
        pytest.param((*POINTS, model("Plain"), "trainer.precision=64-true"), 6, 3, [], marks=OPTIONAL),
        pytest.param((*POINTS, model("SequenceFirst")), 4, 3, [], marks=OPTIONAL),
        pytest.param((*POINTS, model("Softmaxed"), "parity.processes=3"), 3, 3, ["shift"], marks=OPTIONAL),
        pytest.param(("recipe=toy_model_parallel", "parity.steps=1"), 4, 1, [], marks=OPTIONAL),
        pytest.param(("recipe=digits", "parity.steps=2", "data.batch_size=8"), 10, 2, [], marks=OPTIONAL),
    ],
    ids=["uneven", "accumulated", "float64", "sequence first", "rounding", "model-parallel", "convolutions"],
)  # fmt: skip
def test_the_same(compared: Compared, overrides: tuple[str, ...], layers: int, steps: int, unsure: list[str]) -> None:
    status, answer, printed = compared(*overrides)
    assert (status, answer["same"], answer["departure"], answer["unsure"]) == (0, True, None, unsure)
    assert (answer["layer_alone"], answer["steps"]) == (None, steps)
    assert "The same: " in printed
    # Modules; not those that are never called, nor those that give what the one before has given, as without dropout.
    assert answer["parts"]["layers"]["compared"] == layers
    for part in ("layers", "gradients", "weights"):
        greatest = answer["parts"][part]["greatest"]
        # Far from what is allowed: another order of a sum must not turn it over.
        assert greatest["difference"] < 0.5 * greatest["allowed"] < 0.05


HEAD = ("two", "Linear", "entered")  # what is between two layers is done by the model itself


@pytest.mark.parametrize(
    ("reason", "overrides", "layer"),
    [
        ("batch_norm", [model("Normed")], ("1", "BatchNorm1d", "left")),
        ("sum", task("sum"), None),
        pytest.param("random", [model("Around"), "+model.what=dropout"], HEAD, marks=OPTIONAL),
        pytest.param("optimizer", [model("Around"), f"optimizer._target_={CASES}.scaled"], None, marks=OPTIONAL),
        pytest.param("mixing", [model("Around"), "+model.what=mean"], HEAD, marks=OPTIONAL),
        pytest.param("pairs", [model("Similar")], ("pairs", "Pairs", "left"), marks=OPTIONAL),
        pytest.param("input", task("input"), ("", "Around", "entered"), marks=OPTIONAL),
        pytest.param("input_random", task("input_random"), ("", "Around", "entered"), marks=OPTIONAL),
        pytest.param("task_random", task("task_random"), None, marks=OPTIONAL),
        pytest.param("factor", task("factor"), None, marks=OPTIONAL),
        pytest.param("uneven", [*task("uneven"), "parity.steps=3"], None, marks=OPTIONAL),
        pytest.param("loss", task("loss"), None, marks=OPTIONAL),
        pytest.param("replicas", [model("Around"), f"optimizer._target_={CASES}.noisy"], None, marks=OPTIONAL),
        pytest.param("buffers", [model("Counting")], None, marks=OPTIONAL),
        pytest.param("backward", [model("Hooked"), "optimizer=sgd"], None, marks=OPTIONAL),
        pytest.param("start", [model("Drawn")], None, marks=OPTIONAL),
        pytest.param(
            "unused",
            [model("Sometimes"), "strategy=ddp", "strategy.find_unused_parameters=true"],
            None,
            marks=OPTIONAL,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_first_difference_is_found_with_its_place_and_reason(
    compared: Compared, reason: str, overrides: list[str], layer: tuple[str, str, str] | None
) -> None:
    status, answer, printed = compared(*POINTS, "parity.steps=1", *overrides)
    departure = answer["departure"]
    assert (status, answer["same"], departure["reason"]) == (1, False, reason)
    assert departure["step"] == {"start": 0, "uneven": 3}.get(reason, 1)
    found = departure["layer"]
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
            assert found["before"]["name"] == "one"
            assert "Around draws random numbers in its forward" in printed
        case "sum":
            assert departure["factor"] == pytest.approx(0.5, abs=1e-4)
        case "factor":
            assert departure["factor"] == pytest.approx(0.5**0.5, abs=1e-3)
        case "backward":
            assert departure["names"] == ["0.weight"]
            assert departure["parts"]["gradients"]["worst"]["difference"] == pytest.approx(0.03, rel=0.3)
        case "start":
            assert departure["names"] == ["two.weight"]
        case "unused":
            assert departure["names"] == ["extra.weight", "extra.bias"]


@OPTIONAL
def test_a_failed_training_is_named(warm, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    typed = ("job=parity", "trainer.gpus=0", *POINTS, model("Plain"), "optimizer.lr=1e30", "parity.steps=3")
    assert cli.main([*typed], warm=warm) == 1
    printed = capfd.readouterr()
    assert "The training loss is" in printed.err
    assert "Nothing was compared: the training with 2 processes failed." in printed.out
    assert list(tmp_path.rglob("*.pt")) == []


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        pytest.param(("-m", "seed=0,1"), ["can't go with a sweep"], marks=OPTIONAL),
        (("parity.processes=1",), ["parity.processes=1", "2"]),
        pytest.param(("resume=RUN",), ["can't go with job=parity", "init_from"], marks=OPTIONAL),
        (("topology.nnodes=2",), ["compares on one machine"]),
        (("launcher=in_place",), ["launcher=local"]),
        (("parity.processes=20", "data.batch_size=8"), ["data.global_batch_size=8", "20"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_compared_is_refused(warm, tmp_path, monkeypatch, capfd, shared_run, arguments, parts) -> None:
    monkeypatch.chdir(tmp_path)
    if "resume=RUN" in arguments:
        arguments = (f"resume={shared_run('recipe=toy', 'trainer.max_epochs=1')}",)
    capfd.readouterr()
    assert cli.main(["job=parity", "recipe=toy", "trainer.gpus=0", *arguments], warm=warm) == 2
    printed = capfd.readouterr().err
    assert [part for part in parts if part not in printed] == [], printed
    assert list(tmp_path.rglob("*")) == []


@OPTIONAL
def test_the_command_ends_with_the_status_and_leaves_no_process(tmp_path: Path) -> None:
    result = run_framework("job=parity", "recipe=toy", "trainer.gpus=0", "parity.steps=1", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "The same: ToyModel gets the same weights from 1 process and from 2 in 1 step" in result.stdout

"""`job=plan`: the commands people type, and its numbers against those of runs that were really made."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from framework import cli
from tests.helpers import results
from tests.helpers.command import run_framework

pytestmark = pytest.mark.multiproc

Planned = Callable[..., Any]
TEN_PERCENT = 0.1
EX = pytest.mark.exhaustive


@pytest.fixture
def answer(warm, tmp_path, monkeypatch, capfd):
    """The exit status and what is printed for `job=plan` in an empty folder, where nothing is left."""

    def run(*overrides: str) -> tuple[int, str, str]:
        folder = tmp_path / "empty"
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        capfd.readouterr()
        status = cli.main(["job=plan", *overrides], warm=warm)
        assert list(folder.iterdir()) == []
        return status, *capfd.readouterr()

    return run


@pytest.fixture
def plan(answer) -> Planned:
    """The object of `plan.format=json`."""

    def run(*overrides: str) -> Any:
        status, out, err = answer("plan.format=json", *overrides)
        assert (status, err) == (0, "")
        return json.loads(out)

    return run


def test_two_nodes_of_eight_gpus_on_a_machine_without_any(plan):
    found = plan("recipe=mnist", "trainer.gpus=8", "topology.nnodes=2")
    assert found["topology"] == {
        "nnodes": 2,
        "procs_per_node": 8,
        "gpus_per_node": 8,
        "span": 1,
        "world_size": 16,
        "shares_gpus": False,
        "gpus": [[index] for index in range(8)],
    }
    assert (found["backend"]["name"], found["strategy"], found["launcher"]) == ("nccl", "DDP", "elastic")
    assert found["batch"]["global"] == 16 * 16
    assert (found["data"]["source"], found["data"]["train"]) == ("plan.train_samples", 55_000)
    assert found["steps"] == {"per_epoch": 215, "total": 430, "max_epochs": 2, "max_steps": None}
    parameters = 4 * found["model"]["parameters"]
    assert found["memory"]["parameters"] == found["traffic"]["reduced"] == parameters
    assert found["traffic"]["ring_per_rank"] == 2 * 15 * parameters // 16


@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [
        pytest.param(("trainer.gpus=8", "topology=model_parallel"), [[0, 1], [2, 3], [4, 5], [6, 7]], marks=EX),
        pytest.param(("trainer.gpus=8", "topology.procs_per_node=1"), [list(range(8))], marks=EX),
        (
            ("trainer.gpus=3", "topology.share_gpus=true", "topology.gpus_per_process=2", "topology.procs_per_node=4"),
            [[0, 1], [2, 0], [1, 2], [0, 1]],
        ),
    ],
)
def test_replicas_over_several_gpus(plan, overrides, gpus):
    found = plan("recipe=toy_model_parallel", *overrides)
    assert found["topology"]["gpus"] == gpus
    assert found["topology"]["world_size"] == len(gpus)
    shared = "topology.share_gpus=true" in overrides
    assert (found["topology"]["shares_gpus"], found["backend"]["name"]) == (shared, "gloo" if shared else "nccl")
    assert found["model"]["parameters"] == (len(gpus[0]) - 1) * 110 + 55


# Against real runs


@pytest.mark.parametrize(
    "overrides",
    [
        ("recipe=toy", "optimizer=adam", "callbacks=ema", "data.global_batch_size=48", "topology.procs_per_node=2"),
        pytest.param(
            ("recipe=toy_model_parallel", "topology.procs_per_node=2", "trainer.accumulate_grad_batches=3"),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(("recipe=digits", "trainer.limit_train_batches=5", "optimizer=adam"), marks=EX),
    ],
    ids=" ".join,
)
def test_steps_and_checkpoints_are_those_of_a_real_run(plan, train, overrides):
    common = (*overrides, "trainer.gpus=0", "trainer.max_epochs=2", "logger=none")
    found = plan(*common)
    run_dir = train(*common)
    assert found["steps"]["total"] == results.results(run_dir)["steps"]
    saved = sum(file.stat().st_size for file in (run_dir / "checkpoints" / "last").iterdir())
    assert found["checkpoint"] == pytest.approx(saved, rel=TEN_PERCENT)
    assert f"{found['model']['parameters']:,} parameters" in (run_dir / "logs" / "rank_0.log").read_text()


@EX
def test_the_samples_that_the_mnist_recipe_assumes_are_those_of_the_files(plan, data_root):
    found = plan("recipe=mnist", "trainer.gpus=0", f"data.root={data_root}")
    assert (found["data"]["source"], found["data"]["train"], found["steps"]["per_epoch"]) == ("data", 55_000, 3438)


# Code of the user's own


@pytest.fixture
def answer_with_own_module(warm, tmp_path, monkeypatch, capfd):
    """As `answer`, with a module of the user's own in the folder the command is given in."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)

    def run(*overrides: str) -> tuple[int, str, str]:
        status = cli.main(["job=plan", "recipe=toy", *overrides], warm=warm)
        assert {path.name for path in tmp_path.iterdir()} <= {"mine.py", "__pycache__"}
        return status, *capfd.readouterr()

    return run


MINE = """
import urllib.request
from torch import nn

class Pretrained(nn.Linear):
    def __init__(self):
        super().__init__(10, 5)
        urllib.request.urlopen("http://192.0.2.1/weights.pt", timeout=5)

def data(**_):
    urllib.request.urlopen("https://example.invalid/data.tar", timeout=5)

class Broken(nn.Module):
    def __init__(self):
        print("printed by the model")
        raise FloatingPointError("its own mistake")

class Loud(nn.Linear):
    def __init__(self):
        super().__init__(10, 5)
        print("printed by the model")
"""


def test_a_model_that_downloads_is_refused(answer_with_own_module):
    status, out, err = answer_with_own_module("model._target_=mine.Pretrained")
    assert (status, out) == (2, "")
    assert "job=plan downloads nothing" in err
    assert "192.0.2.1" in err


def test_data_that_would_be_downloaded_is_not_there(answer_with_own_module):
    status, out, err = answer_with_own_module("data.datasets._target_=mine.data")
    assert (status, err) == (0, "")
    assert "unknown, the data isn't here" in out
    assert "something asked for the address of example.invalid" in out


@EX
def test_what_the_users_code_prints_is_no_part_of_the_answer(tmp_path):
    """In a command of its own: at its end everything is printed."""
    (tmp_path / "mine.py").write_text(MINE)
    result = run_framework("job=plan", "plan.format=json", "recipe=toy", "model._target_=mine.Loud", cwd=tmp_path)
    assert json.loads(result.stdout)["model"]["name"] == "Loud"
    assert result.stderr == "printed by the model\n"


def test_a_mistake_in_the_model_is_shown_with_its_line(answer_with_own_module, tmp_path):
    status, _, err = answer_with_own_module("model._target_=mine.Broken")
    assert status == 2
    assert "FloatingPointError: its own mistake" in err
    assert f"{tmp_path / 'mine.py'}, line 16" in err

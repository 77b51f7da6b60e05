"""`job=plan`: the commands people type, and its numbers against those of runs that were really made."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import results
from tests.helpers.internals import compose
from tests.helpers.trust import trusting

pytestmark = pytest.mark.multiproc

Planned = Callable[..., Any]
TEN_PERCENT = 0.1


@pytest.fixture
def answer(fork_server, tmp_path, monkeypatch, capfd) -> Callable[..., tuple[int, str, str]]:
    """The exit status and what is printed for `job=plan`, in a folder where nothing is left."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "mine.py").write_text(MINE)

    def run(*overrides: str) -> tuple[int, str, str]:
        monkeypatch.chdir(folder)
        capfd.readouterr()
        status = compose.main(["job=plan", *trusting(overrides)], fork_server=fork_server)
        assert {path.name for path in folder.iterdir()} <= {"mine.py", "__pycache__"}
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


def test_two_gpu_nodes_are_planned_without_gpus(plan):
    found = plan("recipe=mnist", "trainer.gpus=8", "topology.nnodes=2")
    topology = found["topology"]
    assert (topology["world_size"], topology["gpus"]) == (16, [[index] for index in range(8)])
    assert (found["backend"]["name"], found["strategy"], found["launcher"]) == ("nccl", "DDP", "elastic")
    assert found["batch"]["global"] == 16 * 16
    assert (found["data"]["source"], found["data"]["train"]) == ("plan.train_samples", 55_000)
    assert found["steps"] == {"per_epoch": 215, "total": 430, "max_epochs": 2, "max_steps": None}
    parameters = 4 * found["model"]["parameters"]
    assert found["memory"]["parameters"] == found["traffic"]["reduced"] == parameters
    assert found["traffic"]["ring_per_rank"] == 2 * 15 * parameters // 16


def test_replicas_over_several_gpus_that_they_share(plan):
    shared = ("topology.share_gpus=true", "topology.gpus_per_process=2", "topology.procs_per_node=4")
    found = plan("recipe=toy_model_parallel", "trainer.gpus=3", *shared)
    assert found["topology"]["gpus"] == [[0, 1], [2, 0], [1, 2], [0, 1]]
    assert (found["topology"]["shares_gpus"], found["backend"]["name"]) == (True, "gloo")
    assert found["model"]["parameters"] == 110 + 55


# Against real runs


@pytest.mark.parametrize(
    "overrides",
    [
        ("recipe=toy", "optimizer=adam", "callbacks=ema", "data.global_batch_size=48", "topology.procs_per_node=2"),
        pytest.param(
            ("recipe=toy_model_parallel", "topology.procs_per_node=2", "trainer.accumulate_grad_batches=3"),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=" ".join,
)
def test_steps_and_checkpoints_match_a_real_run(plan, train, overrides):
    common = (*overrides, "trainer.gpus=0", "trainer.max_epochs=2", "logger=none")
    found = plan(*common)
    run_dir = train(*common)
    assert found["steps"]["total"] == results.results(run_dir)["steps"]
    saved = sum(file.stat().st_size for file in (run_dir / "checkpoints" / "last").iterdir())
    assert found["checkpoint"] == pytest.approx(saved, rel=TEN_PERCENT)
    (counted,) = re.findall(r"^  \w*Model\w* +([\d,]+)  all$", results.log(run_dir), re.MULTILINE)
    assert counted == f"{found['model']['parameters']:,}"


# Code of the user's own


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

"""


def test_a_model_that_downloads_is_refused(answer):
    status, out, err = answer("recipe=toy", "model._target_=mine.Pretrained")
    assert (status, out) == (2, "")
    assert "job=plan downloads nothing" in err
    assert "192.0.2.1" in err


def test_data_that_would_be_downloaded_is_not_there(answer):
    status, out, err = answer("recipe=toy", "data.datasets._target_=mine.data")
    assert (status, err) == (0, "")
    assert "The data isn't on this machine" in out
    assert "something asked for the address of example.invalid" in out


def test_a_model_mistake_is_shown_with_its_line(answer):
    status, out, err = answer("recipe=toy", "model._target_=mine.Broken")
    assert (status, out) == (2, "")
    assert "FloatingPointError: its own mistake" in err
    assert f"{Path('mine.py').resolve()}, line 16" in err

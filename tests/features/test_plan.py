"""`job=plan`: the commands people type, and its numbers against those of runs that were really made."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from framework import cli
from framework.topology import Topology
from tests.helpers import results
from tests.helpers.command import run_framework

pytestmark = pytest.mark.multiproc

Planned = Callable[..., Any]
TEN_PERCENT = 0.1


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
    assert found["data"]["train"] == 55_000
    assert found["steps"] == {"per_epoch": 215, "total": 430, "max_epochs": 2, "max_steps": None}
    parameters = 4 * found["model"]["parameters"]
    assert found["memory"]["parameters"] == found["traffic"]["reduced"] == parameters
    assert found["traffic"]["ring_per_rank"] == 2 * 15 * parameters // 16


@pytest.mark.parametrize(
    ("override", "gpus"),
    [
        ("topology=model_parallel", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("topology.procs_per_node=1", [list(range(8))]),
    ],
)
def test_replicas_over_several_gpus(plan, override, gpus):
    found = plan("recipe=toy_model_parallel", "trainer.gpus=8", override)
    assert found["topology"]["gpus"] == gpus
    assert found["topology"]["world_size"] == len(gpus)
    layers = len(gpus[0])
    assert found["model"]["parameters"] == (layers - 1) * 110 + 55


def test_shared_gpus(plan):
    overrides = ("trainer.gpus=3", "topology.share_gpus=true", "topology.gpus_per_process=2")
    found = plan("recipe=toy_model_parallel", *overrides, "topology.procs_per_node=4")
    assert found["topology"]["gpus"] == [[0, 1], [2, 0], [1, 2], [0, 1]]
    assert found["topology"]["shares_gpus"]
    assert found["backend"]["name"] == "gloo"


def test_the_page_shows_what_the_object_has(answer):
    status, out, err = answer("recipe=mnist", "trainer.gpus=8", "topology.nnodes=2048")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "Plan of mnist: 2,048 nodes × 8 processes = 16,384 ranks; 8 GPUs a node, 1 for each rank"
    assert len(lines) < 60
    assert max(map(len, lines)) <= 100


@pytest.mark.exhaustive
def test_the_keys_are_the_same_for_every_plan(plan):
    def keys(value: Any) -> Any:
        return {name: keys(each) for name, each in value.items()} if isinstance(value, dict) else None

    small, large = plan("recipe=toy", "trainer.gpus=0"), plan("recipe=digits", "trainer.gpus=4", "topology.nnodes=3")
    for each in (small, large):
        each["environment"] = sorted(each["environment"])
    assert keys(small) == keys(large)


# Against real runs


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("recipe=toy", "topology.procs_per_node=2"), marks=pytest.mark.exhaustive),
        pytest.param(
            ("recipe=toy", "optimizer=adam", "callbacks=ema", "data.global_batch_size=48"), marks=pytest.mark.exhaustive
        ),
        pytest.param(
            ("recipe=toy_model_parallel", "topology.procs_per_node=2", "trainer.accumulate_grad_batches=3"),
            marks=pytest.mark.exhaustive,
        ),
        ("recipe=digits", "trainer.limit_train_batches=5", "optimizer=adam"),
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


def test_the_number_of_mnists_samples_in_its_recipe_is_the_true_one(plan, data_root):
    counted = plan("recipe=mnist", "trainer.gpus=0", f"data.root={data_root}")
    assumed = plan("recipe=mnist", "trainer.gpus=0")
    assert (counted["data"]["source"], assumed["data"]["source"]) == ("data", "plan.train_samples")
    assert counted["data"]["train"] == assumed["data"]["train"]
    assert counted["steps"] == assumed["steps"]


# Refused, as training would be


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("recipe=toy", "trainer.gpus=8", "topology.procs_per_node=4"), "ToyModel can't use 2 devices"),
        (("recipe=toy", "model._target_=recipes.toy.ToyModle"), "Did you mean recipes.toy.ToyModel?"),
        (("recipe=toy", "trainer.gpus=8", "topology.procs_per_node=3"), "topology.procs_per_node=3 doesn't divide"),
        (("recipe=toy", "trainer.gpus=0", "backend=nccl"), "backend=nccl needs GPUs"),
        (("recipe=toy", "trainer.gpus=2", "launcher=in_place"), "launcher=in_place runs one process"),
        (("recipe=toy", "launcher=adopted"), "this process isn't one of several"),
        (
            ("recipe=toy", "trainer.gpus=2", "topology.nnodes=2", "backend.init_method=file"),
            "backend.init_method=file is for ranks of one machine",
        ),
        (("recipe=toy", "init_from=nowhere"), "nowhere"),
        (("recipe=toy", "plan.train_samples=0"), "plan.train_samples=0: must be a whole number at least 1"),
        (("-m", "recipe=toy,digits"), "job=plan shows one run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_can_not_be_is_refused(answer, overrides, said):
    status, out, err = answer(*overrides)
    assert (status, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


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


def test_a_model_that_downloads_is_told_so(answer_with_own_module):
    status, out, err = answer_with_own_module("model._target_=mine.Pretrained")
    assert (status, out) == (2, "")
    assert err == "job=plan downloads nothing, and something asked for the address of 192.0.2.1.\n"


def test_data_that_would_be_downloaded_is_not_there(answer_with_own_module):
    status, out, err = answer_with_own_module("data.datasets._target_=mine.data")
    assert (status, err) == (0, "")
    assert "samples         unknown, the data isn't here" in out
    assert "something asked for the address of example.invalid" in out


def test_what_the_users_code_prints_is_no_part_of_the_answer(tmp_path):
    """In a command of its own: at its end everything is printed."""
    (tmp_path / "mine.py").write_text(MINE)
    result = run_framework("job=plan", "plan.format=json", "recipe=toy", "model._target_=mine.Loud", cwd=tmp_path)
    assert json.loads(result.stdout)["model"]["name"] == "Loud"
    assert result.stderr == "printed by the model\n"


def test_a_mistake_in_the_model_is_shown_with_its_line(tmp_path):
    """In a command of its own: with this launcher the model is built in the process that was typed."""
    (tmp_path / "mine.py").write_text(MINE)
    result = run_framework("job=plan", "recipe=toy", "model._target_=mine.Broken", "launcher=in_place", cwd=tmp_path)
    assert result.returncode == 2
    assert "FloatingPointError: its own mistake" in result.stderr
    assert f"{tmp_path / 'mine.py'}, line 16" in result.stderr


def test_devices_of_the_object_follow_the_formula(plan):
    found = plan("recipe=toy_model_parallel", "trainer.gpus=6", "topology.gpus_per_process=3")
    topology = Topology(
        **{name: found["topology"][name] for name in ("nnodes", "procs_per_node", "gpus_per_node", "span")}
    )
    assert found["topology"]["gpus"] == [list(topology.device_indices(local)) for local in range(2)]

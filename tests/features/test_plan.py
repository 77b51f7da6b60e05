"""`job=plan`: the commands people type, and its numbers against those of runs that were really made."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.helpers import results
from tests.helpers.internals import RATES, DeviceName, compose, find_device
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

from framework.tasks import Supervised

class ReadsLosses(Supervised):
    def training_step(self, model, batch):
        output = super().training_step(model, batch)
        assert output.loss.item() > 0
        return output

class Fails(Supervised):
    def training_step(self, model, batch):
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


def test_a_measured_step_gives_the_time_and_the_cost_of_the_run(plan, answer):
    short = ("recipe=toy", "trainer.gpus=0", "trainer.max_steps=720", "plan.measure=true")
    found = plan(*short, "plan.price_per_hour=5")
    time = found["time"]
    assert found["steps"]["total"] == 720
    # One after each epoch of 80 steps.
    seconds = time["step_s"] * 720 + time["validation_s"] * 9
    assert time["hours"] == pytest.approx(seconds / 3600)
    assert time["cost"] == pytest.approx(time["hours"] * 5)
    assert 0 < time["steps"] < 720
    assert sum(time["parts"].values()) == pytest.approx(time["step_s"])
    assert time["parts"][time["bound_by"]] == max(time["parts"].values())
    assert (time["parts"]["exchange"], time["notes"]) == (0, [])
    # Of the two layers, without the gradient of the data: 20 samples, 10 × 10 and 10 × 5 weights.
    assert time["flops"] == 2 * 20 * (2 * 100 + 3 * 50)

    # A run that is too short to measure anything but its last step.
    _, out, _ = answer("recipe=toy", "trainer.gpus=0", "trainer.max_steps=2", "plan.measure=true")
    assert "measured in 1 training step\n" in out
    assert "plan.measure" not in out.partition("Start it")[2]


PREFLIGHT = {
    "checks": [
        {"name": "broadcast", "points": [{"size_bytes": 4, "seconds": 9.0}]},
        {
            "name": "all_reduce",
            "points": [{"size_bytes": 460, "seconds": 100.0}, {"size_bytes": 860, "seconds": 500.0}],
        },
    ]
}


def test_the_ranks_of_a_node_exchange_while_they_are_measured(plan):
    accumulated = ("data.global_batch_size=40", "trainer.accumulate_grad_batches=2", "trainer.val_check_interval=0.25")
    found = plan("recipe=toy", "trainer.gpus=0", "topology.procs_per_node=2", "plan.measure=true", *accumulated)
    time = found["time"]
    assert found["steps"]["per_epoch"] == 40
    assert time["parts"]["exchange"] > 0
    assert time["hours"] == pytest.approx((time["step_s"] * 400 + time["validation_s"] * 40) / 3600)
    # Of a rank: half of the samples.
    assert time["flops"] == 2 * 20 * (2 * 100 + 3 * 50)


def test_nodes_exchange_as_a_preflight_measured(plan, answer, tmp_path):
    nodes = ("recipe=toy", "trainer.gpus=0", "topology.nnodes=2", "plan.measure=true")
    (note,) = plan(*nodes)["time"]["notes"]
    assert "The exchange between nodes isn't counted: plan.preflight=RUN" in note

    (tmp_path / "preflight.json").write_text(json.dumps(PREFLIGHT))
    found = plan(*nodes, f"plan.preflight={tmp_path}", "plan.price_per_hour=1")
    time = found["time"]
    assert found["traffic"]["reduced"] == 660
    # Halfway between the two sizes, less the backward, which takes no minute.
    assert 240 < time["parts"]["exchange"] < 300
    assert (time["bound_by"], time["notes"]) == ("exchange", [])
    assert time["cost"] == pytest.approx(2 * time["hours"])

    status, _, err = answer(*nodes, "plan.preflight=nowhere")
    assert status == 2
    assert "plan.preflight=nowhere" in err


def test_a_step_that_needs_values_is_measured(plan):
    reads = ("task._target_=mine.ReadsLosses", "trainer.fast_dev_run=3")
    time = plan("recipe=toy", "trainer.gpus=0", "plan.measure=true", *reads)["time"]
    assert time["step_s"] > 0
    assert (time["flops"], time["notes"]) == (2 * 20 * (2 * 100 + 3 * 50), [])


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("task._target_=mine.Fails",), "Rank 0 failed: FloatingPointError: its own mistake"),
        (("data.datasets._target_=mine.data", "plan.train_samples=100"), "the data isn't on this machine"),
    ],
    ids=["failing", "no data"],
)
def test_steps_that_cannot_be_made_have_no_time(plan, overrides, reason):
    time = plan("recipe=toy", "trainer.gpus=0", "plan.measure=true", *overrides)["time"]
    assert time["step_s"] is None
    assert reason in time["notes"][-1]


def test_a_step_on_a_gpu_takes_what_its_data_sheet_says(plan, answer, tmp_path):
    (tmp_path / "preflight.json").write_text(json.dumps(PREFLIGHT))
    gpus = ("recipe=digits", "trainer.gpus=2", "plan.device=h100", "trainer.precision=bf16-mixed")
    found = plan(*gpus, f"plan.preflight={tmp_path}", "plan.price_per_hour=3")
    time = found["forecast"]["time"]
    assert sum(time["parts"].values()) == pytest.approx(time["step_s"])
    # At the bandwidth of the largest size; all but the backward, which takes no second.
    exchange_s = 500 * found["traffic"]["reduced"] / 860
    assert exchange_s - 1 < time["parts"]["exchange"] < exchange_s
    assert time["bound_by"] == "exchange"
    assert time["hours"] == pytest.approx(time["step_s"] * found["steps"]["total"] / 3600)
    assert time["cost"] == pytest.approx(3 * time["hours"])
    in_bfloat16 = 989.5e12
    assert time["mfu"] == pytest.approx(time["flops"] / in_bfloat16 / time["step_s"])

    status, out, err = answer(*gpus)
    assert (status, err) == (0, "")
    assert "Time on NVIDIA H100 80GB HBM3, from the step's FLOPs and bytes" in out
    assert "bound by overhead" in out


def test_every_gpu_to_forecast_for_has_a_speed():
    gpus = set(get_args(DeviceName)) - {"this", "any"}
    assert {find_device(gpu, uses_gpus=True).name for gpu in gpus} == set(RATES)

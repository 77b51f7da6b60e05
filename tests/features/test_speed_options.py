"""What makes training faster or shows where its time goes: what is computed stays the same."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from framework import Datasets, Log, StepOutput
from tests.helpers import results
from tests.helpers.internals import compose, make_context, rank_setup_module

SHORT = ("logger=jsonl", "trainer.limit_test_batches=0", "trainer.limit_val_batches=1")
NO_KEYWORDS = ("~data.datasets.num_samples", "~data.datasets.seed")
TWO = ("topology.procs_per_node=2", "trainer.max_steps=2")


def recorded_steps(trace: dict) -> set[str]:
    return {event["name"] for event in trace["traceEvents"] if event["name"].startswith("ProfilerStep")}


@pytest.mark.multiproc
def test_the_profiler_traces_steps_of_every_rank(train):
    pair = ("topology.procs_per_node=2", "trainer.max_steps=20")
    run_dir = train("recipe=toy", *SHORT, "trainer.profiler=pytorch", *pair)
    traces = sorted((run_dir / "profile").iterdir())
    assert [trace.name.split(".")[0] for trace in traces] == ["rank_0", "rank_1"]
    for trace in traces:
        content = json.loads(trace.read_text())
        assert recorded_steps(content) == {f"ProfilerStep#{step}" for step in range(12, 17)}
        assert any(event["name"] == "aten::addmm" for event in content["traceEvents"])
    assert f"Traces of the profiler are in {run_dir / 'profile'}" in results.log(run_dir)


LATE = """
import os, time
from framework.tasks import Supervised

class Late(Supervised):
    def training_step(self, model, batch):
        time.sleep(0.05 * (os.environ.get("RANK") == "1"))
        return super().training_step(model, batch)
"""


def largest(shares: dict[str, float]) -> str:
    return max(shares, key=lambda part: shares[part])


@pytest.mark.multiproc
def test_the_summary_tells_what_each_rank_spends_its_time_on(train, tmp_path, capfd):
    (tmp_path / "late.py").write_text(LATE)
    two = ("topology.procs_per_node=2", "trainer.max_steps=20", "task._target_=late.Late")
    run_dir = train("recipe=toy", *SHORT, *two, "trainer.profiler=summary")
    assert not (run_dir / "profile").exists()

    profile = results.run_file(run_dir)["profile"]
    assert profile["steps"] == [13, 17]
    # Rank 1 sleeps, and rank 0 waits for its gradients.
    assert [largest(shares) for shares in profile["ranks"]] == ["exchange", "idle"]
    for shares in profile["ranks"]:
        assert sum(shares.values()) == pytest.approx(1)
    calls = {operator["name"]: operator["calls"] for operator in profile["operators"]}
    assert calls["aten::addmm"] == 2 * 5
    # Ranges around operators are none.
    assert all(name.startswith("aten::") for name in calls)

    title = "Where the time went in steps 13 to 17"
    assert title in capfd.readouterr().out
    assert compose.main(["job=report", f"runs={run_dir}", "report.output=page.html"]) == 0
    page = Path("page.html").read_text()
    assert title in page
    assert "<td>aten::addmm</td><td>2</td>" in page

    # The profile of an earlier start isn't shown as that of a later one, which is too short for its own.
    train(f"resume={run_dir}", "trainer.max_steps=22")
    assert results.run_file(run_dir)["profile"] is None


SLEEPY = """
import time
import torch
from recipes.toy import ToyModel, toy_regression
from framework import Datasets

class Sleepy:
    def __init__(self): self.data = toy_regression().train
    def __len__(self): return len(self.data)
    def __getitem__(self, index):
        time.sleep(0.01)
        return self.data[index]

def datasets(num_samples, seed): return Datasets(train=Sleepy())

class Graph(ToyModel):
    def __init__(self):
        super().__init__()
        self.register_buffer("neighbours", torch.eye(10).to_sparse())
"""


def test_the_summary_tells_that_training_waits_for_data(train, tmp_path):
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    data = ("data.datasets._target_=sleepy.datasets", "data.num_workers=0", "data.global_batch_size=4")
    model = "model._target_=sleepy.Graph"
    options = ("callbacks=[profiler]", "callbacks.profiler.wait=0", "callbacks.profiler.warmup=0")
    run_dir = train("recipe=toy", *SHORT, *data, model, "trainer.max_steps=6", "checkpoint=none", *options)
    profile = results.run_file(run_dir)["profile"]
    assert (profile["steps"], profile["step_s"]) == ([1, 5], None)
    assert largest(profile["ranks"][0]) == "data"
    assert profile["peak_bytes"] > 0


def shown_bytes(size_bytes):
    return [f"{size_bytes / 2**20:.1f}", "MiB"]


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_the_forecast_of_the_memory_is_near_its_measurement(train, capfd):
    no_evaluation = ("trainer.limit_val_batches=0", "trainer.limit_test_batches=0", "checkpoint=none")
    options = ("callbacks=[profiler]", "callbacks.profiler.wait=0", "trainer.max_steps=6")
    run_dir = train("recipe=digits", *no_evaluation, *options, "trainer.accumulate_grad_batches=2")
    profile = results.run_file(run_dir)["profile"]
    assert profile["forecast"]["notes"] == []
    assert 0 < profile["forecast"]["least_step_s"] < profile["profiled_step_s"]
    assert profile["peak_bytes"] == pytest.approx(profile["forecast"]["peak_bytes"], rel=0.05)
    row = ["peak", "of", "the", "memory", *shown_bytes(profile["peak_bytes"])]
    assert " ".join([*row, *shown_bytes(profile["forecast"]["peak_bytes"])]) in " ".join(capfd.readouterr().out.split())


@pytest.mark.exhaustive
def test_channels_last_gives_the_same_weights(train):
    steps = ("recipe=digits", *SHORT, "trainer.max_steps=5", "model.conv_dropout=0", "model.dropout=0")
    plain, changed = (results.weights(train(*steps, f"trainer.channels_last={value}")) for value in ("false", "true"))
    for name, weight in plain.items():
        torch.testing.assert_close(changed[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
def test_a_compiled_model_saves_plain_weights(train):
    steps = ("recipe=toy", *SHORT, "trainer.max_steps=5")
    compiled = train(*steps, "trainer.compile=default")
    plain = train(*steps)
    for name, weight in results.weights(plain).items():
        torch.testing.assert_close(results.weights(compiled)[name], weight)
    resumed = train(f"resume={compiled}", "trainer.max_steps=7", "trainer.compile=null")
    assert results.results(resumed)["steps"] == 7


class Modes:
    """Doesn't call the model, so that nothing is compiled; logs if an evaluation is in inference mode."""

    def training_step(self, model, batch):
        return StepOutput(sum(parameter.square().sum() for parameter in model.parameters()), len(batch[0]))

    def validation_step(self, model, batch):
        output = self.training_step(model, batch)
        return output._replace(metrics={"inference_mode": (float(torch.is_inference_mode_enabled()), 1)})


@pytest.mark.parametrize(
    ("mode", "in_test"),
    [
        ("null", 1.0),
        pytest.param("default", 1.0, marks=pytest.mark.exhaustive),
        pytest.param("max-autotune-no-cudagraphs", 1.0, marks=pytest.mark.exhaustive),
        pytest.param("reduce-overhead", 0.0, marks=pytest.mark.exhaustive),
        ("max-autotune", 0.0),
    ],
)
def test_inference_mode_is_for_the_test_without_cuda_graphs(train, mode, in_test):
    task = ("~task", f"+task._target_={__name__}.Modes")
    steps = ("trainer.max_steps=1", "trainer.val_check_interval=1", "trainer.limit_test_batches=1")
    modes = ("trainer.inference_mode=true", f"trainer.compile={mode}")
    run_dir = train("recipe=toy", *SHORT, *task, *steps, *modes)
    assert results.curve(run_dir, "val/inference_mode") == {1: 0.0}
    assert results.curve(run_dir, "test/inference_mode") == {1: in_test}


def sees_precision(expected):
    """Data that can't be built with another precision of matrix products."""
    assert torch.get_float32_matmul_precision() == expected
    return Datasets(TensorDataset(torch.ones(8, 10), torch.ones(8, 5)))


@pytest.mark.multiproc
@pytest.mark.parametrize(("setting", "expected"), [("medium", "medium"), ("null", "highest")])
def test_matmul_precision_is_set_before_building(train, setting, expected):
    data = (*NO_KEYWORDS, f"data.datasets._target_={__name__}.sees_precision", f"+data.datasets.expected={expected}")
    options = ("checkpoint=none", f"trainer.matmul_precision={setting}")
    train("recipe=toy", "logger=none", *data, *TWO, *options)


def two_layers(width):
    return nn.Sequential(nn.Linear(10, width), nn.Linear(width, 5))


class LogsWaitingThreads:
    """Logs the shares of gloo's and of all other threads that don't preempt when they wake up."""

    def on_train_step_end(self, _info):
        policies: dict[str, list[int]] = {"gloo": [], "others": []}
        for thread in Path("/proc/self/task").iterdir():
            group = "gloo" if "gloo" in (thread / "comm").read_text() else "others"
            policies[group].append(os.sched_getscheduler(int(thread.name)))
        return Log({name: each.count(os.SCHED_BATCH) / len(each) for name, each in policies.items()})


@pytest.mark.multiproc
@pytest.mark.parametrize(("width", "share"), [(100, 1.0), (20_000, 0.0)])
def test_gloo_preempts_only_for_large_models(train, width, share):
    """A model of 100 columns has 7 kB of gradients, one of 20,000 has 1.3 MB."""
    model = ("~model", f"+model._target_={__name__}.two_layers", f"+model.width={width}")
    logs = (f"+callbacks.threads._target_={__name__}.LogsWaitingThreads", "checkpoint=none")
    run_dir = train("recipe=toy", *SHORT, *TWO, *model, *logs)
    assert results.curve(run_dir, "train/gloo") == {1: share, 2: share}
    assert results.curve(run_dir, "train/others") == {1: 0.0, 2: 0.0}


def notes_device():
    """Data that notes that it is built."""
    CALLS.append("data")
    raise RuntimeError("that is all")


CALLS: list[str] = []


def test_the_device_is_chosen_before_user_code(train, monkeypatch):
    """Otherwise that would open a context on GPU 0 in every rank. In this process, with a stand-in for a GPU."""

    def on_gpu(topology, **place):
        return replace(make_context(topology, **place), devices=(torch.device("cuda", 0),))

    monkeypatch.setattr(rank_setup_module, "make_context", on_gpu)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: CALLS.append(str(device)))
    CALLS.clear()
    data = (*NO_KEYWORDS, f"data.datasets._target_={__name__}.notes_device")
    with pytest.raises(RuntimeError, match="that is all"):
        train("recipe=toy", *data, "launcher=in_process")
    assert CALLS == ["cuda:0", "data"]

"""The memory that job=plan forecasts for a device, against that of real trainings on the CPU."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.forecast import CASES, SHARDED_CASES, Case, measuring, read_peak
from framework import StepOutput
from tests.helpers.internals import (
    Topology,
    compose,
    parse,
    plan_job_module,
    prepared_step,
    trace_step,
    with_workspaces,
)
from tests.helpers.trust import trusting

pytestmark = pytest.mark.multiproc

ALWAYS = {"convolutions", "GPT, ddp, 2 accumulated"}


class PlannedError(Exception):
    """Carries what a plan is computed from."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


@pytest.fixture
def forecast_peak(monkeypatch, own_state):
    """The peak that is forecast, without the other figures of a plan, in this process."""

    def call(_: object, __: str, arguments: Mapping[str, Any], **___: Any) -> None:
        raise PlannedError(arguments)

    def run(*overrides: str) -> int:
        monkeypatch.setattr(plan_job_module, "call_in_child", call)
        with pytest.raises(PlannedError) as caught:
            compose.main(["job=plan", *trusting(overrides)])
        arguments = caught.value.arguments
        topology = Topology(**arguments["topology"])
        with prepared_step(parse(arguments["config"]), topology) as prepared:
            return with_workspaces(trace_step(prepared)).peak().total_bytes

    return run


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case.name in ALWAYS else pytest.mark.exhaustive, id=case.name) for case in CASES],
)
def test_the_forecast_is_within_one_percent_of_the_profiler(case: Case, train, forecast_peak, tmp_path):
    file = tmp_path / "peak.json"
    train(*case.arguments, "checkpoint=none", "logger=none", *measuring(file))
    assert forecast_peak(*case.arguments) == pytest.approx(read_peak(file), rel=0.01)


def test_shards_take_at_least_what_is_forecast(train, forecast_peak, tmp_path):
    # How much more is gathered ahead depends on gloo's threads.
    case = SHARDED_CASES[-1]
    file = tmp_path / "peak.json"
    train(*case.arguments, "checkpoint=none", "logger=none", *measuring(file))
    assert forecast_peak(*case.arguments) <= 1.01 * read_peak(file)


@pytest.fixture
def forecast(fork_server, capfd) -> Callable[..., Any]:
    """The forecast of a plan."""

    def run(*overrides: str) -> Any:
        capfd.readouterr()
        assert compose.main(["job=plan", "format=json", *trusting(overrides)], fork_server=fork_server) == 0
        return json.loads(capfd.readouterr().out)["forecast"]

    return run


# It keeps 36 GiB of activations, and weights of 6 MiB.
LONG_GPT = (
    "recipe=gpt_char",
    "model.layers=2",
    "model.channels=256",
    "model.context=1024",
    "data.global_batch_size=1024",
)


def test_each_change_that_is_proposed_fits(forecast):
    found = forecast(*LONG_GPT, "plan.device=t4")
    assert not found["memory"]["fits"]
    assert found["memory"]["peak"] > found["device"]["usable"]
    changes = {}
    for change in found["changes"]:
        assert change["fits"]
        assert change["peak"] <= found["device"]["usable"]
        changes[tuple(change["overrides"])] = change
    accumulated = ("trainer.accumulate_grad_batches=4",)
    recomputed = ("trainer.activation_checkpointing=auto", "trainer.accumulate_grad_batches=2")
    shared = ("trainer.gpus=4",)
    assert list(changes) == [accumulated, recomputed, shared]
    assert changes[recomputed]["cost_percent"] > changes[accumulated]["cost_percent"] + 10
    assert [change["gpus"] for change in changes.values()] == [1, 1, 4]

    changed = forecast(*LONG_GPT, "plan.device=t4", *accumulated)
    assert changed["memory"]["peak"] == changes[accumulated]["peak"]
    assert changed["memory"]["fits"]


def test_a_model_that_is_too_large_is_sharded(forecast):
    found = forecast("recipe=gpt_char", "model.layers=2", "model.channels=8192", "plan.device=t4")
    cheapest = found["changes"][0]
    assert cheapest["overrides"] == ["strategy=fsdp", "trainer.gpus=4"]
    assert (cheapest["gpus"], cheapest["fits"]) == (4, True)
    assert found["memory"]["peak"] / 4 < cheapest["peak"] < found["memory"]["peak"] / 2


def test_two_sharded_copies_take_what_one_takes(forecast_peak):
    small = ("recipe=toy", "trainer.gpus=0", "data.batch_size=8")
    one = forecast_peak(*small, "strategy=fsdp", "topology.procs_per_node=2")
    halves = ("strategy=hsdp", "strategy.data_parallel_shard_degree=2")
    assert forecast_peak(*small, *halves, "topology.procs_per_node=4") == one


def test_any_gpu_is_the_smallest_that_is_enough(fork_server, capfd):
    assert compose.main(["job=plan", "plan.device=any", *LONG_GPT], fork_server=fork_server) == 0
    printed = capfd.readouterr().out
    assert "Memory: it fits on NVIDIA L40S. A rank takes up to " in printed
    assert "l40s, h100, a100, h200, b200" in printed
    assert "not checked on a GPU" in printed
    assert "plan.device" not in printed.partition("Start it")[2]


class Squares:
    """A task that is traced as it is."""

    def training_step(self, model, batch):
        x, y = batch
        return StepOutput(torch.nn.functional.mse_loss(model(x), y), len(x))


class ReadsLosses(Squares):
    """Needs the values of tensors."""

    def training_step(self, model, batch):
        output = super().training_step(model, batch)
        with Path("losses").open("a") as file:
            print(output.loss.item(), file=file)
        return output


class ChecksSamples(Squares):
    """Looks at the values of its samples."""

    def training_step(self, model, batch):
        if not 0 < float(batch[0].abs().max()) < 100:
            raise ValueError("these aren't the samples")
        return super().training_step(model, batch)


def test_a_traced_step_has_the_values_of_its_samples(forecast):
    found = forecast(
        "recipe=toy", "trainer.gpus=0", "plan.device=this", "~task", f"+task._target_={__name__}.ChecksSamples"
    )
    # Of a batch that is only considered, there are none.
    (note,) = found["notes"]
    assert note.startswith("The largest batch isn't known")
    assert found["memory"]["peak"] > 0


def test_a_step_that_needs_values_is_made_with_real_tensors(forecast, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    accumulated = ("recipe=toy", "trainer.gpus=0", "trainer.accumulate_grad_batches=4", "plan.device=this", "~task")
    traced = forecast(*accumulated, f"+task._target_={__name__}.Squares")
    found = forecast(*accumulated, f"+task._target_={__name__}.ReadsLosses")
    assert traced["notes"] == []
    (note,) = found["notes"]
    assert "made with real tensors" in note
    assert found["memory"]["categories"]["weights"] == traced["memory"]["categories"]["weights"]
    # A loss that is computed keeps the memory of its summands.
    assert traced["memory"]["peak"] <= found["memory"]["peak"] <= 1.5 * traced["memory"]["peak"]
    # One micro-batch to make the optimizer's state, then the first and the last one of a step.
    assert len(Path("losses").read_text().split()) == 3


@pytest.mark.exhaustive
def test_batches_that_the_model_makes_are_made(forecast):
    found = forecast("recipe=cartpole", "data.datasets.max_moves=20", "task.max_moves=20", "plan.device=this")
    assert "the train part is a framework.Source" in found["notes"][0]
    assert found["memory"]["peak"] > 0


class Recurrent(nn.Module):
    """An LSTM over scaled inputs; the scales have sparse gradients. Reads its rank as other launchers' code does."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = int(os.environ["RANK"])
        self.scales = nn.Embedding(10, 1, sparse=True)
        self.lstm = nn.LSTM(1, 8, batch_first=True)
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        scales = self.scales(torch.arange(10))
        hidden, _ = self.lstm(x[:, :, None] * scales)
        return self.out(hidden[:, -1])


def test_sparse_and_recurrent_layers_are_forecast(forecast):
    found = forecast("recipe=toy", "trainer.gpus=0", "plan.device=this", f"model._target_={__name__}.Recurrent")
    (note,) = found["notes"]
    assert "an LSTM keeps memory whose size only oneDNN knows" in note
    num_parameters = 4 * 8 * (1 + 8) + 2 * 4 * 8 + 8 * 5 + 5
    assert found["memory"]["categories"]["weights"] >= 4 * num_parameters


def test_an_optimizer_whose_state_grows_has_a_note(forecast):
    found = forecast("recipe=toy", "trainer.gpus=0", "plan.device=this", "optimizer=lbfgs")
    assert "The optimizer's state isn't known before training, so the peak may be much higher." in found["notes"]


def test_the_largest_batch_is_known_for_replicas_that_differ(forecast):
    # With 4 samples a step takes no more than with 2.
    found = forecast("recipe=toy", "plan.device=t4", "trainer.gpus=2", "strategy=local_sgd", "data.batch_size=2")
    assert found["largest_batch"] > 1_000_000


def test_a_pipeline_has_no_forecast(forecast):
    staged = ("model.tie_weights=false", "strategy=pipeline", "topology.procs_per_node=2", "trainer.gpus=0")
    found = forecast("recipe=gpt_char", *staged, "plan.device=h100")
    assert found["memory"] is None
    assert "A stage of a pipeline takes what other ranks compute" in found["notes"][0]

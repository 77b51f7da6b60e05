"""What job=plan sees of a step: operators with their modules and FLOPs, and the memory that they take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, Optimizer

from tests.helpers.internals import Tracer, with_workspaces

BATCH = 1_000_000
WEIGHT_BYTES = 4 * (20 * 30 + 30 * 10)


class Step:
    """A training step whose phase the tracer asks for."""

    def __init__(self) -> None:
        self.phase = "forward"

    def make(self, model: nn.Module, optimizer: Optimizer, batch: Tensor) -> None:
        self.phase = "forward"
        loss = model(batch).square().mean()
        self.phase = "backward"
        loss.backward()
        self.phase = "optimizer"
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None


@pytest.fixture(scope="module")
def trace():
    step = Step()
    with FakeTensorMode(), Tracer(lambda: step.phase) as tracer:
        model = nn.Sequential(nn.Linear(20, 30, bias=False), nn.ReLU(), nn.Linear(30, 10, bias=False))
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        tracer.name_modules(model)
        batch = torch.empty(BATCH, 20)
        tracer.categorize(batch, "batches")
        step.make(model, optimizer, batch)
        tracer.name_optimizer_state(optimizer)
        tracer.start_step()
        step.make(model, optimizer, batch)
        return tracer.trace()


def test_operators_have_modules_phases_and_flops(trace):
    products = [operator for operator in trace.operators if operator.flops]
    assert [(product.phase, product.module, product.flops) for product in products] == [
        ("forward", "0", 2 * BATCH * 20 * 30),
        ("forward", "2", 2 * BATCH * 30 * 10),
        ("backward", "2", 2 * BATCH * 30 * 10),
        ("backward", "2", 2 * BATCH * 30 * 10),
        ("backward", "0", 2 * BATCH * 20 * 30),
    ]
    assert products[0].read_bytes == 4 * (BATCH * 20 + 20 * 30)
    assert products[0].written_bytes == 4 * BATCH * 30
    assert products[0].dtype == torch.float32


def test_views_move_no_bytes(trace):
    transposes = [operator for operator in trace.operators if operator.name == "aten.t.default"]
    assert transposes
    assert all(operator.read_bytes == operator.written_bytes == 0 for operator in transposes)


def test_the_peak_is_divided_into_categories_and_modules(trace):
    peak = trace.peak()
    assert peak.total_bytes == sum(peak.by_category.values()) == sum(peak.by_module.values())
    assert peak.by_category["weights"] == peak.by_category["optimizer"] == WEIGHT_BYTES
    assert peak.by_category["batches"] == 4 * BATCH * 20
    assert peak.by_module["weights", "0"] == 4 * 20 * 30
    # The ReLU keeps its result, and its backward takes the gradient of that and makes that of its input.
    assert peak.by_module["activations", "1"] == 4 * BATCH * 30
    assert peak.operator.name == "aten.threshold_backward.default"
    assert peak.by_category["temporaries"] == 2 * 4 * BATCH * 30


def test_gradients_are_known_when_the_optimizer_runs(trace):
    update = [index for index, operator in enumerate(trace.operators) if operator.phase == "optimizer"]
    assert update
    live = trace.live_bytes()[update[0]]
    kept = 3 * WEIGHT_BYTES + 4 * BATCH * 20
    assert live >= kept
    gradients = [block for block in trace.blocks if block.category == "gradients"]
    assert sum(block.size_bytes for block in gradients) == WEIGHT_BYTES


def test_an_operator_that_refuses_other_values_has_no_workspace(monkeypatch):
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")
    # A sequence of length 0 is refused, so the call can't be made again with zeros.
    with Tracer(lambda: "forward") as tracer:
        nn.utils.rnn.pack_padded_sequence(torch.rand(4, 3, 5), torch.tensor([4, 2, 1]))
    trace = tracer.trace()
    assert with_workspaces(trace).peak().total_bytes == trace.peak().total_bytes > 0

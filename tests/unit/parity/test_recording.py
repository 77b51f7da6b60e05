from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from framework.parity.recording import Recording, move_weights, switch_off_dropout, weights_shown
from framework.parity.tolerance import floor, moved_by, of_gradients, shown_gradient, unit_of
from framework.parity.trace import load_start, load_step
from framework.run_dir import RunDir
from framework.types import FitInfo, MicroIndices, StepReport
from tests.unit.parity_runs import Training
from tests.unit.simulated_ranks import cpu_context

pytestmark = pytest.mark.usefixtures("own_state")


def test_every_dropout_of_torch_is_switched_off_and_counted() -> None:
    model = nn.ModuleList(
        [
            nn.Dropout(0.1),
            nn.Dropout2d(0.2),
            nn.AlphaDropout(0.3),
            nn.Dropout(0.0),
            nn.MultiheadAttention(4, 2, dropout=0.1),
            nn.GRU(2, 2, num_layers=2, dropout=0.1),
            nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, dropout=0.1),
        ]
    )
    assert switch_off_dropout(model) == 5 + 4  # three and the attention's in the last
    assert switch_off_dropout(model) == 0
    torch.manual_seed(0)
    before = torch.get_rng_state()
    x = torch.ones(3, 2, 4)
    torch.testing.assert_close(model[6](x), model[6](x), rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("dtype", "value", "step"),
    # The last is of the numbers between 1 and 2, which bfloat16 has only so many of.
    [(torch.float64, 1.0, 2.0**-47), (torch.float32, 1.0, 2.0**-18), (torch.bfloat16, 1.5, 2.0**-7)],
)
def test_weights_are_moved_and_no_generator_moves(dtype: torch.dtype, value: float, step: float) -> None:
    model = nn.Linear(20, 20).to(dtype)
    with torch.no_grad():
        model.weight.fill_(value)
    again = copy.deepcopy(model)
    before = torch.get_rng_state()
    by = moved_by(unit_of("32-true", [dtype]))
    move_weights(model, by=by)
    assert torch.equal(torch.get_rng_state(), before)
    assert set((model.weight.detach().double() - value).flatten().tolist()) == {step, -step}
    move_weights(again, by=by)
    assert torch.equal(model.weight, again.weight)


def test_formats() -> None:
    assert unit_of("32-true", [torch.float32, torch.int64]) == 2.0**-24
    assert unit_of("64-true", [torch.float64]) == 2.0**-53
    assert unit_of("bf16-mixed", [torch.float32]) == unit_of("bf16-true", [torch.bfloat16]) == 2.0**-8
    assert unit_of("16-mixed", [torch.float32]) == 2.0**-11
    assert unit_of("32-true", []) == 2.0**-24
    for unit in (2.0**-53, 2.0**-24, 2.0**-11, 2.0**-8):
        assert moved_by(unit) < floor(unit) < shown_gradient(unit)
        assert of_gradients(unit) * floor(unit) < 0.1


def test_changes_are_weighed_by_how_sure_the_gradients_sign_is() -> None:
    gradient = torch.tensor([1.0, -1.0, 0.015, -0.001, 0.0])
    limit = 0.01 * float(gradient.square().mean().sqrt())
    weighs = weights_shown(gradient, least=0.01)
    assert weighs[:2].tolist() == [1.0, 1.0]
    assert float(weighs[2]) == pytest.approx(min(1.0, 0.015 / limit - 1), rel=1e-5)
    assert weighs[3:].tolist() == [0.0, 0.0]
    assert weights_shown(torch.zeros(3), least=0.01).tolist() == [1.0, 1.0, 1.0]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.other(self.layer(self.layer(x)))
        return output


def test_the_events_of_a_forward_in_their_order(tmp_path: Path) -> None:
    Training(Twice, batches=(4,), accumulate=2).findings(tmp_path)
    trace = load_step(tmp_path / "one" / "parity", rank=0, step=1)
    assert trace.events is not None
    assert [(event.kind, event.module, event.call, event.inside, event.own) for event in trace.events] == [
        ("entered", "", 1, None, False),
        ("entered", "layer", 1, "", False),
        ("left", "layer", 1, "", True),
        ("entered", "layer", 2, "", False),
        ("left", "layer", 2, "", True),
        ("entered", "other", 1, "", False),
        ("left", "other", 1, "", True),
        ("left", "", 1, None, False),
    ]
    # What was given on without a change is noted once.
    assert [len(event.passages) for event in trace.events] == [1, 0, 1, 0, 1, 0, 1, 0]
    assert {len(view) for event in trace.events for each in event.passages for view in each.views.values()} == {4}
    start = load_start(tmp_path / "one" / "parity")
    assert (start.model, start.dropouts, start.unit) == ("Twice", 0, 2.0**-24)


def test_ways_that_differ_between_micro_batches_are_not_taken_for_one(tmp_path: Path) -> None:
    class Wavering(Twice):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = getattr(self, "calls", 0) + 1
            return super().forward(x) if self.calls % 2 else self.other(x)

    Training(Wavering, batches=(4,), accumulate=2).findings(tmp_path)
    assert load_step(tmp_path / "one" / "parity", rank=0, step=1).events is None


def test_training_goes_on_as_without_it_and_hooks_are_gone_at_the_end(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording = Recording(run_dir=RunDir(tmp_path), context=cpu_context(), steps=1, precision="32-true")
    recording.on_fit_start(FitInfo(model, 0, None, 1, None, optimizer))
    copy.deepcopy(model)(torch.ones(1, 2))  # as an average's copy of it, which is no part of the training
    model(torch.ones(3, 2)).mean().backward()
    optimizer.step()
    report = StepReport(1, 0, torch.zeros(()), 3, (MicroIndices(torch.arange(3), 3),))
    assert recording.on_train_step_end(report) is not None
    recording.on_fit_end()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks

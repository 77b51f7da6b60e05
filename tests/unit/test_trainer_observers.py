"""Who is told of what in training: callbacks, loggers, the pulse; and weights that a callback lends."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from framework.checkpoint import find, load
from framework.types import Callback, FitInfo, StepReport
from tests.unit.small_trainer import (
    STEPS_PER_EPOCH,
    Marks,
    Numbers,
    Recorder,
    assert_equal,
    batches,
    linear,
    link,
    make_trainer,
    manager,
    plain_loop,
    samples,
    settings,
    still,
    weights,
)

pytestmark = pytest.mark.usefixtures("own_state", "no_waiting_for_the_disk")


def test_observers_are_told_what_the_contract_says(tmp_path: Path) -> None:
    recorder = Recorder()
    model = linear()
    trainer = make_trainer(
        settings(max_epochs=2, max_steps=100),
        model=model,
        callbacks={"recorder": recorder},
        val=samples(7),
        checkpoints=manager(tmp_path),
        optimizer=still,
    )
    trainer.fit()
    info = recorder.calls[0][1]
    assert info == FitInfo(model, 0, 12, STEPS_PER_EPOCH, max_epochs=2, optimizer=trainer.parts.optimizer)
    epoch = ["on_train_step_end"] * STEPS_PER_EPOCH + ["on_validation_end"]
    assert [name for name, _ in recorder.calls] == ["on_fit_start", *epoch, *epoch, "state_dict", "on_fit_end"]
    steps = recorder.named("on_train_step_end")
    assert [(report.step, report.epoch) for report in steps] == [(n + 1, n // STEPS_PER_EPOCH) for n in range(12)]
    assert [report.global_count for report in steps] == [4, 4, 4, 4, 4, 2] * 2
    assert not any(report.loss.requires_grad for report in steps)
    for report, (inputs, targets) in zip(steps, batches(0), strict=False):
        assert report.loss.item() == pytest.approx((model(inputs).squeeze(1) - targets).square().mean().item())
    evaluations = recorder.named("on_validation_end")
    assert [(report.part, report.step, report.epoch) for report in evaluations] == [("val", 6, 0), ("val", 12, 1)]
    assert evaluations[-1].metrics == trainer.val_metrics


def test_a_hook_that_nobody_wrote_is_not_called() -> None:
    class OnlyAtTheEnd(Callback):
        ended = 0

        def on_fit_end(self) -> None:
            self.ended += 1

    only = OnlyAtTheEnd()  # what is left out is empty
    trainer = make_trainer(callbacks={"only": only, "nothing": object()}, val=samples(7))
    assert trainer._bind() == []
    trainer.fit()
    assert only.ended == 1


def test_loggers_may_hear_of_the_start_and_of_every_step() -> None:
    class Progressing(Numbers):
        def __init__(self) -> None:
            super().__init__()
            self.heard: list[Any] = []

        def fit_start(self, info: FitInfo) -> None:
            self.heard.append(info.total_steps)

        def step(self, report: StepReport) -> None:
            self.heard.append(report.step)

    logger = Progressing()
    make_trainer(settings(max_steps=3), loggers={"one": logger, "other": Numbers()}).fit()
    assert logger.heard == [3, 1, 2, 3]


class Averaged:
    """Evaluates with weights that are all 2."""

    @contextmanager
    def evaluation_weights(self, model: nn.Module) -> Iterator[None]:
        trained = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(2.0)
        yield
        model.load_state_dict(trained)


def test_a_callbacks_weights_are_evaluated_and_kept_and_training_goes_on_with_its_own(tmp_path: Path) -> None:
    data = samples(7)
    trainer = make_trainer(callbacks={"averaged": Averaged()}, val=data, checkpoints=manager(tmp_path))
    trainer.fit()
    trained = plain_loop(lambda _, optimizer: optimizer.step())
    assert_equal(weights(trainer), trained)
    inputs, targets = data[:]
    expected = (2.0 * inputs.sum(dim=1) + 2.0 - targets).square().mean().item()
    assert trainer.val_metrics["val/loss"] == pytest.approx(expected, rel=1e-6)
    state = load(find(tmp_path), map_location="cpu")
    assert all((tensor == 2.0).all() for tensor in state["model"].values())
    assert_equal(list(state["training"]["model"].values()), trained)


def test_the_pulse_tells_what_is_being_done(tmp_path: Path) -> None:
    marks = Marks()
    how = settings(max_steps=2, accumulate_grad_batches=2, log_every_n_steps=100, val_check_interval=2)
    make_trainer(how, val=samples(7), checkpoints=manager(tmp_path), watched=link(marks)).fit()
    micro_batches = ["forward", "backward", "data"] * 2
    assert marks.seen == [
        *("data", *micro_batches, "optimizer", 1, "logging"),
        *("data", *micro_batches, "optimizer", 2, "logging", "evaluate", "data"),
        *("checkpoint", "logging", "checkpoint"),  # what is left at the end, and until that is written
    ]

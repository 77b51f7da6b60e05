"""The record of every step, and where two of them begin to differ."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from framework.types import FitInfo, MicroIndices, StepInfo
from tests.helpers.contexts import cpu_context
from tests.helpers.internals import RunDir
from tests.helpers.recorder import Recorder
from tests.helpers.records import compare, read_rows

pytestmark = pytest.mark.usefixtures("own_state")


def record(folder: Path, *, start: int = 0, steps: int = 4, disturb: Any = None) -> Path:
    """Train `steps` steps of a small model from `start` on, always of the same numbers; `disturb` may change some."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    recorder = Recorder(run_dir=RunDir(folder), context=cpu_context())
    for step in range(1, steps + 1):
        if step == start + 1:
            recorder.on_fit_start(FitInfo(model, start, None, 10, None, optimizer))
        if disturb is not None:
            disturb(step, model)
        model(torch.full((2, 3), float(step)) + torch.arange(2.0)[:, None]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step > start:
            indices = (MicroIndices(torch.tensor([step, 7]), 2), MicroIndices(torch.tensor([1]), 0))
            recorder.on_train_step_end(StepInfo(step, 0, torch.zeros(()), 2, indices))
    recorder.on_fit_end()
    return folder


def test_a_row_has_a_steps_inputs_and_outputs(tmp_path: Path) -> None:
    rows = read_rows(record(tmp_path) / "record" / "rank_0.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    # A stand-in has no indices.
    assert rows[1]["indices"] == [[2, 7], []]
    assert len(rows[1]["inputs"]) == 1
    parameters = {f"{layer}.{part}" for layer in range(3) for part in ("weight", "bias")}
    assert rows[1]["weights"].keys() == rows[1]["gradients"].keys() == parameters
    assert {"python", "cpu", "numpy"} <= rows[1]["generators"].keys()
    assert {"group 0 lr", "0.weight momentum_buffer"} <= rows[1]["optimizer"].keys()


def test_a_resumed_run_continues_the_record(tmp_path: Path) -> None:
    whole = record(tmp_path / "whole")
    resumed = record(record(tmp_path / "resumed", steps=3), start=2)
    assert compare(whole, resumed) is None


def changed_input(step: int, model: nn.Module) -> None:
    if step == 3:
        model.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1e-6,), prepend=True)


def changed_weight(step: int, model: nn.Module) -> None:
    if step == 3:
        with torch.no_grad():
            model.get_parameter("2.bias").add_(1e-6)


def changed_buffer(step: int, model: nn.Module) -> None:
    if step == 2:
        model.get_buffer("1.num_batches_tracked").add_(1)


def drawn(step: int, model: nn.Module) -> None:
    if step == 4:
        torch.rand(1)


@pytest.mark.parametrize(
    ("disturb", "step", "what"),
    [
        (changed_input, 3, "inputs"),
        (changed_weight, 3, "weights 2.bias"),
        (changed_buffer, 2, "buffers 1.num_batches_tracked"),
        (drawn, 4, "generators cpu"),
    ],
)
def test_the_first_difference_is_found(tmp_path: Path, disturb: Any, step: int, what: str) -> None:
    found = compare(record(tmp_path / "one"), record(tmp_path / "other", disturb=disturb))
    assert found is not None
    assert (found.rank, found.step, found.what) == (0, step, what)
    assert str(found).startswith(f"step {step}, rank 0: {what} differs: ")


def test_missing_steps_ranks_and_records(tmp_path: Path) -> None:
    one = record(tmp_path / "one")
    other = record(tmp_path / "other", steps=3)
    found = compare(one, other)
    assert found is not None
    assert (found.step, found.what) == (4, "that there is such a step")
    (other / "record" / "rank_1.jsonl").write_text("")
    found = compare(one, other)
    assert found is not None
    assert found.what == "the number of ranks"
    with pytest.raises(FileNotFoundError, match="Run it with "):
        compare(one, tmp_path)


def test_hooks_are_removed_and_never_copied(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    recorder = Recorder(run_dir=RunDir(tmp_path), context=cpu_context())
    recorder.on_fit_start(FitInfo(model, 0, None, 10, None, optimizer))
    # An average of the weights starts with such a copy.
    copy.deepcopy(model)
    recorder.on_fit_end()
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks

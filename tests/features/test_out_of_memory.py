"""The report of a rank that ran out of memory: what it had allocated, the forecast, and a change that lowers it."""

from __future__ import annotations

import json
import os

import pytest
import torch

from framework import StepOutput

SHORT = ("recipe=toy", "trainer.max_steps=6", "checkpoint=none", "optimizer=adam")
NO_EVALUATION = ("trainer.limit_val_batches=0", "trainer.limit_test_batches=0")
TASK = ("~task", f"+task._target_={__name__}.Demanding")


class Demanding:
    """Runs out of memory on the last rank, in the forward of the third step."""

    def __init__(self):
        self.steps = 0

    def training_step(self, model, batch):
        self.steps += 1
        x, y = batch
        loss = torch.nn.functional.mse_loss(model(x), y)
        is_last = int(os.environ.get("RANK", "-1")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
        # The tensors of the forecast take no memory.
        if self.steps == 3 and is_last and type(loss) is torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return StepOutput(loss, len(x))


@pytest.mark.parametrize(
    ("procs", "batch", "change"),
    [
        (1, "data.batch_size=20", "data.batch_size=10 trainer.accumulate_grad_batches=2"),
        pytest.param(
            2,
            "data.global_batch_size=40",
            "trainer.accumulate_grad_batches=2",
            marks=(pytest.mark.exhaustive, pytest.mark.multiproc),
        ),
    ],
)
def test_the_report_has_memory_forecast_and_change(train, capfd, procs, batch, change):
    run = train(*SHORT, *NO_EVALUATION, *TASK, f"topology.procs_per_node={procs}", batch, status=1)
    report = json.loads((run / "failure.json").read_text())
    first = report["first"]
    assert (first["rank"], first["step"]) == (procs - 1, 2)
    weight_bytes = 165 * 4
    sizes = first["memory"]["by_category"]
    assert sizes["weights"] == weight_bytes
    # Adam has two numbers for each weight, and a step count for each of four tensors.
    assert sizes["optimizer"] == 2 * weight_bytes + 4 * 4
    assert {entry["name"] for entry in first["memory"]["largest"]} == {"net1", "net2"}

    forecast = report["forecast"]
    assert forecast["by_category"]["weights"] == weight_bytes
    assert forecast["change"]["typed"] == change
    assert forecast["change"]["peak_bytes"] < forecast["peak_bytes"]
    printed = " ".join(capfd.readouterr().err.split())
    assert "memory weights 660 B" in printed
    assert "at the peak of a step: weights 660 B" in printed
    assert f"try {change}: forecast " in printed

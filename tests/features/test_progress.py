"""What is printed, logged and shown of a run: before the first step and while it trains."""

from __future__ import annotations

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from tests.helpers import results
from tests.helpers.internals import module_table

SHORT = ("recipe=digits", "trainer.max_steps=4", "trainer.limit_val_batches=0", "checkpoint.monitor=null")


def test_model_data_and_processes_are_shown_first(train):
    run_dir = train(*SHORT, "data.batch_size=8", "trainer.accumulate_grad_batches=2", "optimizer=adam")
    # The log also holds what is printed.
    lines = [line.split() for line in results.log(run_dir).splitlines()]
    for line in (
        "model parameters trainable",
        "ConvNet 600,810 all",
        "features Sequential 9,568 all",
        "memory weights 2.40 MB, gradients 2.40 MB, optimizer 4.81 MB, checkpoint about 7.24 MB",
        "data train 1,257, val 180, test 360 samples",
        "steps global batch 16 (8 a forward × 2 accumulated), 79 steps an epoch, 4 in total",
        "processes 1 process, cpu, gloo, Single, 32-true",
    ):
        assert line.split() in lines
    full = "classifier.3  Linear           1,290  all"
    assert full in results.log(run_dir)
    events = EventAccumulator(str(run_dir)).Reload()
    assert full in events.Tensors("summary/text_summary")[0].tensor_proto.string_val[0].decode()


def test_progress_off_prints_start_end_and_warnings(train, capfd):
    logs = [results.log(train(*SHORT, f"trainer.progress={progress}")) for progress in ("plain", "off")]
    assert ["step 4  test/accuracy" in log for log in logs] == [True, False]
    assert ["epoch 0/14  step 4/4" in log for log in logs] == [True, False]
    # Rank 0's log holds the printed summary and the full one.
    assert [log.count("600,810  all") for log in logs] == [2, 1]
    for printed in capfd.readouterr().out.split("Training digits: 1 process, CPU")[1:]:
        assert "Finished digits after 4 steps" in printed


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.ReLU(), nn.LayerNorm(2))


@pytest.mark.usefixtures("own_state")
@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        (2, ["Sequential 30 20", "0 2 × Block 20 all", "1 Linear 10 none"]),
        (4, ["Sequential 30 20", "0 2 × Block 20 all", "0.0 Block 10 all", "0.1 Block 10 all", "1 Linear 10 none"]),
        (1, ["Sequential 30 20", "… 2 more"]),
    ],
)
def test_modules_are_listed_as_deep_as_fits(rows: int, shown: list[str]) -> None:
    model = nn.Sequential(nn.ModuleList([Block(), Block()]), nn.Linear(4, 2), nn.Tanh())
    model[1].requires_grad_(False)
    header, *lines = module_table(model, rows=rows).splitlines()
    assert header.split() == ["model", "parameters", "trainable"]
    assert [" ".join(line.split()) for line in lines] == shown

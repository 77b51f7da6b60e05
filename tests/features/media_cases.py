"""A task, callbacks and a logger that log more than numbers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure as MatplotlibFigure
from torch.nn.functional import mse_loss

from framework import Artifact, Figure, Histogram, Image, Log, StepOutput, Stop, Table, Text


class Showing:
    """Regression that shows what it sees, and prints when it is asked to."""

    def _step(self, model, batch) -> StepOutput:
        x, y = batch
        output = model(x)
        loss = mse_loss(output, y)

        def media() -> dict[str, Any]:
            print(f"SHOWN {'training' if model.training else 'validation'}", flush=True)
            return {"output": Histogram(output), "input": Image(x[:, :4].clamp(0, 1))}

        return StepOutput(loss, len(x), media=media)

    training_step = validation_step = _step


def everything(step: int) -> dict[str, Any]:
    figure = MatplotlibFigure(figsize=(2, 1))
    figure.add_subplot().plot([1, 2, step])
    return {
        "number": step,
        "image": Image(torch.full((3, 4, 5), 0.5), caption="grey"),
        "images": [Image(np.zeros((2, 2), dtype=np.uint8)), Image(np.full((1, 2, 2), 255))],
        "figure": Figure(figure),
        "histogram": Histogram(torch.arange(10)),
        "table": Table(["class", "accuracy"], [["a|b", 0.5], [None, np.int64(1)], [torch.float, torch.tensor(1)]]),
        "text": Text("some *text*"),
        "a file": Artifact("conf.txt"),
    }


class Reporting:
    """Reports from every hook that may; pairs with other numbers on each rank."""

    def __init__(self, context: Any, stop_after: int | None = None) -> None:
        self.rank = context.rank
        self.stop_after = stop_after

    def on_train_epoch_start(self, report):
        return Log({"epoch_start": report.epoch})

    def on_train_step_end(self, report):
        values: dict[str, Any] = {"step_sum": (report.step * (self.rank + 1), self.rank + 1)}
        if self.rank == 1:
            values["of_one_rank"] = (torch.tensor(4.0), torch.tensor(2))
        if report.step == 3:
            values["third"] = torch.tensor(float(self.rank + 3))
        return Log(values, stop=Stop("enough") if report.step == self.stop_after else None)

    def on_validation_end(self, report):
        return Log({**everything(report.step), "val_sum": (self.rank, 1)})

    def on_train_epoch_end(self, report):
        return Log({"epoch_end": report.epoch})


class Lines:
    """A logger with every method: a line of JSON in the run directory for each call."""

    def __init__(self, run_dir: Any) -> None:
        self.file = (run_dir.path / "lines.jsonl").open("a")

    def write(self, kind: str, tag: str, step: int | None, value: Any) -> None:
        print(json.dumps([kind, tag, step, value]), file=self.file)

    def metrics(self, values, *, step, epoch):
        for name, value in values.items():
            self.write("metrics", name, step, value)

    def text(self, tag, text, *, step):
        self.write("text", tag, step, text if tag != "config" else "")

    def images(self, tag, images, *, step):
        self.write("images", tag, step, [list(each.pixels.shape) for each in images])

    def histogram(self, tag, values, *, step):
        self.write("histogram", tag, step, len(values))

    def table(self, tag, table, *, step):
        self.write("table", tag, step, table.rows)

    def artifact(self, tag, path, *, step):
        self.write("artifact", tag, step, path.name)

    def hparams(self, config, metrics):
        self.write("hparams", config["recipe"], None, {**metrics, "lr": config["optimizer"]["lr"]})

    def close(self):
        self.file.close()


class Figures(Lines):
    def figure(self, tag, figure, *, step):
        self.write("figure", tag, step, type(figure).__name__)


class Numbers:
    """A logger without any of the optional methods."""

    metrics = text = close = lambda *_, **__: None

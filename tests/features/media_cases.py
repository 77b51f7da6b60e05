"""A task, callbacks and a logger that log more than numbers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure as MatplotlibFigure
from torch.nn.functional import mse_loss

from framework import Artifact, Figure, Histogram, Image, Log, Logger, StepOutput, Stop, Table, Text


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

    def on_train_epoch_start(self, info):
        return Log({"epoch_start": info.epoch})

    def on_train_step_end(self, info):
        values: dict[str, Any] = {"step_sum": (info.step * (self.rank + 1), self.rank + 1)}
        if self.rank == 1:
            values["of_one_rank"] = (torch.tensor(4.0), torch.tensor(2))
        if info.step == 3:
            values["third"] = torch.tensor(float(self.rank + 3))
        return Log(values, stop=Stop("enough") if info.step == self.stop_after else None)

    def on_validation_end(self, info):
        return Log({**everything(info.step), "val_sum": (self.rank, 1)})

    def on_train_epoch_end(self, info):
        return Log({"epoch_end": info.epoch})


class Lines(Logger):
    """A logger of everything: a line of JSON in the run directory for each value."""

    def __init__(self, run_dir: Any) -> None:
        self._file = (run_dir.path / "lines.jsonl").open("a")

    def log(self, values, *, step, epoch):
        for name, value in values.items():
            if isinstance(value, Text):
                self._write("text", name, step, value.text if name != "config" else "")
            elif isinstance(value, Image):
                self._write("images", name, step, [list(value.pixels.shape)])
            elif isinstance(value, list):
                self._write("images", name, step, [list(image.pixels.shape) for image in value])
            elif isinstance(value, Figure):
                self._write("figure", name, step, type(value.figure).__name__)
            elif isinstance(value, Histogram):
                self._write("histogram", name, step, len(value.values))
            elif isinstance(value, Table):
                self._write("table", name, step, value.rows)
            elif isinstance(value, Artifact):
                self._write("artifact", name, step, value.path)
            else:
                self._write("metrics", name, step, value)

    def on_results(self, metrics):
        self._write("results", "", None, dict(metrics))

    def close(self):
        self._file.close()

    def _write(self, kind: str, name: str, step: int | None, value: Any) -> None:
        print(json.dumps([kind, name, step, value]), file=self._file)


class Numbers:
    """A logger with the one method that it must have, and no base class."""

    log = lambda *_, **__: None  # noqa: E731

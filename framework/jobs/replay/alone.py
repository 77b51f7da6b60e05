"""Make one rank's part of a step alone, in the command's process, where a debugger may stop it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from framework.distributed.seed import restore_generator_states
from framework.errors import ConfigError
from framework.training.trainer import MakeStep, Trainer
from framework.types import Callback, FitInfo, MicroBatch, MicroIndices, Window, hooks


@final
class Alone(Callback):
    """Makes the step of a StepFile in place of the training's own first step. Comes after the Recorder."""

    def __init__(self, file: str) -> None:
        self._content: dict[str, Any] = torch.load(Path(file), map_location="cpu", weights_only=False)
        if self._content["exchanges"]:
            raise ConfigError(
                "The forward of this model exchanges values with other processes, so one process can't make it alone."
                "\nLeave rank and launcher=in_process out."
            )

    def observe_trainer(self, trainer: Trainer) -> None:
        self._trainer = trainer
        trainer.progress.step = self._content["step"] - 1
        trainer.progress.epoch = self._content["epoch"]
        trainer.repeat_alone(first_position=self._content["first_position"])
        trainer.wrap_steps(lambda make_step: partial(self._step, make_step))

    def on_fit_start(self, info: FitInfo) -> None:
        # A callback needs a hook, and this one works through `observe_trainer`.
        pass

    def _step(self, make_step: MakeStep, _: Window) -> Tensor:
        # Only now: hooks at the start of training and of the epoch may have changed what the task keeps.
        self._load_state()
        saved = self._content["micro_batches"]
        indices = []
        for micro, of_micro in zip(saved, self._content["indices"], strict=True):
            indices.append(MicroIndices(of_micro, micro["num_samples"]))
        window = Window(
            micro_batches=self._micro_batches(),
            num_micro_batches=len(saved),
            global_count=max(1, sum(micro["num_samples"] for micro in saved)),
            epoch_end=False,
            indices=tuple(indices),
        )
        return make_step(window)

    def _load_state(self) -> None:
        content = self._content
        state = self._trainer.state
        model = state.bare_model
        model.load_state_dict(content["model"])
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in content["trained"])
        for load in hooks([state.task], "load_state_dict"):
            if content["task"]:
                load(content["task"])
        for name, value in content["slots"].items():
            setattr(state.task, name, tree_map(self._moved, value))

    def _micro_batches(self) -> Iterator[MicroBatch]:
        for micro in self._content["micro_batches"]:
            restore_generator_states(micro["generators"], devices=self._trainer.context.devices)
            yield MicroBatch(tree_map(self._moved, micro["batch"]), micro["num_samples"])

    def _moved(self, value: Any) -> Any:
        """Return a tensor on this rank's device, and anything else as it is."""
        return value.to(self._trainer.context.device) if isinstance(value, Tensor) else value

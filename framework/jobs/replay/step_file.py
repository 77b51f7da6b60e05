"""The file of one rank's part of a step: plain tensors, to attach to a bug report.

    step = torch.load("step.pt", weights_only=False)
    model.load_state_dict(step["model"])
    micro = step["micro_batches"][0]
    torch.set_rng_state(micro["generators"]["cpu"])
    loss = functional.cross_entropy(model(micro["batch"][0]), micro["batch"][1])

`loss` is then `micro["loss"]`, bit for bit, on the same kind of device and with the same version of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from framework.distributed.seed import generator_states
from framework.distributed.sharded import full_tensor
from framework.training.trainer import Trainer
from framework.types import MicroBatch, Window, hooks


@final
class StepFile:
    """What a step begins with, and its micro-batches. Make it before the step; `add` is called before each forward."""

    def __init__(self, trainer: Trainer, window: Window) -> None:
        self._trainer = trainer
        self._window = window
        self._first_position = 0
        if window.indices and window.indices[0].num_samples:
            self._first_position = int(trainer.batch_info(window, index=0).positions[0])
        state = trainer.state
        self._model = {name: _copied(value) for name, value in state.bare_model.state_dict().items()}
        self._task = {}
        for state_dict in hooks([state.task], "state_dict"):
            self._task = tree_map(_copied, state_dict())
        # What belongs to the samples of this rank, by the names of the task's attributes.
        self._slots = {}
        for name in getattr(state.task, "slot_state", {}):
            self._slots[name] = tree_map(_copied, getattr(state.task, name))
        self._micro_batches: list[dict[str, Any]] = []

    def add(self, micro: MicroBatch) -> None:
        self._micro_batches.append(
            {
                "batch": tree_map(_copied, micro.batch),
                "num_samples": micro.num_samples,
                # As they are before the forward.
                "generators": generator_states(self._trainer.context.devices),
            }
        )

    def save(self, file: Path, *, losses: Sequence[Any]) -> None:
        """Write the file. losses: of the micro-batches that have samples, in order; of the first objective."""
        filled = [micro for micro in self._micro_batches if micro["num_samples"]]
        for micro, loss in zip(filled, losses, strict=False):
            micro["loss"] = loss
        model = self._trainer.state.bare_model
        strategy = self._trainer.state.strategy
        is_synced = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        content = {
            "step": self._trainer.progress.step + 1,
            "epoch": self._trainer.progress.epoch,
            "rank": self._trainer.context.rank,
            "world_size": self._trainer.context.world_size,
            "precision": self._trainer.settings.precision,
            "torch": torch.__version__,
            "model": self._model,
            "task": self._task,
            "slots": self._slots,
            "trained": [name for name, parameter in model.named_parameters() if parameter.requires_grad],
            "first_position": self._first_position,
            "indices": [micro.indices for micro in self._window.indices],
            # It can't be computed from this file alone.
            "exchanges": bool(strategy.forward_communicates or strategy.mixes_samples or is_synced),
            "micro_batches": self._micro_batches,
        }
        file.parent.mkdir(exist_ok=True)
        torch.save(content, file)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return full_tensor(value).detach().clone().cpu()
    return value

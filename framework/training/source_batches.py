"""Have a source make the batches of this rank, with the model as the last step left it."""

from __future__ import annotations

from typing import final

from framework.data.prefetch import to_device
from framework.data.source import SourceLoader
from framework.training.batch_info import BatchInfos
from framework.training.evaluation import evaluation_mode
from framework.training.train_state import TrainState
from framework.types import Batch, Window


@final
class SourceBatches:
    """Makes the batches of a loader's source, in evaluation mode and without gradients."""

    def __init__(self, state: TrainState, loader: SourceLoader, infos: BatchInfos) -> None:
        self._state = state
        self._source = loader.source
        self._infos = infos

    def __call__(self, window: Window, index: int) -> Batch:
        """Return this rank's batch of micro-batch `index` of a window, on the device."""
        state = self._state
        progress = state.progress
        info = self._infos.of(window, index=index, step=progress.step, epoch=progress.epoch)
        if state.source_slots:
            state.source_slots.begin_micro_batch(window, index)
        with evaluation_mode(state.bare_model), state.precision.autocast():
            batch = self._source.batch(state.bare_model, info)
        if state.source_slots:
            state.source_slots.end_micro_batch(window, index)
        return to_device(batch, state.context.device)

"""Number formats: what the model and batches are kept in, what autocast computes in, and how losses are scaled."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from framework.config.schema import Precision
from framework.data.batch_tree import map_tensors
from framework.types import Batch, Task

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_TRUE = {"bf16-true": torch.bfloat16, "64-true": torch.float64}


@final
class PrecisionPlugin:
    """`trainer.precision`, Lightning's names, for one kind of device.

    - 32-true: everything stays as it is.
    - bf16-mixed, 16-mixed: float32 weights, and matrix products in the short format (torch.autocast).
    - bf16-true, 64-true: the floats of the model and of batches are of that type.

    `scaler` is a GradScaler that does nothing except for 16-mixed, so one line serves all precisions.

    Args:
        channels_last: Weights and batches of four dimensions lie in memory with the channels last, NHWC, whatever their
            shape says (https://pytorch.org/tutorials/intermediate/memory_format_tutorial.html).
    """

    def __init__(self, precision: Precision, *, device: torch.device, channels_last: bool = False) -> None:
        self.dtype = _TRUE.get(precision)
        self._device = device
        # The memory format of tensors with four dimensions; None: as they are.
        self._memory_format = torch.channels_last if channels_last else None
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "16-mixed")
        short = _AUTOCAST.get(precision)
        self._autocast: AbstractContextManager[Any] = nullcontext()
        # Nothing computes on the meta device, which has no autocast.
        if short is not None and device.type != "meta":
            self._autocast = torch.autocast(device.type, dtype=short)

    def autocast(self) -> AbstractContextManager[Any]:
        """Surround forward and loss. Returns the same object every time, which can't be nested."""
        return self._autocast

    def convert_model(self, model: nn.Module) -> nn.Module:
        """Return the model with its floats in the true precision's type. Call it before the optimizer is made."""
        if self._memory_format is not None:
            model = model.to(memory_format=self._memory_format)
        if self.dtype is not None:
            model = model.to(dtype=self.dtype)
        return model

    def convert_task(self, task: Task, *, model: nn.Module) -> Task:
        """Move the task's modules to the device and convert their floating-point tensors to a true precision's type.

        The model and its parts, which may be attributes of the task, stay where they are.
        """
        of_model = set(model.modules())
        for module in task_modules(task):
            if module not in of_model:
                module.to(device=self._device, dtype=self.dtype)
        return task

    def convert_batch(self, batch: Batch) -> Batch:
        """Return the batch with its floating-point tensors in the true precision's type."""
        if self.dtype is None and self._memory_format is None:
            return batch
        return map_tensors(batch, self._convert)

    def _convert(self, tensor: Tensor) -> Tensor:
        dtype = tensor.dtype
        if self.dtype is not None and tensor.is_floating_point():
            dtype = self.dtype
        memory_format = torch.preserve_format
        if self._memory_format is not None and tensor.ndim == 4:
            memory_format = self._memory_format
        return tensor.to(dtype=dtype, memory_format=memory_format)


def task_modules(task: Task) -> list[nn.Module]:
    """Return the task's modules: itself if it is one, else those among its attributes, in lists and dicts too."""
    if isinstance(task, nn.Module):
        return [task]
    attributes = tree_leaves(getattr(task, "__dict__", {}))
    return [attribute for attribute in attributes if isinstance(attribute, nn.Module)]
